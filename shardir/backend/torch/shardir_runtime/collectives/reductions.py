"""All-reduce and reduce-scatter, of a tensor or a list of tensors."""

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
"""The elements of short floats that are summed at once: their sums in f32 take 256 KB, which stay
in a core's cache."""


@recorded
def all_reduce(
    mesh: Mesh, x: Any, op: str, axes: Axes, donate: bool = False, wait: bool = True,
    out: buffers.CollectiveMemory | None = None,
) -> Any:  # fmt: skip
    """Return the sum, max, min or mean over the group, on each of its ranks.

    Args:
        x: a tensor, or a list of tensors, reduced as one flat buffer.
        donate: whether a tensor itself may be overwritten.
        out: the memory of results and buffers.
    """
    group = mesh.group(axes)

    def start(
        xs: list[Tensor], _: list[int], memory: buffers.CollectiveMemory | None
    ) -> buffers.Pending:
        if isinstance(x, Tensor):
            is_free = donate and x.is_contiguous()
            own = x if is_free else buffers.empty_result(out, 0, x, *x.shape).copy_(x)
            pending = _reduce_in_place(group, own, op, wait)
            return buffers.Pending(None, lambda: [pending.wait()])
        shapes = [each.shape for each in xs]
        flat = buffers.empty_result(out, 0, xs[0], sum(shape.numel() for shape in shapes))
        torch.cat([each.reshape(-1) for each in xs], out=flat)
        pending = _reduce_in_place(group, flat, op, wait)

        def finish() -> list[Tensor]:
            parts = pending.wait().split([shape.numel() for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        return buffers.Pending(None, finish)

    return buffers.start_collective(group, x, wait, out, start)


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
    return _flip_negative(bits).masked_fill_(wide.isnan(), ends.max if op == "max" else ends.min)


def _from_ordered(integers: Tensor) -> Tensor:
    """Return the floats of `_to_ordered`, f32 for narrower ones."""
    return _flip_negative(integers).view(
        torch.float32 if integers.element_size() == 4 else torch.float64
    )  # fmt: skip


def _flip_negative(bits: Tensor) -> Tensor:
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

    Args:
        x: a tensor, or a list of tensors, reduced at once: small tensors, and tensors whose shards
            are not contiguous, share one flat buffer.
        dim: of all tensors, or a list with one for each.
        out: the memory of results and buffers.
    """
    group = mesh.group(axes)
    return buffers.start_collective(
        group, x, wait, out,
        lambda xs, at, _: _reduce_scatter(group, xs, op, buffers.select(dim, at), wait, out),
    )  # fmt: skip


def _reduce_scatter(
    group: Group, xs: list[Tensor], op: str, dims: list[int], wait: bool,
    out: buffers.CollectiveMemory | None,
) -> buffers.Pending:  # fmt: skip
    n = group.size
    shapes = [
        buffers.with_size(x.shape, dim, shard_size(x.shape[dim], n))
        for x, dim in zip(xs, dims, strict=True)
    ]
    unpacked = buffers.unpacked_tensors(group, [x.shape for x in xs], dims, 1)
    direct = [i for i in unpacked if xs[i].shape[dims[i]] % n == 0]
    packed = [i for i in range(len(xs)) if i not in direct]
    blocks = [xs[i].contiguous().view(n, xs[i].numel() // n) for i in direct]
    sizes = [math.prod(shapes[i]) for i in packed]
    if packed:
        tensors = [(xs[i], dims[i], shapes[i]) for i in packed]
        blocks.append(_pack(group, tensors, sizes, out))
        del tensors
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


def _pack(
    group: Group, tensors: list[tuple[Tensor, int, list[int]]], sizes: list[int],
    memory: buffers.CollectiveMemory | None,
) -> Tensor:  # fmt: skip
    """Return the blocks of tensors as the rows of a new tensor, in torch's order. Each tensor has
    its dimension and the shape of its largest block, to which shorter blocks are padded with zeros.
    Even blocks take one copy of each tensor, however many blocks it has."""
    n, first = group.size, tensors[0][0]
    even = all(x.shape[dim] % n == 0 for x, dim, _ in tensors)
    blocks = buffers.empty_buffer(memory, first, n, sum(sizes))
    if even and group.in_order:
        for (x, dim, shape), column in zip(tensors, blocks.split(sizes, 1), strict=True):
            column.view(n, *shape).copy_(buffers.by_member(x, dim, n))
        return blocks
    if not even:
        blocks.zero_()
    for k in range(n):
        row = blocks[group.order[k]].split(sizes)
        for (x, dim, shape), part in zip(tensors, row, strict=True):
            start, stop = bounds(x.shape[dim], n, k)
            into = part.view(shape).narrow(dim, 0, stop - start)
            into.copy_(x.narrow(dim, start, stop - start))
    return blocks


def _reduce_blocks(
    group: Group, blocks: list[Tensor], op: str, wait: bool, packed: bool,
    memory: buffers.CollectiveMemory | None,
) -> buffers.Pending:  # fmt: skip
    """Return the reductions of this rank's rows of `blocks`. If `packed`, the last of the blocks is
    a buffer, which is freed before the sums."""
    outs = [buffers.empty_result(memory, 0, x, x.shape[1]) for x in blocks]
    reduction = _reduction(blocks[0], op)
    indices = [k for k, out in enumerate(outs) if out.numel()]
    received, work = list[Tensor](), None
    sent, results = [blocks[k] for k in indices], [outs[k] for k in indices]
    if sent and block_moves.is_library(sent[0]):
        work = block_moves.scatter(group, sent, results, reduction, wait)
    elif sent:  # Gloo has only the sum here, and is 1.4 (16 MB) to 2.7 (4 KB) times slower
        received = [buffers.empty_buffer(memory, x, group.size - 1, x.shape[1]) for x in sent]
        work = block_moves.exchange(group, sent, received, wait)
    own = [x[group.order[group.index]] for x in sent] if received else []
    del blocks, sent

    def finish() -> list[Tensor]:
        if own and packed:
            own[-1] = results[-1].copy_(own[-1])
        for rows, x, out in zip(received, own, results, strict=False):  # none from a library
            _reduce_rows(rows, x, reduction, out)
        return [out.div_(group.size) for out in outs] if op == "mean" else outs

    return buffers.Pending(work, finish)


def _reduce_rows(rows: Tensor, own: Tensor, reduction: Any, out: Tensor) -> None:
    """Reduce the rows of other ranks and this rank's own, which may be `out`; sums of short floats
    in f32."""
    if reduction != dist.ReduceOp.SUM:
        smallest = reduction == dist.ReduceOp.MIN
        reduce, combine = (torch.amin, torch.minimum) if smallest else (torch.amax, torch.maximum)
        combine(reduce(rows, 0), own, out=out)
    elif (is_short := out.is_floating_point() and out.element_size() < 4) or own is out:
        dtype = torch.float32 if is_short else out.dtype
        parts = (rows.split(WIDE, 1), own.split(WIDE), out.split(WIDE))
        for received, mine, into in zip(*parts, strict=True):
            into.copy_(torch.sum(received, 0, dtype=dtype).add_(mine))
    else:
        torch.sum(rows, 0, dtype=out.dtype, out=out).add_(own)
