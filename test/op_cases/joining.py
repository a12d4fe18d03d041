from collections.abc import Sequence

import torch
from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import ALL, EVEN, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_attr

ints = nn.IntsPerDimAttr


def name(*lists: Sequence[int]) -> str:
    return "-".join("x".join(map(str, numbers)) for numbers in lists)


def concat(axis: int, *shapes: Shape) -> Case:
    return Case(f"{name(*shapes)}-{axis}", nn.ConcatOp, shapes, ALL, {"axis": int_attr(axis)})


def stack(axis: int, n: int, shape: Shape) -> Case:
    called = f"{n}-of-{name(shape)}-{axis}"
    return Case(called, nn.StackOp, (shape,) * n, ALL, {"axis": int_attr(axis)})


def split(shape: Shape, axis: int, *sizes: int) -> Case:
    props = {"sizes": ints(sizes), "axis": int_attr(axis)}
    return Case(f"{name(shape, sizes)}-{axis}", nn.SplitOp, (shape,), ALL, props)


CASES: list[Case] = [
    concat(0, EVEN, (2, 8)),
    concat(-1, ODD, (5, 1)),
    concat(1, (3, 2), (3, 0), (3, 5)),
    concat(0, ODD),
    stack(0, 2, EVEN),
    stack(-1, 3, ODD),
    stack(1, 5, (3, 2)),
    stack(0, 3, ()),
    split(EVEN, 1, 4, 4),
    split(ODD, 0, 1, 0, 4),
    split((2, 7, 3), -2, 3, 2, 2),
    split(ODD, 1, 3),
]


REFERENCES: dict[type[Operation], Reference] = {
    nn.ConcatOp: lambda op, *xs: torch.cat(xs, op.axis.value.data),
    nn.StackOp: lambda op, *xs: torch.stack(xs, op.axis.value.data),
    nn.SplitOp: lambda op, x: x.split(op.sizes.data, op.axis.value.data),
}
