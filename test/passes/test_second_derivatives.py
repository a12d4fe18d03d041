"""Gradients of gradients, compared with torch and with a Hessian."""

from typing import Any

import numpy as np
import pytest
import torch
from support.bodies import f64, matmul, mean
from support.harness import (
    MESH,
    apply,
    compiled,
    differs,
    function,
    laid_out,
    layout,
    program,
)
from support.reference import torch_forward
from xdsl.dialects.builtin import StringAttr, SymbolRefAttr

import shardir
from shardir.dialects import nn, train
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.properties import dims_attr, int_attr
from shardir.interpret import run


@pytest.mark.parametrize("texts", [None, ["[{a}, {}]", "[{}, {b}]"]], ids=["plain", "laid out"])
def test_second_derivatives(texts: list[str] | None):
    """@h of @g of @f: its cotangents are those of the gradient, and 1 for the loss."""
    args = [f64(6, 4), f64(4, 6)]

    def body(b: OpBuilder, x: Any, w: Any) -> Any:
        y = b.value(nn.SoftmaxOp, b.value(nn.TanhOp, matmul(b, x, w)), props={"axis": int_attr(1)})
        return mean(b, b.mul(y, b.value(nn.SigmoidOp, y)))

    module = program(args, body, (0, 1))
    module.body.block.add_op(train.GradientOp.create(properties={
        "sym_name": StringAttr("h"), "function": SymbolRefAttr("g"), "wrt": dims_attr(1, 0),
    }))  # fmt: skip
    f = function(module, "f")
    rng = np.random.default_rng(3)
    x, w, dx, dw = (rng.standard_normal(s) for s in ((6, 4), (4, 6)) * 2)
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, w)]
    (loss,) = torch_forward(f, leaves)
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    total = loss + (first[0] * torch.tensor(dx)).sum() + (first[1] * torch.tensor(dw)).sum()
    second = torch.autograd.grad(total, [leaves[1], leaves[0]])
    if texts is None:
        apply(module, "distributed-autodiff")
    else:
        module = compiled(laid_out(module, MESH, [layout(t) for t in texts]), check=True)
    found = run(module, "h", [x, w, dx, dw])
    for y, wanted in zip(found, (loss, *first, *second), strict=True):
        assert not differs(y, wanted.detach().numpy(), "f64", 10)


@pytest.mark.parametrize("x", [[1.0, 2, 3, 4], [0.0, 2, 3, 4], [0.0, 0, 3, 4], [0.0, 0, 0, 4]])
def test_the_second_derivative_of_a_product_at_zeros(x: list[float]):
    """The slope of sum(g v) + f is H v + g: H has the products of all elements but two."""
    module = shardir.compile("""
      func.func @f(%x: tensor<4xf64>) -> tensor<f64> {
        %y = nn.reduce <prod> %x dims <0> : (tensor<4xf64>) -> tensor<f64>
        func.return %y : tensor<f64>
      }
      train.gradient @g of @f wrt <0>
      train.gradient @h of @g wrt <0>
    """).module
    v = np.random.default_rng(0).standard_normal(4)

    def without(*gone: int) -> float:
        return float(np.prod([x[k] for k in range(4) if k not in gone]))

    hessian = [[without(i, j) if i != j else 0.0 for j in range(4)] for i in range(4)]
    gradient = [without(i) for i in range(4)]
    found = run(module, "h", [np.array(x), v])
    np.testing.assert_allclose(found[1], gradient, atol=1e-12)
    np.testing.assert_allclose(found[2], np.array(hessian) @ v + gradient, atol=1e-12)
