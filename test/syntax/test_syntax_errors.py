"""The errors of the parser and the verifier: messages and locations."""

# ruff: noqa: E501 (texts of programs)

import pytest
from support.parsers import messages, with_formats, with_test

from shardir.diagnostics import ParseErrors
from shardir.syntax.parser import parse
from shardir.syntax.verify import verify_all

WRONG = {
    "%x = nn.relu %y : (i32) -> i32": ["1:14 expected a defined value, got %y"],
    "nn.rellu": ["1:1 expected a registered operation, got nn.rellu; did you mean nn.relu?"],
    "func.func @f(%x: tensor<2xf32>) {\n  %y = nn.relu %x quick : (tensor<2xf32>) -> tensor<2xf32>\n  func.return\n}": [
        "2:19 expected ':' with types, or the end of nn.relu, got quick"
    ],
    "func.func @f(%x: tensor<8xf32>) {\n  %y = nn.unfold %x dim 0 step 2 offset 0 lowst : (tensor<8xf32>) -> tensor<4x3xf32>\n  func.return\n}": [
        "2:43 expected ':' with types, or the end of nn.unfold, got lowst; did you mean lowest?"
    ],
    "zz.frob": ["1:1 expected an operation of a registered dialect, got zz.frob"],
    '"nn.rellu"() : () -> ()': [
        "1:1 expected a registered operation, got nn.rellu; did you mean nn.relu?"
    ],
    "cmath.norm": [
        '1:1 expected "cmath.norm"(...), the only form of this operation, got cmath.norm'
    ],
    "arith.adf": ["1:1 expected a registered operation, got arith.adf; did you mean arith.addf?"],
    "func.func @f(%x: tensor<4xf32) {\n  func.return\n}": [
        "1:24 expected the '>' of this '<', got none, or too much nesting"
    ],
    "func.func @f() attributes {a = 1 {\n  func.return\n}": [
        "1:27 expected the '}' of this '{', got none, or too much nesting"
    ],
    'func.func @f() attributes {a = "x} {\n  func.return\n}': [
        "1:27 expected the closing '\"' of a string after this '{', got none"
    ],
    "func.func @f(%x: tensor<i32>, %x: tensor<i32>) {\n  func.return\n}": [
        "1:31 expected a new name, got %x"
    ],
    "func.func @f() {\n  func.return\n}\nfunc.func @f() {\n  func.return\n}": [
        "4:1 expected a new name, got @f"
    ],
    "func.func @f() {\n  func.return\n": [
        "2:13 expected a block name, an operation or '}', got the end of the file"
    ],
    "func.func @f() {": [
        "1:16 expected a block name, an operation or '}', got the end of the file"
    ],
    "func.func @f(%x: #a) {\n  func.return\n}": ["1:18 expected a type, got '#a'"],
    "dist.mesh @m <dp = 2, dp = 4>": ["1:23 expected axis dp once in the mesh, got it twice"],
    "dist.mesh @m <dp 2>": ["1:18 "],
    "dist.mesh m <dp = 2>": ["1:11 expected a symbol, got 'm'"],
    "#a = #dist.layot<@m, []>": [
        "1:6 expected a registered attribute, got #dist.layot; did you mean dist.layout?"
    ],
    "#a = 1\n#a = 2": ["2:1 expected a new name, got #a"],
    "func.func @f(%x: tensor<4xf32, #lay>) {\n  func.return\n}\n#lay1 = unit": [
        "1:32 expected a defined alias, got #lay; did you mean #lay1?"
    ],
    "builtin.module attributes {a = 1, a = 2} {\n}": [
        "1:35 a occurs twice in this dictionary; drop one of them"
    ],
    "builtin.module attributes {a = dense<2> : tensor<i128>} {\n}": [
        "1:32 expected numbers of a type of at most 64 bits, got dense<2> : tensor<i128>"
    ],
    "builtin.module attributes {a = dense<0.5> : tensor<f80>} {\n}": [
        "1:32 expected numbers of a type of at most 64 bits, got dense<0.5> : tensor<f80>"
    ],
    "builtin.module attributes {a = array<i65: 2>} {\n}": [
        "1:32 expected numbers of a type of at most 64 bits, got array<i65: 2>"
    ],
    "builtin.module attributes {a = 300 : i8} {\n}": ["1:32 "],
    "builtin.module attributes {a = 1.5 : i8} {\n}": ["1:32 expected a type of floats, got i8"],
    "builtin.module attributes {a = tensor<4xf33>} {\n}": [
        "1:41 expected a type, got f33; did you mean f32?"
    ],
    "builtin.module attributes {a = vector<4xq>} {\n}": ["1:41 "],
    'builtin.module attributes {a = "\\z"} {\n}': [
        "1:33 expected an escape of a string, got '\\\\z'"
    ],
    "}": ["1:1 expected an operation or the end of the file, got '}'"],
    "func.func @f() {\n}": ["1:1 the body of func.func is empty; it must end with a terminator"],
    'func.func @f() {\n  "test.termop"()[^a] : () -> ()\n}': [
        "2:19 expected a block of this region, got ^a"
    ],
    'fmt.either a "x" b': ["1:18 "],
    "fmt.attributes gren": ["1:16 expected 'green' or 'red', got 'gren'; did you mean green?"],
    "fmt.in_dict -> (i32)": ["1:1 "],
    '%a = "test.op"() : () -> i32\n"test.op"(%a#1) : (i32) -> ()': [
        "2:11 expected one of the 1 results of %a, got %a#1"
    ],
    '%a:2 = "test.op"() : () -> i32': ["1:1 test.op has 1 results, but 2 are named"],
    '"test.op"(%a) : () -> ()': ["1:1 expected 0 operands, one for each type, got 1"],
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(text: str) -> None:
    found = messages(text, with_formats() if text.startswith("fmt.") else with_test())
    assert len(found) == len(WRONG[text]), found
    for have, want in zip(found, WRONG[text], strict=True):
        assert have.startswith(want), found


NONE = "tensor<4xf32, #dist.layout<@none, [{d}]>>"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_missing_mesh_is_one_error(count: int) -> None:
    """At the first op that names it, with the number of the others."""
    lines = [f"  %x{i + 1} = nn.relu %x{i} : ({NONE}) -> {NONE}" for i in range(count - 1)]
    text = "\n".join([f"func.func @f(%x0: {NONE}) {{", *lines, "  func.return", "}"])
    with pytest.raises(ParseErrors) as e:
        parse(text, verify=True)
    (error,) = e.value.errors
    assert error.message.startswith("[M2] expected a declared mesh, got @none")
    assert error.line == 1
    assert error.notes == ((f"{count - 1} more ops name it",) if count > 1 else ())


def test_errors_are_in_the_order_of_the_text() -> None:
    """Those of dominance too, which are found last."""
    use = '  "test.op"(%a) : (tensor<i32>) -> ()\n  %a = "test.op"() : () -> tensor<i32>\n'
    call = "  func.call @none() : () -> ()\n"
    text = f"func.func @f() {{\n{use}{call}{call.replace('none', 'other')}  func.return\n}}"
    module = with_test().parse(text, verify=False)
    assert [d.line for d in verify_all(module)] == [2, 4, 5]


def test_dominance() -> None:
    """A use before the definition, and one in another branch, are errors; xDSL accepts both."""
    before = (
        "func.func @f() {\n"
        '  "test.op"(%a) : (tensor<i32>) -> ()\n  %a = "test.op"() : () -> tensor<i32>\n'
        "  func.return\n}"
    )
    assert messages(before, with_test()) == [
        "2:3 expected a definition of %a before its use, got one after it"
    ]
    beside = (
        '"test.op"() ({\n  "test.termop"()[^l, ^r] : () -> ()\n^l:\n'
        '  %a = "test.op"() : () -> i32\n  "test.termop"()[^j] : () -> ()\n^r:\n'
        '  "test.termop"()[^j] : () -> ()\n^j:\n  "test.termop"(%a) : (i32) -> ()\n}) : () -> ()'
    )
    assert messages(beside, with_test()) == [
        "9:3 expected a definition of %a that dominates its use, got another"
    ]
    through = beside.replace("^l, ^r", "^l").replace("^r:\n", "^r(%z: i32):\n")
    with_test().parse(through, verify=True)
    isolated = (
        '%a = "test.op"() : () -> i32\nfunc.func @f() {\n  "test.op"(%a) : (i32) -> ()\n'
        "  func.return\n}"
    )
    assert messages(isolated, with_test()) == ["3:13 expected a defined value, got %a"]


def test_every_op_is_verified() -> None:
    text = (
        "func.func @f(%x: tensor<2x3xf32>) {\n"
        + "".join(
            "  %a = nn.matmul %x, %x : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>\n".replace(
                "%a", f"%a{i}"
            )
            for i in range(3)
        )
        + "  func.return\n}"
    )
    found = messages(text)
    assert [f.split()[0] for f in found] == ["2:9", "3:9", "4:9"]


def test_caret() -> None:
    with pytest.raises(ParseErrors) as e:
        parse(
            "func.func @f(%x: tensor<f32>) {\n\t%y = nn.relu %x :: (tensor<f32>) -> tensor<f32>\n}",
            "a.ir",
        )
    assert str(e.value) == (
        "a.ir:2:19: error: expected a function type, got ':'\n"
        "  \t%y = nn.relu %x :: (tensor<f32>) -> tensor<f32>\n  \t                 ^"
    )
