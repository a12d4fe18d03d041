"""Products to which a bias is added: one call of torch's, whatever is between; others stay two."""

import numpy as np
import pytest
import torch
from support.emitted import functions_of
from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp

from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.syntax.parser import parse

TEXT = """
func.func @f(%x: tensor<2x3x4x{t}>, %w: {w}, %b: {b}) -> {results} {{
  %y = nn.{op} %x, %w : (tensor<2x3x4x{t}>, {w}) -> tensor<2x3x5x{t}>
  {between}
  %z = nn.add %y, %b : (tensor<2x3x5x{t}>, {b}) -> tensor<2x3x5x{t}>
  {after}
}}
"""
ROWS, COLUMNS = 'einsum "bij,kj->bik"', "matmul"
RETURN = "func.return %z : tensor<2x3x5xf32>"


def made(op: str, **parts: str) -> str:
    given = {
        "op": op, "t": "f32", "w": f"tensor<{'5x4' if op == ROWS else '4x5'}xf32>",
        "b": "tensor<5xf32>", "results": "tensor<2x3x5xf32>", "between": "", "after": RETURN,
    }  # fmt: skip
    return TEXT.format(**given | parts)


VECTOR = "%c = nn.square %b : (tensor<5xf32>) -> tensor<5xf32>"
ONE = {
    "F.linear(x, w, b)": made(ROWS),
    "F.linear(x, w.mT, b)": made(COLUMNS),
    "F.linear(x, w, c)": made(ROWS, between=VECTOR).replace("nn.add %y, %b", "nn.add %y, %c"),
}
BOTH = "func.return %y, %z : tensor<2x3x5xf32>, tensor<2x3x5xf32>"
TWO = {
    "read twice": made(ROWS, after=BOTH, results="(tensor<2x3x5xf32>, tensor<2x3x5xf32>)"),
    "no vector": made(ROWS, b="tensor<3x5xf32>"),
    "of rows": made(ROWS, b="tensor<3x1xf32>"),
    "integers": made(ROWS).replace("f32", "i32"),
}


def check(text: str) -> str:
    """Compare the emitted function with numpy, and return its text."""
    program = program_text(parse(text))
    kind = np.int32 if "i32" in text else np.float32
    shapes = [
        a.type.get_shape()
        for op in parse(text).ops
        if isinstance(op, FuncOp)
        for a in op.body.block.args
        if isinstance(a.type, TensorType)
    ]
    draw = np.random.default_rng(0)
    x, w, b = (draw.integers(-4, 5, s).astype(kind) for s in shapes)
    y = x @ (w.T if "kj" in text else w)
    z = y + (b * b if "nn.square" in text else b)
    found = functions_of(program)["f"](rt.Mesh([]), *map(torch.tensor, (x, w, b)))
    found = found if isinstance(found, tuple) else (found,)
    for mine, wanted in zip(found, [y, z][-len(found) :], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0)
    return program


@pytest.mark.parametrize("call", ONE)
def test_a_product_and_its_bias_are_one_call(call: str) -> None:
    program = check(ONE[call])
    assert f"z = {call}" in program and " @ " not in program


@pytest.mark.parametrize("why", TWO)
def test_other_sums_are_ops_of_their_own(why: str) -> None:
    assert "F.linear" not in check(TWO[why])
