"""Damaged variants of the examples, and what the compiler must do with each of them.

A variant is an example with one to three mutations: of characters, tokens, numbers or structure.
`check` compiles it in another process, with limits of CPU time and memory, in the ways of WAYS;
what is printed must parse again to the same text.

    python test/mutations.py --mutants 10000 --jobs 2     # also: make fuzz
"""

import argparse
import io
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

from support.limits import problems_of

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.ir"))
WAYS = {"parse": (), "train": ("-p", "train"), "auto": ("--mode", "auto"),
        "torch": ("-p", "train", "-t", "torch")}  # fmt: skip
"""The commands that a variant is tried with, by name; those after the first where it is valid."""

NOISE = [*'%@#!<>(){}[]:,="\\\0\n\r\t\v\f -+/.x0é', "\u2028", "\U0001f600", "//", "->", "loc("]
NUMBERS = [
    "0", "1", "2", "3", "7", "-1", "1024", "65536", "2147483648", "1099511627776",
    "9223372036854775807", "18446744073709551616", "9" * 40, "1.0e400", "-1.0e400", "1.0e-400",
    "0x7ff0000000000000", "0x7fc00000", "1.5", "true", "-0.0",
]  # fmt: skip
ELEMENTS = [
    "f16", "bf16", "f64", "i1", "i8", "i64", "ui8", "si4", "i7", "i128", "f80", "f128", "tf32",
    "f8E5M2", "f4E2M1FN", "index", "none", "i16777215", "complex<f32>", "vector<4xf32>",
]  # fmt: skip
TYPES = [
    "f32", "f33", "i1", "tensor<*xf32>", "tensor<4xf32>", "tensor<f32>", "index", "()", "!a.b",
    "none", "tensor<0x4xf32>", "tensor<1099511627776xf32>", "tensor<i8589934592>", "() -> ()",
    "(tensor<f32>) -> tensor<f32>", "tuple<tensor<4xf32>>", "tensor<?x4xf32>",
]  # fmt: skip
ATTRIBUTES = [
    '"a"', "unit", "[]", "{}", "@f", "1.0e400 : f64", "dense<0.0> : tensor<1099511627776xf32>",
    'opaque<"' + "x" * 40 + '\\q", "b">', "affine_map<(d0) -> (d0)>", "array<i64: 1>", "f32",
    "0x7f800000 : f32", '"' + "x" * 60,
]  # fmt: skip
TOKEN = re.compile(r'"[^"\n]*"|[%@#!^]?[\w$.]+|->|[^\S\n]+|\n|.')
NUMBER = re.compile(r"(?<![\w%@#])-?\d+(?:\.\d+(?:[eE][-+]?\d+)?)?(?![\w.])|\b\d+(?=x)")
TENSOR = r"tensor<[^<>]*(?:<[^<>]*>[^<>]*)?>"
KINDS = (
    r"%[\w$.]+", r"@[\w$.]+", r"(?:nn|dist|train)\.[\w.]+", TENSOR, r"<[^<>\n]*>",
    r"\{[^{}\n]*\}", r"\[[^\[\]\n]*\]", r"\([^()\n]*\)", r"#[\w.]+<[^<>]*>",
)  # fmt: skip
"""Texts of one kind, which stand for each other: values, symbols, ops, types, lists."""


@cache
def lines_of_all() -> list[str]:
    """The lines of all examples, for splicing."""
    return [
        line for path in EXAMPLES for line in path.read_text().splitlines()
        if line.strip() and not line.lstrip().startswith("//")
    ]  # fmt: skip


def mutate(r: random.Random, text: str) -> str:
    """The text with one random mutation."""
    return r.choice(MUTATIONS)(r, text) or " "


def characters(r: random.Random, text: str) -> str:
    """Cuts, deletes, doubles, inserts or replaces characters."""
    at = r.randrange(len(text))
    end = min(len(text), at + r.randrange(1, 30))
    return r.choice(
        [
            text[:at],
            text[:at] + text[end:],
            text[:at] + r.choice(NOISE) + text[at:],
            text[:end] + text[at:],
            text[:at] + chr(r.randrange(0x250)) + text[at + 1 :],
        ]
    )


def tokens(r: random.Random, text: str) -> str:
    """Exchanges two tokens, drops one, or doubles one."""
    found = TOKEN.findall(text)
    i, j = r.randrange(len(found)), r.randrange(len(found))
    kind = r.randrange(3)
    if kind == 0:
        found[i], found[j] = found[j], found[i]
    else:
        found[i : i + 1] = [found[i]] * (2 if kind == 1 else 0)
    return "".join(found)


def kin(r: random.Random, text: str) -> str:
    """Replaces a text by another one of its kind, of this or of another example."""
    kind = r.choice(KINDS)
    found = list(re.finditer(kind, text))
    if not found:
        return text
    others = [m[0] for m in found]
    if r.random() < 0.3:
        others = re.findall(kind, r.choice(EXAMPLES).read_text()) or others
    return replaced(text, r.choice(found), r.choice(others))


def numbers(r: random.Random, text: str) -> str:
    """Replaces one number by one at a limit, everywhere or at one place."""
    found = list(NUMBER.finditer(text))
    if not found:
        return text
    m, number = r.choice(found), r.choice(NUMBERS)
    if r.random() < 0.3:
        return re.sub(rf"(?<![\w%@#.]){re.escape(m[0])}(?=x|\b)", number, text)
    return replaced(text, m, number)


def types(r: random.Random, text: str) -> str:
    """Replaces a type, or an element type everywhere or at one place."""
    if r.random() < 0.5:
        found = list(re.finditer(TENSOR, text))
        return replaced(text, r.choice(found), r.choice(TYPES)) if found else text
    element = r.choice(ELEMENTS)
    found = list(re.finditer(r"\b(?:f32|i32|f16|bf16)\b", text))
    if not found:
        return text
    m = r.choice(found)
    return re.sub(rf"\b{m[0]}\b", element, text) if r.random() < 0.5 else replaced(text, m, element)


def attributes(r: random.Random, text: str) -> str:
    """Replaces a value of a dictionary or an option, or adds one to a function."""
    found = list(re.finditer(r"(?<== )[^\s,{}\[\]()<>]+", text))
    if found and r.random() < 0.7:
        value = r.choice([*ATTRIBUTES, *NUMBERS])
        return replaced(text, r.choice(found), value)
    found = list(re.finditer(r" \{\n", text))
    if not found:
        return text
    return replaced(text, r.choice(found), f" attributes {{a = {r.choice(ATTRIBUTES)}}} {{\n")


def structure(r: random.Random, text: str) -> str:
    """Drops, doubles, moves or splices lines."""
    lines = text.split("\n")
    row, other = r.randrange(len(lines)), r.randrange(len(lines))
    end = min(len(lines), row + r.choice([1, 1, 1, 2, 5, 20]))
    block = lines[row:end]
    rest = lines[:row] + lines[end:]
    return "\n".join(
        r.choice(
            [
                rest,
                lines[:end] + lines[row:],
                rest[:other] + block + rest[other:],
                [*lines[:row], r.choice(lines_of_all()), *lines[row:]],
                [*lines[:row], r.choice(lines_of_all()), *lines[row + 1 :]],
            ]
        )
    )


MUTATIONS: list[Callable[[random.Random, str], str]] = [
    characters, tokens, kin, kin, numbers, numbers, types, attributes, structure,
]  # fmt: skip


def replaced(text: str, m: re.Match[str], by: str) -> str:
    return text[: m.start()] + by + text[m.end() :]


def variant(seed: int) -> str:
    """The mutant of a seed."""
    r = random.Random(seed)
    text = r.choice(EXAMPLES).read_text()
    for _ in range(r.choice([1, 1, 1, 3])):
        text = mutate(r, text)
    return text


def compiled(path: Path, *args: str) -> tuple[int, str, str]:
    """The exit code, the output and the errors of shard-opt."""
    from shardir.tools.opt import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(path), *args])
    return code, out.getvalue(), err.getvalue()


def problems(text: str, ways: Sequence[str] = tuple(WAYS)) -> list[str]:
    """The problems of compiling a text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "damaged.ir")
        path.write_text(text, newline="")
        return problems_in(path, ways)


def problems_in(path: Path, ways: Sequence[str]) -> list[str]:
    """The problems of compiling the program of a file."""
    found: list[str] = []
    for way in ways:
        code, out, err = compiled(path, *WAYS[way])
        found += [f"{way}: {text}" for text in wrong_errors(path, code, err)]
        if way == "torch" and code == 0:
            try:
                compile(out, "program.py", "exec")
            except (SyntaxError, ValueError) as e:
                found.append(f"{way}: the program is not Python: {e}")
        elif code == 0:
            found += [f"{way}: {text}" for text in unread(path, out)]
        if way == "parse" and code:
            break
    return found


def wrong_errors(path: Path, code: int, err: str) -> list[str]:
    """The problems of an exit code and its errors."""
    if code not in (0, 1):
        return [f"exit code {code}: {err[-300:]}"]
    if "Traceback" in err:
        return [f"a traceback: {err[-300:]}"]
    if (code == 0) != ("error:" not in err):
        return [f"exit code {code} with the errors {err[-300:]}"]
    lines = [line for line in err.splitlines() if ": error: " in line]
    return [f"no location: {line}" for line in lines if str(path) not in line]


def unread(path: Path, printed: str) -> list[str]:
    """The problems of printed text: it parses to a module that prints the same."""
    again = path.with_suffix(".printed.ir")
    again.write_text(printed, newline="")
    code, out, err = compiled(again)
    if code:
        return [f"what is printed does not parse: {err[-300:]}"]
    return [] if out == printed else ["what is printed changes when it is printed again"]


def check(ways: Mapping[int, Sequence[str]]) -> list[str]:
    """The problems of compiling mutants in these ways, in one process for all of them. It has the
    limits of one: where it finds a problem, or ends, each mutant is tried again in its own."""
    wrong = problems_of(lambda: [text for s in ways for text in problems(variant(s), ways[s])])
    if len(ways) == 1:
        return [f"{seed}: {text}" for seed in ways for text in wrong]
    alone = [text for s in ways for text in check({s: ways[s]})] if wrong else []
    return alone or wrong


def prepared() -> None:
    """Imports all and makes the parser, which the forked processes share."""
    for args in WAYS.values():
        compiled(min(EXAMPLES, key=lambda path: path.stat().st_size), *args)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles damaged variants of the examples.")
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, help="print the mutant of a seed")
    args = parser.parse_args()
    if args.show is not None:
        print(variant(args.show), end="")
        return 0
    prepared()
    seeds = range(args.first, args.first + args.mutants)
    wrong = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(lambda s: check({s: tuple(WAYS)}), seeds):
            wrong += bool(found)
            for text in found:
                print(text, flush=True)
    print(f"{args.mutants} mutants, {wrong} with problems")
    return int(wrong > 0)
