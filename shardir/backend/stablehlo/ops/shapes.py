"""Constants, contractions, reductions, and ops that move elements."""

from math import prod

import numpy as np
from xdsl.ir import Operation

from shardir.backend.stablehlo.functions import einsum, lowest
from shardir.backend.stablehlo.literals import NARROW, element_of
from shardir.backend.stablehlo.place import DevicePlace, PartitionPlace
from shardir.backend.stablehlo.traced import TracedArray, numpy
from shardir.backend.stablehlo.writer import WriteOp
from shardir.dialects import nn
from shardir.dialects.nn.creation import dense_values
from shardir.dialects.nn.movement import IndexMapOp, ints_of
from shardir.dialects.nn.properties import axis_of, dims_of, int_of


def _constant(p: DevicePlace, op: nn.ConstantOp) -> TracedArray:
    values = dense_values(op.value)
    element = element_of(op.out.type)
    if values.size and (values == values.flat[0]).all():
        return p.constant(values.flat[0], element, p.shape(op.out))
    whole = p.constant(0, element).lift(values, element)
    return p.own(whole, op.out, range(values.ndim))


def _iota(p: DevicePlace, op: nn.IotaOp) -> TracedArray:
    shape = p.shape(op.out)
    dim = axis_of(op.properties, "dim", len(shape))
    element = element_of(op.out.type)
    return p.iota(shape, dim, element) + p.start(op.out, dim).to(element)


def _contraction(p: DevicePlace, op: nn.Contraction, x: TracedArray, y: TracedArray) -> TracedArray:
    left, right, out = op.letters
    return einsum(x, y, f"{left},{right}->{out}")


def _reduce(p: DevicePlace, op: nn.ReduceOp, x: TracedArray) -> TracedArray:
    dims = dims_of(op.properties, "dims", x.ndim)
    keep, kind = op.keep is not None, op.kind.data
    if kind in ("max", "min"):
        if x.element == "i1":
            kind = {"max": "any", "min": "all"}[kind]
        else:
            sign = -1 if kind == "max" else 1
            return x.reduced(f"{kind}imum", lowest(x.element, sign), dims, keep)
    if kind in ("any", "all"):
        return x.reduced({"any": "or", "all": "and"}[kind], kind == "all", dims, keep)
    element = x.element
    wide = x.to("f32") if element in NARROW else x
    if kind == "prod":
        return wide.reduced("multiply", 1, dims, keep).to(element)
    total = wide.reduced("add", 0, dims, keep)
    if kind == "mean":
        count = prod(p.global_shape(op.x)[d] for d in dims)
        total = total / total.constant(count, total.element)
    return total.to(element)


def _reshape(p: DevicePlace, op: nn.ReshapeOp, x: TracedArray) -> TracedArray:
    return x.reshape(p.shape(op.out))


def _transpose(p: DevicePlace, op: nn.TransposeOp, x: TracedArray) -> TracedArray:
    return x.transpose(dims_of(op.properties, "perm", x.ndim))


def _broadcast(p: DevicePlace, op: nn.BroadcastOp, x: TracedArray) -> TracedArray:
    shape = p.shape(op.out)
    dims = dims_of(op.properties, "dims", len(shape))
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    return x.transpose(order).broadcast(shape, sorted(dims))


# ---- along dimensions that are whole in the operand ----


def _parts(x: TracedArray, dim: int, indices: np.ndarray, filling: float) -> TracedArray:
    """The elements of x at known indices of a dimension; the filling at -1. Runs of indices are
    slices."""
    pieces, i = [], 0
    while i < len(indices):
        end = i + 1
        step = int(indices[end] - indices[i]) if end < len(indices) else 1
        if indices[i] < 0:
            step = 0
        elif step == 0 or indices[min(end, len(indices) - 1)] < 0:
            step = 1
        while end < len(indices) and indices[end] == (
            -1 if step == 0 else indices[end - 1] + step
        ):  # fmt: skip
            end += 1
        count, first = end - i, int(indices[i])
        shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
        if step == 0:
            pieces.append(x.constant(filling, x.element, shape))
        elif step > 0:
            pieces.append(x.along(dim, first, first + (count - 1) * step + 1, step))
        else:
            last = first + (count - 1) * step
            pieces.append(x.along(dim, last, first + 1, -step).reversed([dim]))
        i = end
    if not pieces:
        return x.along(dim, 0, 0)
    return pieces[0].concatenated(pieces[1:], dim)


def _index_map(p: DevicePlace, op: IndexMapOp, x: TracedArray) -> TracedArray:
    """Slices, pads, flips, rolls and tiles. Where the operand is split, a device has the elements
    of its shard, and zeros."""
    total = p.global_shape(op.x)
    filling = op.filling(op.properties)
    whole = p.global_shape(op.out)
    if isinstance(op, nn.PadOp) and not any(p.splits(op.x, d) for d in range(x.ndim)):
        low, high = (ints_of(op.properties, n, x.ndim) for n in ("low", "high"))
        return p.own(x.pad(low, high, filling), op.out, range(x.ndim))
    if isinstance(op, nn.SliceOp) and not any(
        p.splits(op.x, d) for d in op.sources(total, op.properties)
    ):
        bounds = [
            (0, x.shape[d], 1) if p.splits(op.x, d) else bound
            for d, bound in enumerate(op.bounds(total, op.properties))
        ]
        return p.own(x.part(*map(list, zip(*bounds, strict=True))), op.out, _unsplit(p, op))
    for d, index_map in op.sources(total, op.properties).items():
        if not p.splits(op.x, d):
            x = _parts(x, d, index_map.indices(0, whole[d], total[d]), filling)
            x = p.own(x, op.out, [d])
            continue
        assert isinstance(p, PartitionPlace)
        local = index_map.indices(0, whole[d], total[d])
        ids = p.constant(local, "i64") - p.start(op.x, d)
        ids = p.own_along(ids, 0, op.out, d)
        x = take_inside(x, ids, d)
    return x


def _unsplit(p: DevicePlace, op: IndexMapOp) -> list[int]:
    return [d for d in range(len(p.shape(op.x))) if not p.splits(op.x, d)]


def take_inside(x: TracedArray, ids: TracedArray, dim: int) -> TracedArray:
    """The elements of x at indices of a dimension, of rank 1; zeros at indices outside of it."""
    from shardir.backend.stablehlo.ops.indexing import take

    inside = (ids >= 0) & (ids < x.shape[dim])
    safe = inside.select(ids, ids.constant(0, ids.element, ids.shape))
    out = take(x, safe, dim)
    mask = inside.broadcast(out.shape, [dim])
    return mask.select(out, out.constant(0, out.element, out.shape))


def _repeat_interleave(p: DevicePlace, op: nn.RepeatInterleaveOp, x: TracedArray) -> TracedArray:
    axis = axis_of(op.properties, "axis", x.ndim)
    repeats = int_of(op.properties, "repeats")
    column = x.reshape((*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
    wide = column.spread((*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :]))
    out = wide.reshape((*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]))
    return out if p.splits(op.x, axis) else p.own(out, op.out, [axis])


def _concat(p: DevicePlace, op: nn.ConcatOp, *xs: TracedArray) -> TracedArray:
    axis = axis_of(op.properties, "axis", xs[0].ndim)
    return p.own(xs[0].concatenated(xs[1:], axis), op.out, [axis])


def _stack(p: DevicePlace, op: nn.StackOp, *xs: TracedArray) -> TracedArray:
    axis = axis_of(op.properties, "axis", xs[0].ndim + 1)
    return p.own(numpy.stack(xs, axis), op.out, [axis])


def _split(p: DevicePlace, op: nn.SplitOp, x: TracedArray) -> list[TracedArray]:
    axis = axis_of(op.properties, "axis", x.ndim)
    ends = np.cumsum(op.pieces(op.properties)).tolist()
    starts = [0, *ends[:-1]]
    return [
        p.own(x.along(axis, a, b), out, [axis])
        for a, b, out in zip(starts, ends, op.outs, strict=True)
    ]


def _sinusoid(p: DevicePlace, op: nn.SinusoidOp, positions: TracedArray) -> TracedArray:
    d = p.global_shape(op.out)[-1]
    columns = np.arange(d)
    interleaved = op.pairing.data == "interleaved"
    pair, second = np.divmod(columns, 2) if interleaved else divmod(columns, d // 2)[::-1]
    element = "f64" if element_of(op.out.type) == "f64" else "f32"
    frequencies = op.base.value.data ** (-2.0 * pair / d)
    columns = p.constant(frequencies, element), p.constant(second.astype(bool), "i1")
    phases, cosine = (p.own_along(v, 0, op.out, positions.ndim) for v in columns)
    turn = positions.to(element)[..., None] * phases
    return numpy.where(cosine, numpy.cos(turn), numpy.sin(turn))


WRITERS: dict[type[Operation], WriteOp] = {
    nn.ConstantOp: _constant,
    nn.IotaOp: _iota,
    nn.EinsumOp: _contraction,
    nn.MatmulOp: _contraction,
    nn.ReduceOp: _reduce,
    nn.ReshapeOp: _reshape,
    nn.TransposeOp: _transpose,
    nn.BroadcastOp: _broadcast,
    nn.SliceOp: _index_map,
    nn.PadOp: _index_map,
    nn.FlipOp: _index_map,
    nn.RollOp: _index_map,
    nn.TileOp: _index_map,
    nn.RepeatInterleaveOp: _repeat_interleave,
    nn.ConcatOp: _concat,
    nn.StackOp: _stack,
    nn.SplitOp: _split,
    nn.SinusoidOp: _sinusoid,
}
