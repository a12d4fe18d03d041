"""Statistics of f16 values along a sharded dimension: as precise as those of one device, which has
them in f32. Squares and sums overflow in f16, where the results do not."""

from dataclasses import replace

import numpy as np
import pytest
from op_cases import CASES, Case
from support.harness import (
    MESH,
    Arg,
    Problem,
    compiled,
    laid_out,
    layout,
    posed,
    problem_of,
    program,
)

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axis
from shardir.dialects import nn
from shardir.dialects.nn.base import decomposes

LARGE = 300.0
"""The deviation of the values: their squares are beyond 65,504, the largest number of f16."""

OVERFLOWING = (
    nn.VarOp, nn.SoftMarginLossOp, nn.KlDivLossOp, nn.SoftmaxGradOp, nn.RmsNormGradOp
)  # fmt: skip
"""Ops whose results or cotangents overflow too."""


def statistics() -> list[Case]:
    """A case of each op that is computed in f32, and decomposed where a dimension is sharded."""
    found: dict[type, Case] = {}
    for case in CASES:
        kinds = set(case.kinds) <= {"normal", ""}
        if case.op.PRECISION == "wide" and decomposes(case.op) and kinds and "f16" in case.elements:
            found.setdefault(case.op, case)
    return [case for op, case in found.items() if op not in OVERFLOWING]


def split(shapes: list[Shape], dim: int) -> list[Layout]:
    """Layouts with the last dimensions, or those before, split where they have several elements."""
    return [
        Layout("m", tuple(
            (Axis("b"),) if d == len(s) + dim and s[d] > 1 else () for d in range(len(s))
        ))
        for s in shapes
    ]  # fmt: skip


def large(case: Case) -> Problem:
    p = problem_of(case, "f16")
    given = p.arguments[: len(case.operands)]
    arguments = [x * LARGE if x.dtype.kind == "f" else x for x in given]
    rounded = [
        x.astype(np.float16).astype(x.dtype) if x.dtype.kind == "f" else x for x in arguments
    ]
    p = posed(p.module, p.wrt, rounded, np.random.default_rng(0))
    with np.errstate(over="ignore"):
        return replace(p, wanted=[np.asarray(x).astype(np.float16) for x in p.wanted])


@pytest.mark.parametrize("case", statistics(), ids=str)
def test_statistics_of_large_values(case: Case):
    p = large(case)
    shapes = [x.shape for x in p.arguments[: len(case.operands)]]
    for dim in (-1, -2):
        module = compiled(laid_out(p.module, MESH, split(shapes, dim)))
        assert not p.errors(module), f"dimension {dim}"


@pytest.mark.parametrize("keys", ["[{}, {}]", "[{a}, {}]", "[{b, a}, {}]"])
def test_scores_of_large_products(keys: str):
    """Attention: the products of queries and keys overflow, and times the scale they do not."""
    shapes = (4, 64), (8, 64), (8, 2)
    module = program(
        [Arg("f16", s) for s in shapes], lambda b, *x: [b.value(nn.AttentionOp, *x)], (0, 1, 2)
    )
    q, k = np.full(shapes[0], 40.0), np.full(shapes[1], 40.0)
    k[range(4), range(4)] = -40.0  # equal scores, which softmax weighs equally
    k[4:, ::2] = -40.0
    rng = np.random.default_rng(0)
    v = rng.normal(size=shapes[2]).astype(np.float16).astype(np.float64)
    p = posed(module, (0, 1, 2), [q, k, v], rng)
    given = [layout("[{}, {}]"), layout(keys), layout(keys)]
    assert not p.errors(compiled(laid_out(module, MESH, given)))
