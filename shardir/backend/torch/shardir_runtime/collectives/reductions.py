"""Reductions over a group: all-reduce and reduce-scatter, of a tensor or a list of them."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import blocks as block_moves
from . import buffers
from .mesh import Axes, Group, Mesh, bounds, shard_size
from .position import recorded

WIDE = 1 << 16
"""The elements that are summed at once where that needs memory: of floats shorter than f32."""


@recorded
def all_reduce(
    mesh: Mesh, x: Any, op: str, axes: Axes, donate: bool = False, wait: bool = True,
    out: buffers.CollectiveMemory | None = None,
) -> Any:  # fmt: skip
    """Return the sum, max, min or mean over the group, on each of its ranks.

    A list of tensors is reduced as one flat buffer. donate: x itself may be overwritten. out: the
    memory of results and buffers.
    """
    group = mesh.group(axes)
    buffers.begin(out)
    if group.size == 1:
        return buffers.result(buffers.Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        if not (donate and x.is_contiguous()):
            x = buffers.made(out, 0, x, *x.shape).copy_(x)
        return buffers.result(_reduce_in_place(group, x, op, wait), wait)

    def fused(places: list[int]) -> buffers.Pending:
        shapes = [x[i].shape for i in places]
        flat = buffers.made(out, 0, x[places[0]], sum(shape.numel() for shape in shapes))
        torch.cat([x[i].reshape(-1) for i in places], out=flat)
        pending = _reduce_in_place(group, flat, op, wait)

        def finish() -> list[Tensor]:
            parts = pending.wait().split([shape.numel() for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        return buffers.Pending(None, finish)

    return buffers.result(buffers.per_dtype(x, fused), wait)


def _reduce_in_place(group: Group, x: Tensor, op: str, wait: bool) -> buffers.Pending:
    ordered = x.is_floating_point() and op in ("max", "min")
    sent = _to_ordered(x, op) if ordered else buffers.in_transport_dtype(x)
    work = dist.all_reduce(
        sent, _reduction(x, op), group=group.process_group, async_op=not wait
    )  # fmt: skip

    def finish() -> Tensor:
        if ordered:
            return x.copy_(_from_ordered(sent))
        return x.div_(group.size) if op == "mean" else x

    return buffers.Pending(work, finish)


def _to_ordered(x: Tensor, op: str) -> Tensor:
    """Return integers in the order of floats, NaN the last for a max, and the first for a min.

    The transports' own max and min of floats lose NaN: which operand a comparison returns depends
    on the order of ranks.
    """
    wide = x.float() if x.element_size() < 4 else x
    bits = wide.view(torch.int32 if wide.element_size() == 4 else torch.int64)
    ends = torch.iinfo(bits.dtype)
    return _flipped(bits).masked_fill_(wide.isnan(), ends.max if op == "max" else ends.min)


def _from_ordered(integers: Tensor) -> Tensor:
    """Return the floats of `_to_ordered`, f32 for narrower ones."""
    return _flipped(integers).view(
        torch.float32 if integers.element_size() == 4 else torch.float64
    )  # fmt: skip


def _flipped(bits: Tensor) -> Tensor:
    """Return a new tensor of the same signs, the other bits of negative integers inverted: from
    sign and magnitude to two's complement, or back."""
    ends = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (ends.bits - 1)) & ends.max)


def _reduction(x: Tensor, op: str) -> Any:
    """Return torch's reduction. A mean is a sum, divided after; a sum of booleans is `or`."""
    if op == "mean" and not x.is_floating_point():
        raise TypeError(f"expected floats for a mean, got {x.dtype}; convert them first")
    if x.dtype == torch.bool and op == "sum":
        op = "max"
    ops = dist.ReduceOp
    return {"sum": ops.SUM, "mean": ops.SUM, "max": ops.MAX, "min": ops.MIN}[op]


@recorded
def reduce_scatter(
    mesh: Mesh, x: Any, op: str, dim: Any, axes: Axes, wait: bool = True,
    out: buffers.CollectiveMemory | None = None,
) -> Any:  # fmt: skip
    """Return this rank's shard, along `dim`, of the reduction over the group.

    A list of tensors (with one dim, or a list of them) is reduced at once; those that are small, or
    whose shards are not contiguous, in one flat buffer. out: the memory of results and buffers.
    """
    group = mesh.group(axes)
    buffers.begin(out)
    if group.size == 1:
        return buffers.result(buffers.Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return buffers.result(buffers.only(_reduce_scatter(group, [x], op, [dim], wait, out)), wait)
    dims = buffers.for_each(dim, x)
    pending = buffers.per_dtype(
        x,
        lambda at: _reduce_scatter(group, [x[i] for i in at], op, [dims[i] for i in at], wait, out),
    )
    return buffers.result(pending, wait)


def _reduce_scatter(
    group: Group, xs: list[Tensor], op: str, dims: list[int], wait: bool,
    out: buffers.CollectiveMemory | None,
) -> buffers.Pending:  # fmt: skip
    n = group.size
    shapes = [
        buffers.with_size(x.shape, dim, shard_size(x.shape[dim], n))
        for x, dim in zip(xs, dims, strict=True)
    ]
    found = buffers.direct(group, [x.shape for x in xs], dims, 1)
    direct = [i for i in found if xs[i].shape[dims[i]] % n == 0]
    packed = [i for i in range(len(xs)) if i not in direct]
    blocks = [xs[i].contiguous().view(n, xs[i].numel() // n) for i in direct]
    sizes = [math.prod(shapes[i]) for i in packed]
    if packed:
        given = [(xs[i], dims[i], shapes[i]) for i in packed]
        blocks.append(_packed(group, given, sizes, out))
    spans = [bounds(x.shape[dim], n, group.index) for x, dim in zip(xs, dims, strict=True)]
    del xs
    pending = _reduce_blocks(group, blocks, op, wait, bool(packed), out)
    del blocks

    def finish() -> list[Tensor]:
        outs = pending.wait()
        parts = iter(outs[-1].split(sizes) if packed else ())
        flats = (outs[direct.index(i)] if i in direct else next(parts) for i in range(len(shapes)))
        return [
            flat.view(shape).narrow(dim, 0, stop - start)
            for flat, shape, dim, (start, stop) in zip(flats, shapes, dims, spans, strict=True)
        ]

    return buffers.Pending(None, finish)


def _packed(
    group: Group, given: list[tuple[Tensor, int, list[int]]], sizes: list[int],
    place: buffers.CollectiveMemory | None,
) -> Tensor:  # fmt: skip
    """Return the blocks of tensors along a dimension each, as the rows of a new tensor, in torch's
    order; those that are shorter than the shape of the largest are padded with zeros. Even ones
    take one copy of each tensor, however many blocks it has."""
    n, first = group.size, given[0][0]
    even = all(x.shape[dim] % n == 0 for x, dim, _ in given)
    blocks = buffers.empty(place, first, n, sum(sizes))
    if even and group.in_order:
        for (x, dim, shape), column in zip(given, blocks.split(sizes, 1), strict=True):
            column.view(n, *shape).copy_(buffers.by_member(x, dim, n))
        return blocks
    if not even:
        blocks.zero_()
    for k in range(n):
        row = blocks[group.order[k]].split(sizes)
        for (x, dim, shape), part in zip(given, row, strict=True):
            start, stop = bounds(x.shape[dim], n, k)
            into = part.view(shape).narrow(dim, 0, stop - start)
            into.copy_(x.narrow(dim, start, stop - start))
    return blocks


def _reduce_blocks(
    group: Group, blocks: list[Tensor], op: str, wait: bool, packed: bool,
    place: buffers.CollectiveMemory | None,
) -> buffers.Pending:  # fmt: skip
    """Return the reductions of this rank's rows of `blocks`, of which the last is a buffer if they
    are `packed`: it is freed before the sums."""
    outs = [buffers.made(place, 0, x, x.shape[1]) for x in blocks]
    reduction = _reduction(blocks[0], op)
    moved = [k for k, out in enumerate(outs) if out.numel()]
    received, work = list[Tensor](), None
    given, made = [blocks[k] for k in moved], [outs[k] for k in moved]
    if moved and block_moves.is_library(given[0]):
        work = block_moves.scatter(group, given, made, reduction, wait)
    elif moved:  # Gloo has only the sum here, and is 1.4 (16 MB) to 2.7 (4 KB) times slower
        received = [buffers.empty(place, x, group.size - 1, x.shape[1]) for x in given]
        work = block_moves.exchange(group, given, received, wait)
    own = [x[group.order[group.index]] for x in given] if received else []
    del blocks, given

    def finish() -> list[Tensor]:
        if own and packed:
            own[-1] = made[-1].copy_(own[-1])
        for rows, x, out in zip(received, own, made, strict=False):  # none if the library reduces
            _reduce_rows(rows, x, reduction, out)
        return [out.div_(group.size) for out in outs] if op == "mean" else outs

    return buffers.Pending(work, finish)


def _reduce_rows(rows: Tensor, own: Tensor, reduction: Any, out: Tensor) -> None:
    """Reduce the rows of other ranks and this rank's own, which may be `out`; sums of short floats
    in f32."""
    if reduction != dist.ReduceOp.SUM:
        smallest = reduction == dist.ReduceOp.MIN
        extreme, of_two = (torch.amin, torch.minimum) if smallest else (torch.amax, torch.maximum)
        of_two(extreme(rows, 0), own, out=out)
    elif (is_short := out.is_floating_point() and out.element_size() < 4) or own is out:
        dtype = torch.float32 if is_short else out.dtype
        parts = (rows.split(WIDE, 1), own.split(WIDE), out.split(WIDE))
        for of_others, mine, into in zip(*parts, strict=True):
            into.copy_(torch.sum(of_others, 0, dtype=dtype).add_(mine))
    else:
        torch.sum(rows, 0, dtype=out.dtype, out=out).add_(own)
