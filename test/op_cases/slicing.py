from collections.abc import Sequence

import torch
from support.reference import Reference
from torch.nn import functional
from xdsl.dialects.builtin import FloatAttr
from xdsl.ir import Operation

from op_cases.case import ALL, EVEN, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_attr

ints = nn.IntsPerDimAttr


def name(*lists: Sequence[int]) -> str:
    return "-".join("x".join(map(str, numbers)) for numbers in lists)


def cut(shape: Shape, *bounds: tuple[int, int, int]) -> Case:
    """A slice with start, limit and stride of each dimension."""
    starts, limits, strides = (ints(n) for n in zip(*bounds, strict=True))
    props = {"starts": starts, "limits": limits, "strides": strides}
    return Case(name(shape, *bounds), nn.SliceOp, (shape,), ALL, props)


def pad(shape: Shape, low: Shape, high: Shape, value: float | None = None) -> Case:
    props: dict[str, ints | FloatAttr] = {"low": ints(low), "high": ints(high)}
    if value is not None:
        props["value"] = float_attr(value)
    called = name(shape, low, high) + (f"-{value}" if value is not None else "")
    return Case(called, nn.PadOp, (shape,), ALL, props)


CASES: list[Case] = [
    cut(EVEN, (0, 4, 1), (2, 7, 1)),
    cut(EVEN, (1, 4, 2), (0, 8, 3)),
    cut((9, 4), (5, 7, 1), (1, 4, 1)),
    cut((11, 5), (3, 11, 4), (4, 5, 1)),
    cut(ODD, (2, 2, 1), (0, 3, 1)),
    cut(ODD, (0, 5, 1), (0, 3, 1)),
    cut((2, 4, 7), (0, 2, 1), (0, 3, 2), (6, 7, 1)),
    cut((7,), (1, 7, 5)),
    pad(EVEN, (0, 2), (0, 1)),
    pad(ODD, (3, 0), (0, 2)),
    pad(ODD, (-2, 1), (1, -1)),
    pad(ODD, (-5, 0), (2, 0)),
    pad(EVEN, (1, 0), (0, 1), 1.0),
    pad((5,), (0,), (0,), 2.0),
    pad((2, 0, 3), (0, 2, 1), (0, 1, 0)),
]


def _pad(op: nn.PadOp, x: torch.Tensor) -> torch.Tensor:
    sides = [n for pair in zip(op.low.data, op.high.data, strict=True) for n in reversed(pair)]
    value = op.value.value.data if op.value is not None else 0
    return functional.pad(x, sides[::-1], value=value)


REFERENCES: dict[type[Operation], Reference] = {
    nn.SliceOp: lambda op, x: x[
        tuple(
            slice(*bounds)
            for bounds in zip(op.starts.data, op.limits.data, op.strides.data, strict=True)
        )
    ],
    nn.PadOp: _pad,
}
