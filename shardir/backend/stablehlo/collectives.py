"""The collectives of the local view, among partitions: with groups of their numbers.

Blocks of uneven shards move with their padding:

    all_gather      [0 1 2] [3 4 .]  ->  [0 1 2 3 4 .]  ->  [0 1 2 3 4]
    reduce_scatter  [0 1 2 3 4]  ->  [0 1 2 3 4 .]  ->  [0 1 2] [3 4 .]
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from xdsl.ir import SSAValue

from shardir.algebra.exchange import pieces
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, axes_text, sizes_of
from shardir.backend.stablehlo.functions import einsum, lowest
from shardir.backend.stablehlo.ops.windows import folded, unfolded
from shardir.backend.stablehlo.place import PartitionPlace
from shardir.backend.stablehlo.traced import TracedArray, UnevenShards, generic, scalar_region
from shardir.dialects import dist

CHANNEL = "#stablehlo.channel_handle<handle = {}, type = 0>"
"""A channel: a collective with one is among partitions."""

REGIONS = {"sum": "add", "max": "maximum", "min": "minimum"}

WriteValue = Callable[..., TracedArray]
"""From a place, a collective, a traced value, and the values before and after."""


def _properties(p: PartitionPlace, axes: Axes, flattens: bool = True) -> dict[str, str]:
    """The properties of a collective over some axes; `flattens`: its groups are flattened ids."""
    found = {
        "channel_handle": CHANNEL.format(p.new_channel()),
        "replica_groups": p.groups(axes),
    }
    return found | ({"use_global_device_ids": ""} if flattens else {})


def _region(kind: str, element: str) -> str:
    if element == "i1":
        kind = {"sum": "or", "max": "or", "min": "and"}[kind]
    return scalar_region(REGIONS.get(kind, kind), element)


def all_reduce(p: PartitionPlace, x: TracedArray, kind: str, axes: Axes) -> TracedArray:
    n = p.mesh.extent(axes)
    types = [(x.shape, x.element)]
    region = _region("sum" if kind == "mean" else kind, x.element)
    (out,) = generic(x, "all_reduce", [x], types, _properties(p, axes), region)
    return out / out.constant(n, out.element) if kind == "mean" else out


def all_gather(p: PartitionPlace, x: TracedArray, dim: int, axes: Axes) -> TracedArray:
    shape = [*x.shape]
    shape[dim] *= p.mesh.extent(axes)
    properties = {"all_gather_dim": f"{dim} : i64", **_properties(p, axes)}
    return generic(x, "all_gather", [x], [(tuple(shape), x.element)], properties)[0]


def _check_blocks(
    p: PartitionPlace, split: SSAValue, whole: SSAValue | None, dim: int, axes: Axes
) -> None:
    """Raise UnevenShards unless the blocks of a group, one after the other, are the block of
    `whole`, or by default the dimension, and then padding."""
    layout = dist.layout_of(split)
    assert layout is not None
    if dim not in p.uneven_dims(split):
        return
    if sizes_of(layout.dims[dim]):
        raise UnevenShards(f"dimension {dim}, of explicit sizes")
    for group in p.mesh.groups(axes):
        ranks = [p.ranks[r] for r in group]
        start, n = 0, ranks[0].global_shape(split)[dim]
        if whole is not None:
            start, n = ranks[0].start(whole, dim), ranks[0].shape(whole)[dim]
        own = sum(rank.shape(split)[dim] for rank in ranks)
        if own != n or (n and start != ranks[0].start(split, dim)):
            text = axes_text(layout.dims[dim])
            raise UnevenShards(f"dimension {dim}, of which {text} splits no shard of the rest")


def _cut(
    p: PartitionPlace, x: TracedArray, split: SSAValue, whole: SSAValue | None, dim: int, axes: Axes
) -> TracedArray:
    """Return a block with padding so that it is those of a group, one after the other."""
    _check_blocks(p, split, whole, dim, axes)
    high = [0] * x.ndim
    high[dim] = p.shape(split)[dim] * p.mesh.extent(axes) - x.shape[dim]
    return x.pad([0] * x.ndim, high)


def _own_shard(p: PartitionPlace, x: TracedArray, dim: int, axes: Axes) -> TracedArray:
    size = x.shape[dim] // p.mesh.extent(axes)
    return x.dynamic_part(dim, p.position(axes) * size, size)


def _all_reduce(
    p: PartitionPlace, op: dist.AllReduceOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    return all_reduce(p, x, op.reduction.data, op.axes.data)


def _all_gather(
    p: PartitionPlace,
    op: dist.AllGatherOp | dist.GatherToRootOp,
    x: TracedArray,
    value: SSAValue,
    out: SSAValue,
) -> TracedArray:
    dim, axes = op.dim.value.data, op.axes.data
    _check_blocks(p, value, out, dim, axes)
    return all_gather(p, x, dim, axes).along(dim, 0, p.shape(out)[dim])


def reduce_scatter(
    p: PartitionPlace, x: TracedArray, kind: str, dim: int, axes: Axes
) -> TracedArray:
    n, shape = p.mesh.extent(axes), [*x.shape]
    shape[dim] //= n
    properties = {"scatter_dimension": f"{dim} : i64", **_properties(p, axes)}
    region = _region("sum" if kind == "mean" else kind, x.element)
    types = [(tuple(shape), x.element)]
    (shard,) = generic(x, "reduce_scatter", [x], types, properties, region)
    return shard / shard.constant(n, shard.element) if kind == "mean" else shard


def _reduce_scatter(
    p: PartitionPlace, op: dist.ReduceScatterOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    dim, axes = op.dim.value.data, op.axes.data
    x = _cut(p, x, out, value, dim, axes)
    return reduce_scatter(p, x, op.reduction.data, dim, axes)


def _all_slice(
    p: PartitionPlace, op: dist.AllSliceOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    dim, axes = op.dim.value.data, op.axes.data
    return _own_shard(p, _cut(p, x, out, value, dim, axes), dim, axes)


def _all_to_all(
    p: PartitionPlace, op: dist.AllToAllOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    split, concat, axes = op.split.value.data, op.concat.value.data, op.axes.data
    _check_blocks(p, value, out, concat, axes)
    x = _cut(p, x, out, value, split, axes)
    n, shape = p.mesh.extent(axes), [*x.shape]
    shape[split] //= n
    shape[concat] *= n
    properties = {
        "concat_dimension": f"{concat} : i64", "split_count": f"{n} : i64",
        "split_dimension": f"{split} : i64", **_properties(p, axes, flattens=False),
    }  # fmt: skip
    (moved,) = generic(x, "all_to_all", [x], [(tuple(shape), x.element)], properties)
    return moved.along(concat, 0, p.shape(out)[concat])


def _at(
    p: PartitionPlace, x: TracedArray, position: int, axes: Axes, filling: float = 0
) -> TracedArray:
    """A value at one position of the groups, a number elsewhere."""
    here = p.position(axes) == position
    other = x.constant(filling, x.element, x.shape)
    return here.spread(x.shape).select(x, other)


def _broadcast(
    p: PartitionPlace, op: dist.BroadcastFromRootOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    """The sum of the value at the root and zeros elsewhere."""
    axes = op.axes.data
    return all_reduce(p, _at(p, x, op.root.value.data, axes), "sum", axes)


def _gather(
    p: PartitionPlace, op: dist.GatherToRootOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    return _all_gather(p, op, x, value, out)


def _scatter(
    p: PartitionPlace, op: dist.ScatterFromRootOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    dim, axes = op.dim.value.data, op.axes.data
    whole = all_reduce(p, _at(p, x, op.root.value.data, axes), "sum", axes)
    return _own_shard(p, _cut(p, whole, out, value, dim, axes), dim, axes)


def permute(
    p: PartitionPlace, x: TracedArray, pairs: Sequence[tuple[int, int]], axes: Axes
) -> TracedArray:
    """The value of another position of the group: pairs of sender and receiver."""
    return permute_ranks(p, x, [(g[a], g[b]) for g in p.mesh.groups(axes) for a, b in pairs])


def permute_ranks(
    p: PartitionPlace, x: TracedArray, ends: Sequence[tuple[int, int]]
) -> TracedArray:
    """The value of another partition: pairs of sender and receiver; zeros without one."""
    if not ends:
        return x.constant(0, x.element, x.shape)
    rows = ", ".join(f"[{a}, {b}]" for a, b in ends)
    properties = {
        "channel_handle": CHANNEL.format(p.new_channel()),
        "source_target_pairs": f"dense<[{rows}]> : tensor<{len(ends)}x2xi64>",
    }
    return generic(x, "collective_permute", [x], [(x.shape, x.element)], properties)[0]


def _permute(
    p: PartitionPlace, op: dist.PermuteOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    n = p.mesh.extent(op.axes.data)
    return permute(p, x, [*op.record.passes(op.as_step(out), n)], op.axes.data)


def _replicated_to_partial(
    p: PartitionPlace,
    op: dist.ReplicatedToPartialOp,
    x: TracedArray,
    value: SSAValue,
    out: SSAValue,
) -> TracedArray:
    return _at(p, x, 0, op.axes.data) if op.reduction.data == "sum" else x


def _sharded_to_partial(
    p: PartitionPlace, op: dist.ShardedToPartialOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    dim, axes = op.dim.value.data, op.axes.data
    _check_blocks(p, value, out, dim, axes)
    starts = [p.mesh.index(r, axes) * x.shape[dim] for r in range(p.mesh.size)]
    return p.to_starts(x, dim, starts, p.shape(out)[dim])


# ---- halo exchanges ----


class _PlacedWindows(NamedTuple):
    """Where the windows of a device are in its shard.

    Attributes:
        starts: for each partition, the element of the whole dimension at which its windows begin.
        start: the same in its shard, if it is equal on all partitions, whose shards are even; else
            None.
        length: from the first element of the windows to the last.
        rows: the elements of a shard.
    """

    starts: list[int]
    start: int | None
    length: int
    rows: int

    @classmethod
    def of(
        cls, p: PartitionPlace, op: dist.HaloOp, value: SSAValue, out: SSAValue
    ) -> "_PlacedWindows":  # fmt: skip
        w, dim = op.windows(value, out, p.mesh), op.dim.value.data
        of, cut = op.ends(value, out)
        rows, each = p.shape(of)[dim], p.shape(cut)[dim]
        starts = [rank.start(cut, dim) * w.step + w.offset for rank in p.ranks]
        is_even = not any(dim in p.uneven_dims(v) for v in (of, cut))
        start = w.offset if is_even and each * w.step == rows else None
        return cls(starts, start, (each - 1) * w.step + w.size, rows)

    def shifts(self, start: int) -> range:
        """The distances to the devices that hold elements of a device's windows."""
        return range(start // self.rows, (start + self.length - 1) // self.rows + 1)


def _halo_unfold(
    p: PartitionPlace, op: dist.HaloUnfoldOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    """Each device gets the elements that it lacks from each neighbour, in one permute; where the
    windows are elsewhere in each shard, all elements."""
    dim, axes = op.dim.value.data, op.axes.data
    halo, n = _PlacedWindows.of(p, op, value, out), p.mesh.extent(axes)
    count, size = p.shape(out)[dim : dim + 2]
    step, filling = op.step.value.data, 0 if op.lowest is None else lowest(x.element, -1)
    if halo.start is None:
        _check_blocks(p, value, None, dim, axes)
        whole = all_gather(p, x, dim, axes).along(dim, 0, p.global_shape(value)[dim])
        span = p.from_starts(whole, dim, halo.starts, halo.length, filling)
        return unfolded(span, dim, count, size, step, 0)
    start, pieces_of = halo.start, []
    for shift in halo.shifts(start):
        low = max(start - shift * halo.rows, 0)
        high = min(start + halo.length - shift * halo.rows, halo.rows)
        part = x.along(dim, low, high)
        pairs = [(k + shift, k) for k in range(n) if 0 <= k + shift < n]
        pieces_of.append(part if shift == 0 else permute(p, part, pairs, axes))
    span = pieces_of[0].concatenated(pieces_of[1:], dim)
    if filling:
        index = p.lookup(halo.starts) + p.iota((halo.length,), 0)
        inside = ((index >= 0) & (index < n * halo.rows)).broadcast(span.shape, [dim])
        span = inside.select(span, span.constant(filling, span.element, span.shape))
    return unfolded(span, dim, count, size, step, 0)


def _halo_fold(
    p: PartitionPlace, op: dist.HaloFoldOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    """Each device sends each neighbour the elements that it holds; where the windows are elsewhere
    in each shard, the sum of all is scattered."""
    dim, axes = op.dim.value.data, op.axes.data
    halo, n = _PlacedWindows.of(p, op, value, out), p.mesh.extent(axes)
    if dim in p.uneven_dims(value):
        x = p.masked(x, value, [dim])
    span = folded(x, dim, halo.length, op.step.value.data, 0)
    if halo.start is None:
        whole = p.to_starts(span, dim, halo.starts, p.global_shape(out)[dim])
        return reduce_scatter(p, _cut(p, whole, out, None, dim, axes), "sum", dim, axes)
    start, stop, result = halo.start, halo.start + halo.length, None
    for shift in halo.shifts(start):
        low, high = max(shift * halo.rows, start), min((shift + 1) * halo.rows, stop)
        part = span.along(dim, low - start, high - start)
        before, after = [0] * part.ndim, [0] * part.ndim
        before[dim], after[dim] = low - shift * halo.rows, (shift + 1) * halo.rows - high
        part = part.pad(before, after)
        if shift:
            pairs = [(k, k + shift) for k in range(n) if 0 <= k + shift < n]
            part = permute(p, part, pairs, axes)
        result = part if result is None else result + part
    assert result is not None
    return result


# ---- exchanges ----


def _exchange(
    p: PartitionPlace, op: dist.ExchangeOp, x: TracedArray, value: SSAValue, out: SSAValue
) -> TracedArray:
    """Each device gets the pieces of its new shard from their holders: in each permute one piece of
    one shape, from and to each device at most."""
    source, target = dist.layout_of(value), dist.layout_of(out)
    assert source is not None and target is not None
    shape = p.global_shape(value)
    by_shape: dict[Shape, list[_SentPiece]] = {}
    for rank in range(p.mesh.size):
        new = target.slices(p.mesh, shape, rank)
        for piece in pieces(p.mesh, shape, source, target, rank):
            held = source.slices(p.mesh, shape, piece.holder)
            size = tuple(s.stop - s.start for s in piece.region)
            at = (tuple(s.start - of.start for s, of in zip(piece.region, region, strict=True))
                  for region in (held, new))  # fmt: skip
            by_shape.setdefault(size, []).append(_SentPiece(piece.holder, rank, *at))
    result = x.constant(0, x.element, p.shape(out))
    for size, found in by_shape.items():
        for together in _rounds(found):
            result = _with_pieces(p, x, result, size, together)
    return result


class _SentPiece(NamedTuple):
    """A piece that one device sends to another, and where it begins on both."""

    sender: int
    receiver: int
    at_sender: Shape
    at_receiver: Shape


def _rounds(found: Sequence[_SentPiece]) -> list[list[_SentPiece]]:
    """Rounds in which each device sends and receives at most one piece."""
    rounds: list[list[_SentPiece]] = []
    for piece in found:
        free = next((
            r for r in rounds
            if all(piece.sender != o.sender and piece.receiver != o.receiver for o in r)
        ), None)  # fmt: skip
        if free is None:
            rounds.append(free := [])
        free.append(piece)
    return rounds


def _with_pieces(
    p: PartitionPlace,
    x: TracedArray,
    result: TracedArray,
    size: Shape,
    together: Sequence[_SentPiece],
) -> TracedArray:
    """The result after a round."""
    sent, received = ([(0,) * x.ndim] * p.mesh.size for _ in range(2))
    for piece in together:
        sent[piece.sender], received[piece.receiver] = piece.at_sender, piece.at_receiver
    part = x
    for d, n in enumerate(size):
        part = part.dynamic_part(d, p.lookup([at[d] for at in sent]), n)
    part = permute_ranks(p, part, [(o.sender, o.receiver) for o in together])
    starts = [p.lookup([at[d] for at in received]) for d in range(x.ndim)]
    new = result.op("dynamic_update_slice", part, *starts)
    receivers = {o.receiver for o in together}
    if len(receivers) == p.mesh.size:
        return new
    is_receiver = p.lookup([int(r in receivers) for r in range(p.mesh.size)]) != 0
    return is_receiver.spread(new.shape).select(new, result)


COLLECTIVES: dict[str, WriteValue] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_slice": _all_slice,
    "all_to_all": _all_to_all,
    "replicated_to_partial": _replicated_to_partial,
    "sharded_to_partial": _sharded_to_partial,
    "copy": lambda p, op, x, value, out: x,
    "reinterpret": lambda p, op, x, value, out: x,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "permute": _permute,
    "exchange": _exchange,
    "halo_unfold": _halo_unfold,
    "halo_fold": _halo_fold,
}
"""How each collective is written, by the name of its record."""


def receive(p: PartitionPlace, op: dist.RecvOp, x: TracedArray) -> TracedArray:
    """The value of the sender of each group, at its receiver; zeros elsewhere."""
    source, target, axes = op.ends
    return permute(p, x, [(source, target)], axes)


def ring_product(
    p: PartitionPlace, op: dist.RingProductOp, *operands: TracedArray
) -> list[TracedArray]:
    """A product in steps as the collective and the product, which XLA may overlap again."""
    if any(p.uneven_dims(v) for v in (*op.operands, *op.results)):
        raise UnevenShards("a product in steps")
    which, dim, out = op.ring
    x, axes = [*operands], op.axes.data
    if isinstance(op, dist.GatheredProductOp):
        x[which] = all_gather(p, x[which], dim, axes)
        return [einsum(x[0], x[1], op.equation.data), x[which]][: len(op.outs)]
    product = einsum(x[0], x[1], op.equation.data)
    return [reduce_scatter(p, product, "sum", out, axes)]
