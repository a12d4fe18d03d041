"""The collectives of the local view in numpy, on all ranks at once.

Each function maps the shards or partial values of the ranks of a group, in row-major order of the
axes, to the shards or partial values after the collective. Emitted programs are tested against
these functions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from shardir.algebra.exchange import pieces, within
from shardir.algebra.mesh import Mesh, shard_bounds
from shardir.dialects import dist
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.windows import at_dim, fold, span, unfold
from shardir.interpret.values import reduce_parts

Parts = list[Array]
"""The shard or partial value of each rank of a mesh or of a group."""


def _shard(x: Array, dim: int, parts: int, k: int) -> Array:
    start, stop = shard_bounds(x.shape[dim], parts, k)
    return x[(slice(None),) * dim + (slice(start, stop),)]


def _all_reduce(op: dist.AllReduceOp, group: Parts) -> Parts:
    return [reduce_parts(group, op.reduction.data)] * len(group)


def _all_gather(op: dist.AllGatherOp, group: Parts) -> Parts:
    return [np.concatenate(group, axis=op.dim.value.data)] * len(group)


def _reduce_scatter(op: dist.ReduceScatterOp, group: Parts) -> Parts:
    total = reduce_parts(group, op.reduction.data)
    return [_shard(total, op.dim.value.data, len(group), k) for k in range(len(group))]


def _all_slice(op: dist.AllSliceOp, group: Parts) -> Parts:
    return [_shard(x, op.dim.value.data, len(group), k) for k, x in enumerate(group)]


def _all_to_all(op: dist.AllToAllOp, group: Parts) -> Parts:
    n = len(group)
    return [
        np.concatenate(
            [_shard(x, op.split.value.data, n, k) for x in group], axis=op.concat.value.data
        )
        for k in range(n)
    ]


def _replicated_to_partial(op: dist.ReplicatedToPartialOp, group: Parts) -> Parts:
    if op.reduction.data != "sum":
        return group
    return [group[0], *(np.zeros_like(x) for x in group[1:])]


def _sharded_to_partial(op: dist.ShardedToPartialOp, group: Parts) -> Parts:
    dim = op.dim.value.data
    sizes = [x.shape[dim] for x in group]
    out = []
    for k, x in enumerate(group):
        around = [(0, 0)] * x.ndim
        around[dim] = sum(sizes[:k]), sum(sizes[k + 1 :])
        out.append(np.pad(x, around))
    return out


def _broadcast(op: dist.BroadcastFromRootOp, group: Parts) -> Parts:
    return [group[op.root.value.data]] * len(group)


def _gather(op: dist.GatherToRootOp, group: Parts) -> Parts:
    value = np.concatenate(group, axis=op.dim.value.data)
    return [value if k == op.root.value.data else np.zeros_like(value) for k in range(len(group))]


def _scatter(op: dist.ScatterFromRootOp, group: Parts) -> Parts:
    x = group[op.root.value.data]
    return [_shard(x, op.dim.value.data, len(group), k) for k in range(len(group))]


def _permute(op: dist.PermuteOp, group: Parts) -> Parts:
    out = [np.zeros_like(x) for x in group]
    for source, target in op.record.passes(op.as_step(op.outs[0]), len(group)):
        out[target] = group[source]
    return out


def _exchange(
    op: dist.ExchangeOp, parts: Parts, value: SSAValue, out: SSAValue, mesh: Mesh
) -> Parts:
    """Assemble the new shard of each rank from pieces of the old shards."""
    source, target = dist.layout_of(value), dist.layout_of(out)
    assert source is not None and target is not None and isinstance(value.type, TensorType)
    shape = dist.global_shape(value.type, mesh)
    shards = []
    for rank in range(mesh.size):
        new_region = target.slices(mesh, shape, rank)
        shard = np.zeros([s.stop - s.start for s in new_region], parts[0].dtype)
        for piece in pieces(mesh, shape, source, target, rank):
            held_region = source.slices(mesh, shape, piece.holder)
            shard[within(piece.region, new_region)] = parts[piece.holder][
                within(piece.region, held_region)
            ]
        shards.append(shard)
    return shards


def _halo_unfold(
    op: dist.HaloUnfoldOp, parts: Parts, value: SSAValue, out: SSAValue, mesh: Mesh
) -> Parts:
    """Assemble the rows under each rank's windows, then cut the windows."""
    w, dim, axes = op.windows(value, out, mesh), op.dim.value.data, op.axes.data
    n = mesh.extent(axes)
    new = []
    for rank in range(mesh.size):
        k = mesh.index(rank, axes)
        start, stop = w.span(n, k)
        no_rows = parts[rank][at_dim(dim, 0, 0)]
        needed = span(no_rows, dim, 0, stop - start, op.lowest is not None)
        for holder, low, high in w.needed(n, k):
            first = shard_bounds(w.rows, n, holder)[0]
            held = parts[mesh.moved(rank, axes, holder)]
            needed[at_dim(dim, low - start, high - start)] = held[
                at_dim(dim, low - first, high - first)
            ]
        first, last = shard_bounds(w.count, n, k)
        new.append(unfold(needed, dim, last - first, w.size, w.step, 0))
    return new


def _halo_fold(
    op: dist.HaloFoldOp, parts: Parts, value: SSAValue, out: SSAValue, mesh: Mesh
) -> Parts:
    """Add each rank's windows to the shards that hold their rows."""
    w, dim, axes = op.windows(value, out, mesh), op.dim.value.data, op.axes.data
    n = mesh.extent(axes)
    new = []
    for rank, x in enumerate(parts):
        first, last = shard_bounds(w.rows, n, mesh.index(rank, axes))
        new.append(np.zeros((*x.shape[:dim], last - first, *x.shape[dim + 2 :]), x.dtype))
    for rank, x in enumerate(parts):
        k = mesh.index(rank, axes)
        start, stop = w.span(n, k)
        added = fold(x, dim, stop - start, w.step, 0)
        for holder, low, high in w.needed(n, k):
            first = shard_bounds(w.rows, n, holder)[0]
            new[mesh.moved(rank, axes, holder)][at_dim(dim, low - first, high - first)] += added[
                at_dim(dim, low - start, high - start)
            ]
    return new


def _in_groups(apply: Callable[[Any, Parts], Parts]) -> Callable[..., Parts]:
    """Return the function that applies `apply` to each group of ranks."""

    def apply_to_groups(
        op: dist.CollectiveOp, parts: Parts, value: SSAValue, out: SSAValue, mesh: Mesh
    ):
        new = list(parts)
        for group in mesh.groups(op.axes.data):
            for rank, x in zip(group, apply(op, [parts[r] for r in group]), strict=True):
                new[rank] = x
        return new

    return apply_to_groups


NUMPY: dict[str, Callable[..., Parts]] = {
    "all_reduce": _in_groups(_all_reduce),
    "all_gather": _in_groups(_all_gather),
    "reduce_scatter": _in_groups(_reduce_scatter),
    "all_slice": _in_groups(_all_slice),
    "all_to_all": _in_groups(_all_to_all),
    "exchange": _exchange,
    "replicated_to_partial": _in_groups(_replicated_to_partial),
    "sharded_to_partial": _in_groups(_sharded_to_partial),
    "reinterpret": lambda op, parts, *_: parts,
    "copy": lambda op, parts, *_: [x.copy() for x in parts],
    "broadcast": _in_groups(_broadcast),
    "gather": _in_groups(_gather),
    "scatter": _in_groups(_scatter),
    "permute": _in_groups(_permute),
    "halo_unfold": _halo_unfold,
    "halo_fold": _halo_fold,
}
"""The function for each collective, by the name of its record."""


def run_collective(op: dist.CollectiveOp, values: list[Parts], mesh: Mesh) -> list[Parts]:
    """Return the parts of each value on all ranks after the collective."""
    apply = NUMPY[op.record.name]
    transfers = zip(values, op.values, op.outs, strict=True)
    return [apply(op, parts, value, out, mesh) for parts, value, out in transfers]


def run_ring_product(op: dist.RingProductOp, operands: list[Parts], mesh: Mesh) -> list[Parts]:
    """Return the parts of each result on all ranks of a product in steps: the collective and the
    product, one after the other."""
    operands, (which, dim, out) = list(operands), op.ring
    groups = list(mesh.groups(op.axes.data))

    def gather(parts: Parts, dim: int) -> Parts:
        new = list(parts)
        for group in groups:
            unsharded = np.concatenate([parts[r] for r in group], axis=dim)
            for r in group:
                new[r] = unsharded
        return new

    if isinstance(op, dist.GatheredProductOp):
        operands[which] = gather(operands[which], dim)
    products = [np.einsum(op.equation.data, x, y) for x, y in zip(*operands, strict=True)]
    if isinstance(op, dist.GatheredProductOp):
        return [products, operands[which]][: len(op.outs)]
    new = list(products)
    for group in groups:
        shards = np.split(sum(products[r] for r in group), len(group), axis=out)
        for r, shard in zip(group, shards, strict=True):
            new[r] = shard
    return [new]
