"""distributed-autodiff at other positions in a pipeline, on random programs."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.extent import extent
from support.harness import (
    apply,
    compiled,
    function,
    parts,
)
from support.random_programs import random_problem
from xdsl.ir import Operation

from shardir.interpret import run
from shardir.syntax.parser import parse
from shardir.testing.random_layouts import random_form

ORDERS = {
    "before the layouts": (
        "distributed-autodiff",
        "propagate-strategies",
        "insert-redistributions",
    ),
    "before redistribution": (
        "propagate-strategies",
        "distributed-autodiff",
        "insert-redistributions",
    ),
    "in the local view": (
        "propagate-strategies",
        "insert-redistributions",
        "lower-to-spmd",
        "distributed-autodiff",
    ),
    "last": (
        "propagate-strategies",
        "insert-redistributions",
        "lower-to-spmd",
        "simplify-communication",
        "fuse-communication",
        "distributed-autodiff",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_differentiation_at_other_positions(order: str):
    """It can be run before and after propagation, and in the local view."""
    for seed in range(1000, 1000 + extent(1, 60)):
        p = random_problem(seed)
        module, mesh = random_form(p.module, seed)
        compiled(module, (*ORDERS[order], "lower-to-spmd"))
        assert not p.errors(module, 100), f"seed {seed} on {mesh}"


SHIFTED = """
dist.mesh @m <d = 4>
#rows = #dist.local<@m, [{d}, {}]>
#equal = #dist.local<@m, [{}, {}]>
#varies = #dist.local<@m, [{}, {}], partial any {d}>
func.func private @shifted(%x: tensor<2x4xf64, #rows>, %w: tensor<4x4xf64, #equal>)
    -> tensor<2x4xf64, #rows> {
  %a = dist.reinterpret %x : (tensor<2x4xf64, #rows>) -> tensor<2x4xf64, #varies>
  %b = nn.softmax %a axis 0 : (tensor<2x4xf64, #varies>) -> tensor<2x4xf64, #varies>
  %c = dist.permute %b pairs <0, 1, 1, 2, 2, 3, 3, 0> over <d>
    : (tensor<2x4xf64, #varies>) -> tensor<2x4xf64, #varies>
  %s = nn.matmul %c, %w
    : (tensor<2x4xf64, #varies>, tensor<4x4xf64, #equal>) -> tensor<2x4xf64, #varies>
  %y = dist.reinterpret %s : (tensor<2x4xf64, #varies>) -> tensor<2x4xf64, #rows>
  func.return %y : tensor<2x4xf64, #rows>
}
func.func @f(%x: tensor<8x4xf64>, %w: tensor<4x4xf64>) -> tensor<8x4xf64> {
  %y = dist.manual @shifted(%x, %w) over <d = 4> strategy<(({d}, {}), ({}, {})) -> (({d}, {}),)>
    : (tensor<8x4xf64>, tensor<4x4xf64>) -> tensor<8x4xf64>
  %z = nn.tanh %y : (tensor<8x4xf64>) -> tensor<8x4xf64>
  func.return %z : tensor<8x4xf64>
}
train.gradient @g of @f wrt <0, 1>
"""


@pytest.mark.parametrize("order", ORDERS)
def test_manual_computations_are_differentiated(order: str) -> None:
    """As functions of their own, and once they are inlined: as torch does."""
    module = parse(SHIFTED)
    for name in (*ORDERS[order], "lower-to-spmd"):
        apply(module, name)
    module.verify()
    x, w, d = (torch.randn(*s, dtype=torch.float64) for s in ((8, 4), (4, 4), (8, 4)))
    got = run(module, "g", [v.numpy() for v in (x, w, d)])
    x.requires_grad_(), w.requires_grad_()
    parts = x.reshape(4, 2, 4).softmax(1).roll(1, 0)
    y = (parts.reshape(8, 4) @ w).tanh()
    y.backward(d)
    for have, want in zip(got, (y, x.grad, w.grad), strict=True):
        assert want is not None
        np.testing.assert_allclose(have, want.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_collectives_of_the_local_view_stay():
    """The forward part is the function as it was written: its collectives, and the other ops, which
    may have further results that the backward part reads."""

    def shown(ops: Sequence[Operation]) -> list[tuple[str, dict[str, str], list[str]]]:
        return [
            (
                op.name,
                {n: str(a) for n, a in op.properties.items()},
                [str(v.type) for v in op.results],
            )
            for op in ops
        ]

    seen: set[str] = set()
    for seed in range(1000, 1000 + extent(4, 20)):
        module, _ = random_form(random_problem(seed).module, seed)
        compiled(module, ORDERS["last"][:-1])
        before = shown(list(function(module, "f").body.block.ops)[:-1])
        apply(module, "distributed-autodiff")
        after = shown(parts(module, "g")[0])
        for (name, properties, types), (new_name, new_properties, new_types) in zip(
            before, after, strict=True
        ):
            seen.add(name)
            if not name.startswith("nn."):
                assert (name, properties, types) == (new_name, new_properties, new_types), seed
            assert name == new_name and properties.items() <= new_properties.items(), seed
            assert types == new_types[: len(types)], seed
    assert {"dist.all_reduce", "dist.all_gather", "dist.all_slice"} <= seen
