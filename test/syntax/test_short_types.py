"""Types that are left out of the text: what is printed without them is the same program."""

from pathlib import Path

import pytest
from op_cases import CASES
from support.harness import program
from support.mutations import EXAMPLES
from xdsl.dialects.builtin import ModuleOp

import shardir
from shardir.diagnostics import ParseErrors
from shardir.syntax.parser import parse
from shardir.syntax.printer import print_module


def assert_survives(module: ModuleOp) -> str:
    """The module is that of its text with short types, which is returned."""
    text = print_module(module, short_types=True)
    assert parse(text, "short.ir").is_structurally_equivalent(module), text
    return text


def test_every_op_is_read_without_types_that_follow() -> None:
    for case in CASES:
        module = program(case.args(case.elements[0]), case.body(case.elements[0]))
        text = assert_survives(module)
        assert ": (" not in text.replace("%x0: ", ""), text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_survive(path: Path) -> None:
    assert_survives(parse(path.read_text(), path.name))


def test_the_local_view_survives() -> None:
    text = "\n".join(
        [
            "dist.mesh @m <dp = 2, tp = 2>",
            "func.func @f(%x: tensor<8x4xf32>, %w: tensor<4x6xf32, "
            '#dist.layout<@m, [{tp}, {}]>> {train.parameter = "w"}) -> tensor<f32> {',
            "  %h = nn.matmul %x, %w",
            "  %y = nn.reduce <mean> %h dims <0, 1>",
            "  func.return %y",
            "}",
            "train.step @step of @f <sgd, lr = 0.1>",
        ]
    )
    short = assert_survives(shardir.compile(text).module)
    # the shape and the layout of a shard do not follow from those of the operands
    assert "%h = nn.matmul %x, %w -> tensor<8x6xf32, #local" in short
    assert "    func.return %y, %w_1\n" in short


def test_a_layout_is_not_left_out() -> None:
    laid_out = "tensor<4x4xf32, #dist.layout<@m, [{d}, {}]>>"
    text = (
        "dist.mesh @m <d = 2>\nfunc.func @f(%x: tensor<4x4xf32>) {\n"
        f"  %y = nn.relu %x : (tensor<4x4xf32>) -> {laid_out}\n  func.return\n}}"
    )
    assert f"%y = nn.relu %x -> {laid_out}\n" in assert_survives(parse(text))


def test_forms_are_the_same_program() -> None:
    head = "func.func @f(%x: tensor<4x2xf32>, %w: tensor<2x3xf32>) -> tensor<4x3xf32> {\n"
    product, types = "  %y = nn.matmul %x, %w", "(tensor<4x2xf32>, tensor<2x3xf32>)"
    forms = [
        f"{head}{product} : {types} -> tensor<4x3xf32>\n  func.return %y : tensor<4x3xf32>\n}}",
        f"{head}{product} -> tensor<4x3xf32>\n  func.return %y\n}}",
        f"{head}{product} -> (tensor<4x3xf32>) loc(unknown)\n  return %y\n}}",
        f"{head}{product}\n  func.return %y\n}}",
    ]
    first, *others = (parse(text) for text in forms)
    assert all(other.is_structurally_equivalent(first) for other in others)


ERRORS = {
    "%a = nn.relu %y": "3:16: error: expected a value that is defined before, got %y; define it",
    "%a = nn.relu %xx": "expected a value that is defined before, got %xx; did you mean %x?",
    "%a = nn.relu %x#1": "expected one of the 1 results of %x, got %x#1",
    "%a = nn.add %x, %odd": "[T6] expected shapes that broadcast, got [4, 4] and [3, 3]",
    "%a = nn.reshape %x": "expected the result types of nn.reshape, which do not follow",
    "%a = nn.relu %local": "expected the result types of nn.relu, which do not follow",
    "%a = nn.relu %x -> tensor<4x5xf32>": "expected result 0 of type tensor<4x4xf32>, got",
    "func.call @g(%x)": "expected the result types of func.call, which do not follow",
}


@pytest.mark.parametrize("op", ERRORS)
def test_there_is_one_error_where_types_do_not_follow(op: str) -> None:
    """Uses of the value whose op has it are no errors of their own."""
    text = (
        "dist.mesh @m <d = 2>\nfunc.func @f(%x: tensor<4x4xf32>, %odd: tensor<3x3xf32>, "
        "%local: tensor<2x4xf32, #dist.local<@m, [{d}, {}]>>) {"
        f"\n  {op}\n  %b = nn.relu %a\n"
        "  %y = nn.relu %x : (tensor<4x4xf32>) -> tensor<4x4xf32>\n  func.return\n}"
    )
    with pytest.raises(ParseErrors) as e:
        parse(text if "%a" in op else text.replace("  %b = nn.relu %a\n", ""), verify=True)
    (error,) = e.value.errors
    assert ERRORS[op] in str(error)
