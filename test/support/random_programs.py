"""Random programs of all our ops (`shardir.testing.random_programs`), with torch's results.

Values are torch's, and an op is also dropped where its gradient by torch changes when the operands
change by a billionth.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from op_cases import CASES, REFERENCES
from xdsl.ir import Operation

from shardir.dialects import nn
from shardir.dialects.nn.base import Array
from shardir.testing import random_programs
from shardir.testing.random_programs import Usable, steady, usable_of
from support.harness import Problem, posed, torch_gradient
from support.reference import to_torch

OFTEN = (
    nn.AdaptiveAvgPoolOp, nn.ArgmaxOp, nn.AttentionOp, nn.ConvOp, nn.LayerNormOp, nn.MaxOp,
    nn.MaxPoolOp, nn.MinOp, nn.PadOp, nn.ReduceOp, nn.ReshapeOp, nn.SliceOp, nn.SortOp, nn.StdOp,
    nn.TopkOp, nn.UnfoldOp,
)  # fmt: skip
"""Ops that were wrong before: they are drawn three times as often as others."""


@cache
def usable() -> Usable:
    """Return the cases of each op with the element types in which a program can have them: bits as
    numbers leave the range of what other ops compute."""
    return {op: cases for op, cases in usable_of(CASES).items() if op is not nn.BitcastOp}


class ProgramWriter(random_programs.ProgramWriter):
    """Writes one program, with values and gradients of torch."""

    def __init__(self, seed: int):
        super().__init__(seed, usable(), OFTEN)

    def compute(self, op: Operation, inputs: Sequence[Array]) -> list[Array]:
        return [y.detach().numpy() for y in results(op, [to_torch(x) for x in inputs])]

    def is_smooth_at(self, op: Operation, inputs: Sequence[Array], near: Sequence[Array]) -> bool:
        pairs = zip(slopes(op, inputs), slopes(op, near), strict=True)
        return all(steady(d, e) for d, e in pairs)


def results(op: Operation, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results of an op by torch."""
    out = REFERENCES[type(op)](op, *inputs)
    return out if isinstance(out, tuple) else (out,)


def slopes(op: Operation, inputs: Sequence[Array]) -> list[Array]:
    """Return the cotangents of an op's float operands, for some cotangents of its results."""
    leaves = [t.requires_grad_(t.dtype.is_floating_point) for t in map(to_torch, inputs)]
    total = torch.zeros((), dtype=torch.float64)
    for y in results(op, leaves):
        if y.dtype.is_floating_point and y.requires_grad:
            dy = torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
            total = total + (y * dy).sum()
    floats = [t for t in leaves if t.requires_grad]
    if not total.requires_grad:
        return []
    found = torch.autograd.grad(total, floats, allow_unused=True)
    return [d.numpy() for d in found if d is not None]


def random_problem(seed: int, ops: int | None = None) -> Problem:
    """Return the program of a seed: with about `ops` ops, or five to twenty."""
    for attempt in range(100):
        w = ProgramWriter(seed * 100 + attempt)
        size = w.draw.randint(5, 20) if ops is None else ops
        while len(w.block.ops) < size:
            w.grow()
        p = finished(w)
        if p is not None:
            return p
    raise AssertionError(f"no smooth program of seed {seed}")


def finished(w: ProgramWriter) -> Problem | None:
    """Return the program that is written; None if it is not smooth."""
    found = w.finish()
    if found is None:
        return None
    module, wrt = found
    p = posed(module, wrt, w.arguments, w.rng)
    n = len(w.arguments)
    near = [w.noisy(a) for a in w.arguments]
    other = torch_gradient(p.module, near, wrt, p.arguments[n:])
    return (
        p
        if all(steady(np.asarray(x), np.asarray(y)) for x, y in zip(p.wanted, other, strict=True))
        else None
    )
