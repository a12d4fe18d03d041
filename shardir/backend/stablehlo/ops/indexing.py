"""Reads and writes by index: gathers and scatters.

Where the indexed dimension is split, a device has zeros for indices of other shards: reads are
masked, and a scatter drops what is outside.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from xdsl.ir import Operation, SSAValue

from shardir.backend.stablehlo.functions import lowest
from shardir.backend.stablehlo.literals import NARROW, array_text, element_of, ints_text
from shardir.backend.stablehlo.place import DevicePlace
from shardir.backend.stablehlo.traced import TracedArray, generic, numpy, scalar_region
from shardir.backend.stablehlo.writer import WriteOp
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of


def _numbers(kind: str, fields: Mapping[str, Sequence[int]], index_vector_dim: int) -> str:
    """The text of dimension numbers, without empty fields."""
    parts = [f"{name} = {ints_text(dims)}" for name, dims in fields.items() if dims]
    return f"#stablehlo.{kind}<{', '.join([*parts, f'index_vector_dim = {index_vector_dim}'])}>"


def gather(
    x: TracedArray, ids: TracedArray, shape: Sequence[int], sizes: Sequence[int],
    fields: Mapping[str, Sequence[int]],
) -> TracedArray:  # fmt: skip
    properties = {
        "dimension_numbers": _numbers("gather", fields, ids.ndim),
        "indices_are_sorted": "false",
        "slice_sizes": array_text(sizes),
    }
    return generic(x, "gather", [x, ids], [(tuple(shape), x.element)], properties)[0]


def scatter(
    x: TracedArray, ids: TracedArray, updates: TracedArray, how: str | None,
    fields: Mapping[str, Sequence[int]],
) -> TracedArray:  # fmt: skip
    """Write updates into x: combine them by an op, `add`, or replace what is there (None)."""
    properties = {
        "indices_are_sorted": "false",
        "scatter_dimension_numbers": _numbers("scatter", fields, ids.ndim),
        "unique_indices": "false",
    }
    t = f"tensor<{x.element}>"
    replaces = f"      ^bb0(%lhs: {t}, %rhs: {t}):\n        stablehlo.return %rhs : {t}"
    region = replaces if how is None else scalar_region(how, x.element)
    types = [(x.shape, x.element)]
    return generic(x, "scatter", [x, ids, updates], types, properties, region)[0]


def take(x: TracedArray, ids: TracedArray, axis: int) -> TracedArray:
    """The elements of x at indices of a dimension, which those of the indices replace."""
    shape = (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :])
    sizes = [1 if d == axis else n for d, n in enumerate(x.shape)]
    offsets = [d for d in range(len(shape)) if not axis <= d < axis + ids.ndim]
    return gather(x, ids, shape, sizes, {
        "offset_dims": offsets, "collapsed_slice_dims": [axis], "start_index_map": [axis],
    })  # fmt: skip


def _local(
    p: DevicePlace, ids: TracedArray, of: SSAValue, axis: int
) -> tuple[TracedArray, TracedArray | None]:
    """Indices relative to a device's shard, and the mask of those inside; None where all are."""
    if not p.splits(of, axis):
        return ids, None
    here = ids - p.start(of, axis).to(ids.element)
    return here, (here >= 0) & (here < p.shape(of)[axis])


def _masked(out: TracedArray, inside: TracedArray | None, dims: Sequence[int]) -> TracedArray:
    """Values where the mask holds, zeros elsewhere."""
    if inside is None:
        return out
    zeros = out.constant(0, out.element, out.shape)
    return inside.broadcast(out.shape, dims).select(out, zeros)


def _gather(p: DevicePlace, op: nn.GatherOp, table: TracedArray, ids: TracedArray) -> TracedArray:
    axis = axis_of(op.properties, "axis", table.ndim)
    ids, inside = _local(p, ids, op.table, axis)
    return _masked(take(table, ids, axis), inside, range(axis, axis + ids.ndim))


def _gather_grad(
    p: DevicePlace, op: nn.GatherGradOp, ids: TracedArray, dy: TracedArray
) -> TracedArray:
    shape = p.shape(op.out)
    axis = axis_of(op.properties, "axis", len(shape))
    ids, _ = _local(p, ids, op.out, axis)
    windows = [d for d in range(dy.ndim) if not axis <= d < axis + ids.ndim]
    return scatter(dy.constant(0, dy.element, shape), ids, dy, "add", {
        "update_window_dims": windows, "inserted_window_dims": [axis],
        "scatter_dims_to_operand_dims": [axis],
    })  # fmt: skip


def _along(x: TracedArray, ids: TracedArray, axis: int) -> TracedArray:
    """The element of x at each index along a dimension."""
    others = [d for d in range(x.ndim) if d != axis]
    of_ids = [d for d in range(ids.ndim) if d != axis] if ids.ndim == x.ndim else others
    return gather(x, ids, ids.shape, [1] * x.ndim, {
        "collapsed_slice_dims": [axis], "operand_batching_dims": others,
        "start_indices_batching_dims": of_ids, "start_index_map": [axis],
    })  # fmt: skip


def _take_along_axis(
    p: DevicePlace, op: nn.TakeAlongAxisOp, x: TracedArray, ids: TracedArray
) -> TracedArray:
    axis = axis_of(op.properties, "axis", x.ndim)
    ids, inside = _local(p, ids, op.x, axis)
    return _masked(_along(x, ids, axis), inside, range(x.ndim))


def _pick(p: DevicePlace, op: nn.PickOp, x: TracedArray, ids: TracedArray) -> TracedArray:
    ids, inside = _local(p, ids, op.x, x.ndim - 1)
    return _masked(_along(x, ids, x.ndim - 1), inside, range(ids.ndim))


def _scattered(
    p: DevicePlace, op: nn.ScatterOp, ids: TracedArray, src: TracedArray, how: str, first: Any
) -> TracedArray:
    shape = p.shape(op.out)
    axis = axis_of(op.properties, "axis", len(shape))
    ids, _ = _local(p, ids, op.out, axis)
    others = [d for d in range(len(shape)) if d != axis]
    return scatter(src.constant(first, src.element, shape), ids, src, how, {
        "inserted_window_dims": [axis], "input_batching_dims": others,
        "scatter_indices_batching_dims": others, "scatter_dims_to_operand_dims": [axis],
    })  # fmt: skip


def _scatter_add(
    p: DevicePlace, op: nn.ScatterAddOp, ids: TracedArray, src: TracedArray
) -> TracedArray:  # fmt: skip
    return _scattered(p, op, ids, src, "add", 0)


def _scatter_reduce(
    p: DevicePlace, op: nn.ScatterReduceOp, ids: TracedArray, src: TracedArray
) -> TracedArray:
    match op.kind.data:
        case "prod":
            return _scattered(p, op, ids, src, "multiply", 1)
        case "max":
            return _scattered(p, op, ids, src, "maximum", lowest(src.element, -1))
        case _:
            return _scattered(p, op, ids, src, "minimum", lowest(src.element, 1))


def _is_at(p: DevicePlace, ids: TracedArray, out: SSAValue) -> TracedArray:
    """Whether the index along the last dimension of `out` is that of each row."""
    columns = p.indices(out, ids.ndim, ids.element)
    return ids[..., None] == columns


def _pick_grad(p: DevicePlace, op: nn.PickGradOp, ids: TracedArray, dy: TracedArray) -> TracedArray:
    here = _is_at(p, ids, op.out)
    rows = dy.broadcast(here.shape, range(dy.ndim))
    return here.select(rows, dy.constant(0, dy.element, here.shape))


def _cross_entropy_grad(
    p: DevicePlace,
    op: nn.CrossEntropyGradOp,
    log_p: TracedArray,
    labels: TracedArray,
    dy: TracedArray,
) -> TracedArray:
    """(e^log_p - target) dy, and zeros for labels that do not count."""
    ignore, share = op.options()
    if log_p.element in NARROW:
        log_p, dy = log_p.to("f32"), dy.to("f32")
    target = _is_at(p, labels, op.out).to(log_p.element) * (1 - share) + share / log_p.shape[-1]
    out = (numpy.exp(log_p) - target) * dy[..., None]
    return out if ignore is None else _masked(out, labels != ignore, range(labels.ndim))


def _one_hot(p: DevicePlace, op: nn.OneHotOp, ids: TracedArray) -> TracedArray:
    return _is_at(p, ids, op.out).to(element_of(op.out.type))


def _index_copy(
    p: DevicePlace, op: nn.IndexCopyOp, x: TracedArray, ids: TracedArray, rows: TracedArray
) -> TracedArray:
    axis = axis_of(op.properties, "axis", x.ndim)
    ids, _ = _local(p, ids, op.x, axis)
    return scatter(x, ids, rows, None, {
        "update_window_dims": [d for d in range(x.ndim) if d != axis],
        "inserted_window_dims": [axis], "scatter_dims_to_operand_dims": [axis],
    })  # fmt: skip


WRITERS: dict[type[Operation], WriteOp] = {
    nn.GatherOp: _gather,
    nn.GatherGradOp: _gather_grad,
    nn.TakeAlongAxisOp: _take_along_axis,
    nn.PickOp: _pick,
    nn.PickGradOp: _pick_grad,
    nn.CrossEntropyGradOp: _cross_entropy_grad,
    nn.ScatterAddOp: _scatter_add,
    nn.ScatterReduceOp: _scatter_reduce,
    nn.OneHotOp: _one_hot,
    nn.IndexCopyOp: _index_copy,
}
