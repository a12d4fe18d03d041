"""Ops in the order along a dimension: running sums, sorts."""

from math import nan

from xdsl.ir import Operation

from shardir.backend.stablehlo.literals import FLOATS, NARROW, ints_text, number_text
from shardir.backend.stablehlo.place import DevicePlace
from shardir.backend.stablehlo.traced import TracedArray, generic, scalar_region
from shardir.backend.stablehlo.writer import WriteOp
from shardir.dialects import nn


def _cumsum(p: DevicePlace, op: nn.CumsumOp, x: TracedArray) -> TracedArray:
    """Sums of windows that begin before the dimension, or end after it."""
    element = x.element
    wide = x.to("f32") if element in NARROW else x
    axis, n = op.at(), x.shape[op.at()]
    if n == 0:
        return x
    before, after = (0, n - 1) if op.reverse is not None else (n - 1, 0)
    window = [n if d == axis else 1 for d in range(x.ndim)]
    edges = [[before, after] if d == axis else [0, 0] for d in range(x.ndim)]
    text = ", ".join(map(ints_text, edges))
    properties = {
        "padding": f"dense<[{text}]> : tensor<{x.ndim}x2xi64>",
        "window_dimensions": f"array<i64: {', '.join(map(str, window))}>",
    }
    return generic(
        wide, "reduce_window", [wide, wide.constant(0, wide.element)], [(x.shape, wide.element)],
        properties, scalar_region("add", wide.element),
    )[0].to(element)  # fmt: skip


def sorted_with_indices(
    p: DevicePlace, x: TracedArray, axis: int, is_descending: bool
) -> tuple[TracedArray, TracedArray]:
    """The elements in order, stably, and their indices; NaN counts as the maximum."""
    ids = p.iota(x.shape, axis)
    t, of_ids = f"tensor<{x.element}>", "tensor<i64>"
    arguments = f"%lhs: {t}, %rhs: {t}, %i: {of_ids}, %j: {of_ids}"
    lines, names = [], ["%lhs", "%rhs"]
    how = "GT" if is_descending else "LT"
    kind = ""
    if x.element in FLOATS:
        # as in JAX: one zero, and one NaN, in the total order
        lines += [
            f"%zero = stablehlo.constant dense<0.0> : {t}",
            f"%nan = stablehlo.constant dense<{number_text(nan, x.element)}> : {t}",
        ]
        for name in names:
            lines += [
                f"{name}_0 = stablehlo.compare EQ, {name}, %zero, FLOAT : ({t}, {t}) -> tensor<i1>",
                f"{name}_1 = stablehlo.select {name}_0, %zero, {name} : tensor<i1>, {t}",
                f"{name}_2 = stablehlo.compare NE, {name}, {name}, FLOAT : ({t}, {t}) -> "
                "tensor<i1>",
                f"{name}_3 = stablehlo.select {name}_2, %nan, {name}_1 : tensor<i1>, {t}",
            ]
        names, kind = [f"{name}_3" for name in names], ", TOTALORDER"
    lines += [
        f"%before = stablehlo.compare {how}, {', '.join(names)}{kind} : ({t}, {t}) -> tensor<i1>",
        "stablehlo.return %before : tensor<i1>",
    ]
    region = f"      ^bb0({arguments}):\n" + "\n".join(f"        {line}" for line in lines)
    properties = {"dimension": f"{axis} : i64", "is_stable": "true"}
    types = [(x.shape, x.element), (x.shape, "i64")]
    values, order = generic(x, "sort", [x, ids], types, properties, region)
    return values, order


def _sort(p: DevicePlace, op: nn.SortOp, x: TracedArray) -> tuple[TracedArray, TracedArray]:
    return sorted_with_indices(p, x, op.at(), op.descending is not None)


def _argsort(p: DevicePlace, op: nn.ArgsortOp, x: TracedArray) -> TracedArray:
    return sorted_with_indices(p, x, op.at(), op.descending is not None)[1]


def _topk(p: DevicePlace, op: nn.TopkOp, x: TracedArray) -> list[TracedArray]:
    parts = sorted_with_indices(p, x, op.at(), op.smallest is None)
    return [v.along(op.at(), 0, op.k.value.data) for v in parts]


WRITERS: dict[type[Operation], WriteOp] = {
    nn.CumsumOp: _cumsum,
    nn.SortOp: _sort,
    nn.ArgsortOp: _argsort,
    nn.TopkOp: _topk,
}
