from collections.abc import Sequence

from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import ALL, EVEN, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import dims_attr, int_attr

ints = nn.IntsPerDimAttr


def name(*lists: Sequence[int]) -> str:
    return "-".join("x".join(map(str, numbers)) for numbers in lists)


def flip(shape: Shape, *dims: int) -> Case:
    return Case(name(shape, dims), nn.FlipOp, (shape,), ALL, {"dims": dims_attr(*dims)})


def roll(shape: Shape, *shifts: int) -> Case:
    return Case(name(shape, shifts), nn.RollOp, (shape,), ALL, {"shifts": ints(shifts)})


def tile(shape: Shape, *repeats: int) -> Case:
    return Case(name(shape, repeats), nn.TileOp, (shape,), ALL, {"repeats": ints(repeats)})


def interleave(shape: Shape, repeats: int, axis: int) -> Case:
    props = {"repeats": int_attr(repeats), "axis": int_attr(axis)}
    return Case(f"{name(shape)}-{repeats}-{axis}", nn.RepeatInterleaveOp, (shape,), ALL, props)


CASES: list[Case] = [
    flip(EVEN, 1),
    flip(ODD, 0, -1),
    flip((2, 3, 5), 0, 2),
    flip(ODD),
    roll(EVEN, 0, 3),
    roll(ODD, -1, 2),
    roll(ODD, 5, 0),
    roll((0, 3), 1, 1),
    tile(EVEN, 2, 1),
    tile(ODD, 3, 2),
    tile(ODD, 0, 1),
    interleave(EVEN, 3, 0),
    interleave(ODD, 2, -1),
    interleave((2, 3), 4, 0),
    interleave(ODD, 1, 0),
    interleave(ODD, 0, 0),
]


REFERENCES: dict[type[Operation], Reference] = {
    nn.FlipOp: lambda op, x: x.flip(op.dims.data),
    nn.RollOp: lambda op, x: x.roll(op.shifts.data, tuple(range(x.ndim))),
    nn.TileOp: lambda op, x: x.tile(op.repeats.data),
    nn.RepeatInterleaveOp: lambda op, x: x.repeat_interleave(
        op.repeats.value.data, op.axis.value.data
    ),
}
