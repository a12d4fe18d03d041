"""Damaged variants of the examples: always a message with a location, no traceback, no hang.

Each seed damages one example (cut, deleted, inserted, doubled, swapped text, wrong numbers and
types) and runs the driver on it, with and without the passes.
"""

import io
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from shardir.diagnostics import ParseErrors
from shardir.syntax.parser import parse
from shardir.tools.opt import main

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.ir"))
SEEDS = 200
SECONDS = 60
NOISE = [*'%@#!<>(){}[]:,="\\\0\n\r\t -+/.x0é', "\u2028", "\U0001f600", "//", "->", "loc("]
TYPES = ["f32", "f33", "i1", "tensor<*xf32>", "tensor<4xf32>", "index", "()", "!a.b", "none"]


def mutate(r: random.Random, text: str) -> str:
    """Return the text with one random kind of damage at one position."""
    at = r.randrange(len(text))
    end = min(len(text), at + r.randrange(1, 30))
    lines = text.split("\n")
    row = r.randrange(len(lines))
    kinds = {
        "truncate": lambda: text[:at],
        "delete": lambda: text[:at] + text[end:],
        "insert": lambda: text[:at] + r.choice(NOISE) + text[at:],
        "double": lambda: text[:end] + text[at:],
        "delete line": lambda: "\n".join(lines[:row] + lines[row + 1 :]),
        "double line": lambda: "\n".join(lines[: row + 1] + lines[row:]),
        "swap words": lambda: swap(r, text),
        "numbers": lambda: re.sub(
            r"\b\d+\b", lambda m: r.choice(["0", "7", "-1", "9" * 40, *[m[0]] * 9]), text
        ),
        "types": lambda: re.sub(
            r"tensor<[^<>]*>", lambda m: r.choice([*TYPES, *[m[0]] * 20]), text
        ),
        "byte": lambda: text[:at] + chr(r.randrange(0x250)) + text[at + 1 :],
    }
    return kinds[r.choice(list(kinds))]()


def swap(r: random.Random, text: str) -> str:
    words = re.findall(r"[\w.%@#!]+|\s+|.", text)
    i, j = r.randrange(len(words)), r.randrange(len(words))
    words[i], words[j] = words[j], words[i]
    return "".join(words)


def variant(seed: int) -> str:
    r = random.Random(seed)
    text = r.choice(EXAMPLES).read_text()
    for _ in range(r.choice([1, 1, 1, 3])):
        text = mutate(r, text) or " "
    return text


def run(path: Path, *args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), at_most(SECONDS):
        code = main([str(path), *args])
    return code, out.getvalue(), err.getvalue()


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Ends what hangs, so that it fails here instead of holding up every other test."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_traceback(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.ir"
    text = variant(seed)
    path.write_text(text, newline="")
    for args in ((), ("-p", "train")):
        code, _, err = run(path, *args)
        assert "Traceback" not in err
        assert code in (0, 1), f"exit code {code}\n{err}\n{text}"
        assert (code == 0) == ("error:" not in err)
        if code:  # every error has a location, or is one of the entire program
            assert all(str(path) in line for line in err.splitlines() if ": error: " in line)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_cut_anywhere(path: Path) -> None:
    """Every prefix of an example is a program or has an error."""
    text = path.read_text()
    step = max(1, len(text) // 80)
    for at in range(0, len(text), step):
        try:
            parse(text[:at], "cut.ir")
        except ParseErrors as e:
            assert e.errors and all(d.line for d in e.errors)


def test_deep_nesting() -> None:
    opened = '"a.b"() ({\n' * 5000
    for text in (
        opened,
        "builtin.module {\n" * 5000,
        "func.func @f(%x: " + "tuple<" * 20_000,
        "func.func @f() attributes {a = " + "[" * 50_000 + "} {\n",
        "func.func @f() attributes {a = " + "{b = " * 5000 + "}" * 5000 + "} {\n",
        "func.func @f(" + "(" * 50_000,
        "%a = nn.relu %b : (" + "tensor<" * 3000,
        "#a = [#a]\nfunc.func @f() attributes {a = #a} {\n func.return\n}",
    ):
        start = time.perf_counter()
        with pytest.raises(ParseErrors) as e:
            parse(text, "deep.ir")
        assert e.value.errors
        assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    "text",
    [
        "%a " * 3000,
        "%a, " * 3000,
        "%a : 1 " * 3000,
        " " * 100_000 + "x",
        '"' + "a" * 100_000,
        '"' + "\\" * 99_999,
        "// " + "x" * 100_000,
        "<" * 20_000 + ">" * 20_000,
        "a." * 20_000,
        "@" * 20_000,
        "}" * 20_000,
        "dist.mesh @m <" + "a = 1, " * 5000,
        "%x = nn.add " + "%y, " * 5000,
    ],
    ids=lambda t: repr(t[:10]),
)
def test_no_backtracking(text: str) -> None:
    start = time.perf_counter()
    try:
        parse(text)
    except ParseErrors as e:
        str(e)
    assert time.perf_counter() - start < 5


def test_huge_numbers() -> None:
    number = "9" * 10_000
    for text in (
        f"func.func @f() attributes {{a = {number}}} {{\n  func.return\n}}",
        f"func.func @f(%x: tensor<{number}xf32>) {{\n  func.return\n}}",
        f"func.func @f(%x: i{number}) {{\n  func.return\n}}",
        f"dist.mesh @m <d = {number}>",
        f"%x:{number} = nn.constant dense<1.0> : tensor<2xf32> -> tensor<2xf32>",
        f'func.func @f() {{\n  func.return loc("a":{number}:1)\n}}',
        "func.func @f() attributes {a = 99999999999 : i8} {\n  func.return\n}",
    ):
        with pytest.raises(ParseErrors) as e:
            parse(text, verify=True)
        assert e.value.errors[0].line


def test_strange_bytes(tmp_path: Path) -> None:
    for data in (
        b"\xff\xfe\x00",
        b"\x00",
        b"func.func @f() \xc3",
        b"\xef\xbb\xbf",
        bytes(range(256)),
    ):
        path = tmp_path / "strange.ir"
        path.write_bytes(data)
        code, _, err = run(path)
        assert code in (0, 1, 2)
        assert "Traceback" not in err
        assert code == 0 or "error" in err
    assert sys.getrecursionlimit() >= 900
