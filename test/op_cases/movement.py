from collections.abc import Sequence

from xdsl.dialects.builtin import FloatAttr

from op_cases.case import ALL, EVEN, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import dims_attr, float_attr, int_attr

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


def flip(shape: Shape, *dims: int) -> Case:
    return Case(name(shape, dims), nn.FlipOp, (shape,), ALL, {"dims": dims_attr(*dims)})


def roll(shape: Shape, *shifts: int) -> Case:
    return Case(name(shape, shifts), nn.RollOp, (shape,), ALL, {"shifts": ints(shifts)})


def tile(shape: Shape, *repeats: int) -> Case:
    return Case(name(shape, repeats), nn.TileOp, (shape,), ALL, {"repeats": ints(repeats)})


def interleave(shape: Shape, repeats: int, axis: int) -> Case:
    props = {"repeats": int_attr(repeats), "axis": int_attr(axis)}
    return Case(f"{name(shape)}-{repeats}-{axis}", nn.RepeatInterleaveOp, (shape,), ALL, props)


def concat(axis: int, *shapes: Shape) -> Case:
    return Case(f"{name(*shapes)}-{axis}", nn.ConcatOp, shapes, ALL, {"axis": int_attr(axis)})


def stack(axis: int, n: int, shape: Shape) -> Case:
    called = f"{n}-of-{name(shape)}-{axis}"
    return Case(called, nn.StackOp, (shape,) * n, ALL, {"axis": int_attr(axis)})


def split(shape: Shape, axis: int, *sizes: int) -> Case:
    props = {"sizes": ints(sizes), "axis": int_attr(axis)}
    return Case(f"{name(shape, sizes)}-{axis}", nn.SplitOp, (shape,), ALL, props)


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
