"""Damaged variants of the examples (mutations.py), and hostile texts: always a message with a
location, no traceback, no hang, little memory; what is printed parses again.
"""

import sys
from pathlib import Path

import pytest
from support.extent import extent, sampled
from support.limits import problems_of
from support.mutations import EXAMPLES, WAYS, check, compiled, prepared

from shardir.diagnostics import ParseErrors
from shardir.syntax.parser import default_parser, parse

MUTANTS = extent(40, 2000)
BLOCK = 20


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepared()


@pytest.mark.parametrize("first", range(0, MUTANTS, BLOCK))
def test_mutants(first: int) -> None:
    """In the default form a quarter of the valid mutants are compiled, each in one of the ways."""
    ways: dict[int, list[str]] = {}
    for seed in range(first, first + BLOCK):
        others = list(WAYS)[1:]
        some = [] if seed % 4 else [others[seed // 4 % len(others)]]
        ways[seed] = ["parse", *extent(some, others)]
    found = check(ways)
    assert not found, "python test/mutations.py --show SEED\n" + "\n".join(found)


@pytest.mark.parametrize("path", sampled(EXAMPLES, 5), ids=lambda p: p.stem)
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
    texts = (
        opened,
        "builtin.module {\n" * 5000,
        "func.func @f(%x: " + "tuple<" * 20_000,
        "func.func @f() attributes {a = " + "[" * 50_000 + "} {\n",
        "func.func @f() attributes {a = " + "{b = " * 5000 + "}" * 5000 + "} {\n",
        "func.func @f(" + "(" * 50_000,
        "%a = nn.relu %b : (" + "tensor<" * 3000,
        "#a = [#a]\nfunc.func @f() attributes {a = #a} {\n func.return\n}",
    )
    default_parser()
    for text in texts:
        assert problems_of(lambda text=text: unlocated(text)) == []


def unlocated(text: str) -> list[str]:
    """The problems of the errors of a text, which has some."""
    with pytest.raises(ParseErrors) as e:
        parse(text, "hostile.ir")
    return [str(d) for d in e.value.errors if not d.line]


SLOW_STRINGS = [
    f'{before}"{"x" * 40}{end}'
    for before, close in (("opaque<", ', "b">'), ("[", "]"), ("array<i64: ", ">"), ("", ""))
    for end in (f'\\q"{close}', f'\v"{close}', f'\\"{close}', "", "\\")
]
"""Strings that xDSL's lexer does not match; it takes exponential time to say so."""


@pytest.mark.parametrize(
    "text",
    [
        "%a " * 3000,
        "%a, " * 3000,
        "%a : 1 " * 3000,
        " " * 100_000 + "x",
        '"' + "a" * 100_000,
        '"' + "\\" * 99_999,
        "// " + "x" * 100_000 + "\n}",
        "<" * 20_000 + ">" * 20_000,
        "a." * 20_000,
        "@" * 20_000,
        "}" * 20_000,
        "dist.mesh @m <" + "a = 1, " * 5000,
        "%x = nn.add " + "%y, " * 5000,
        *(f"func.func @f() attributes {{a = {a}}} {{ func.return }}" for a in SLOW_STRINGS),
    ],
    ids=lambda t: repr(t[:10] + t[-30:]),
)
def test_no_backtracking(text: str) -> None:
    default_parser()
    assert problems_of(lambda: unlocated(text)) == []


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
        code, _, err = compiled(path)
        assert code in (0, 1, 2)
        assert "Traceback" not in err
        assert code == 0 or "error" in err
    assert sys.getrecursionlimit() >= 900
