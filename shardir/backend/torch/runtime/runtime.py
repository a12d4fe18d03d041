# ruff: noqa: B905
"""The runtime of an emitted program: the mesh, shards, and collectives on local tensors.

This file is copied beside every emitted program and needs only torch. A program says

    import runtime as rt
    y = rt.all_reduce(rt_mesh, y, "sum", ("tp",))

* An axis is a mesh axis' name, or `(name, pre, size)`: the axis seen as [pre, size, rest], major to
  minor, of which the middle is meant. Axes are given as a tuple, major to minor.
* A group is the ranks that differ only in those axes, in row-major order of the axes as listed; a
  `root`, `source` or `target` is a position in that order.
* A dimension of size N over n ranks has shards of c = ceil(N / n): rank k holds rows
  [min(k*c, N), min((k+1)*c, N)). The last shards may be short or empty, in every collective.
* What a function returns may be its argument, or a view of it. Only `donate=True` writes into one.
* With `wait=False` a collective is only started, and returns a `buffers.Pending`; its arguments
  must not change before its `wait()`.
* A group of one rank never communicates.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import runtime_buffers as buffers
import torch
import torch.distributed as dist
from runtime_mesh import Axes, Group, Mesh, bounds, shard_size
from runtime_plan import Sized
from runtime_transfers import broadcast, gather, permute, recv, scatter, send
from torch import Tensor

__all__ = [
    "Axes",
    "Group",
    "Mesh",
    "Sized",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "bounds",
    "broadcast",
    "gather",
    "gather_global",
    "local_bounds",
    "main",
    "permute",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
    "slice",
]

# torch 2.13 has new names for these two; 2.11 has only the old ones.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Gloo gathers in a ring; up to this many elements, sending to all at once takes half the time.
_SMALL = 1 << 16


def main(functions: dict[str, Callable], single: bool = False) -> None:
    """Runs the functions of plan.json (see runtime_main.py); `single`: on one device, unsplit."""
    import runtime_main

    runtime_main.main(functions, single)


# ---- reductions ------------------------------------------------------------------------------


def all_reduce(
    mesh: Mesh, x: Any, op: str, axes: Axes, donate: bool = False, wait: bool = True
) -> Any:
    """The sum, max, min or mean over the group, on each of its ranks.

    A list of tensors is reduced as one flat buffer. donate: x itself may be overwritten.
    """
    group = mesh.group(axes)
    if group.size == 1:
        return buffers.result(buffers.Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        out = x if donate and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return buffers.result(_reduce_in_place(group, out, op, wait), wait)

    def fused(places: list[int]) -> buffers.Pending:
        flat = torch.cat([x[i].reshape(-1) for i in places])
        shapes = [x[i].shape for i in places]
        pending = _reduce_in_place(group, flat, op, wait)

        def finish() -> list[Tensor]:
            parts = pending.wait().split([shape.numel() for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes)]

        return buffers.Pending(None, finish)

    return buffers.result(buffers.per_dtype(x, fused), wait)


def _reduce_in_place(group: Group, x: Tensor, op: str, wait: bool) -> buffers.Pending:
    work = dist.all_reduce(
        buffers.in_transport_dtype(x),
        _reduction(x, op),
        group=group.process_group,
        async_op=not wait,
    )
    return buffers.Pending(work, lambda: x.div_(group.size) if op == "mean" else x)


def _reduction(x: Tensor, op: str) -> Any:
    """torch's name of the reduction. A mean is a sum, divided after; a sum of booleans is `or`."""
    if op == "mean" and not x.is_floating_point():
        raise TypeError(f"the mean of {x.dtype} tensors is not one; convert them first")
    if x.dtype == torch.bool and op == "sum":
        op = "max"
    ops = dist.ReduceOp
    return {"sum": ops.SUM, "mean": ops.SUM, "max": ops.MAX, "min": ops.MIN}[op]


def reduce_scatter(
    mesh: Mesh, x: Any, op: str, dim: Any, axes: Axes, wait: bool = True
) -> Any:  # fmt: skip
    """This rank's shard, along `dim`, of the reduction over the group.

    A list of tensors (with one dim, or a list of them) is reduced as one flat buffer.
    """
    group = mesh.group(axes)
    if group.size == 1:
        return buffers.result(buffers.Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return buffers.result(buffers.only(_reduce_scatter(group, [x], op, [dim], wait)), wait)
    dims = buffers.for_each(dim, x)
    pending = buffers.per_dtype(
        x, lambda at: _reduce_scatter(group, [x[i] for i in at], op, [dims[i] for i in at], wait)
    )
    return buffers.result(pending, wait)


def _reduce_scatter(
    group: Group, xs: list[Tensor], op: str, dims: list[int], wait: bool
) -> buffers.Pending:  # fmt: skip
    n = group.size
    shapes = [
        buffers.with_size(x.shape, dim, shard_size(x.shape[dim], n)) for x, dim in zip(xs, dims)
    ]
    sizes = [math.prod(shape) for shape in shapes]
    first, even = xs[0], all(x.shape[dim] % n == 0 for x, dim in zip(xs, dims))
    if len(xs) == 1 and even and group.in_order and buffers.is_major(first, dims[0]):
        blocks = first.view(n, -1) if first.numel() else first.new_empty(n, 0)
    else:
        blocks = (first.new_empty if even else first.new_zeros)(n, sum(sizes))
        for k in range(n):
            row = blocks[group.order[k]].split(sizes)
            for x, dim, shape, part in zip(xs, dims, shapes, row):
                start, stop = bounds(x.shape[dim], n, k)
                into = part.view(shape).narrow(dim, 0, stop - start)
                into.copy_(x.narrow(dim, start, stop - start))
    pending = _reduce_blocks(group, blocks, op, wait) if sum(sizes) else None
    spans = [bounds(x.shape[dim], n, group.index) for x, dim in zip(xs, dims)]

    def finish() -> list[Tensor]:
        flat = blocks.new_empty(0) if pending is None else pending.wait()
        return [
            part.view(shape).narrow(dim, 0, stop - start)
            for part, shape, dim, (start, stop) in zip(flat.split(sizes), shapes, dims, spans)
        ]

    return buffers.Pending(None, finish)


def _reduce_blocks(group: Group, blocks: Tensor, op: str, wait: bool) -> buffers.Pending:
    """The reduction of the row of `blocks` that is this rank's."""
    out, reduction = blocks.new_empty(blocks.shape[1]), _reduction(blocks, op)
    if out.device.type == "cuda" and out.dtype != torch.bool:
        received = None
        work = _scatter_into(
            out, blocks.view(-1), reduction, group=group.process_group, async_op=not wait
        )
    else:
        # Gloo knows only the sum here, and is 1.4 (16 MB) to 2.7 (4 KB) times slower than this.
        received = torch.empty_like(blocks)
        work = dist.all_to_all_single(
            buffers.in_transport_dtype(received),
            buffers.in_transport_dtype(blocks),
            group=group.process_group,
            async_op=not wait,
        )

    def finish() -> Tensor:
        if received is not None:
            _reduce_rows(received, reduction, out)
        return out.div_(group.size) if op == "mean" else out

    return buffers.Pending(work, finish)


def _reduce_rows(rows: Tensor, reduction: Any, out: Tensor) -> None:
    if reduction == dist.ReduceOp.SUM:
        torch.sum(rows, 0, dtype=out.dtype, out=out)
    else:
        reduce = torch.amin if reduction == dist.ReduceOp.MIN else torch.amax
        reduce(rows, 0, out=out)


# ---- gathering and splitting -----------------------------------------------------------------


def all_gather(
    mesh: Mesh, x: Any, dim: Any, axes: Axes, total: Any = None, wait: bool = True
) -> Any:  # fmt: skip
    """The group's shards, concatenated along `dim`, on each of its ranks.

    total: size of `dim` after gathering, needed where shards are uneven. A list of tensors (dim and
    total: one, or a list of them) is gathered as one flat buffer.
    """
    group = mesh.group(axes)
    if group.size == 1:
        return buffers.result(buffers.Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return buffers.result(buffers.only(_all_gather(group, [x], [dim], [total], wait)), wait)
    dims, totals = buffers.for_each(dim, x), buffers.for_each(total, x)
    pending = buffers.per_dtype(
        x,
        lambda at: _all_gather(
            group, [x[i] for i in at], [dims[i] for i in at], [totals[i] for i in at], wait
        ),
    )
    return buffers.result(pending, wait)


def _all_gather(
    group: Group, xs: list[Tensor], dims: list[int], totals: list, wait: bool
) -> buffers.Pending:  # fmt: skip
    n = group.size
    totals = [n * x.shape[d] if t is None else t for x, d, t in zip(xs, dims, totals)]
    xs = [buffers.padded(x, dim, shard_size(total, n)) for x, dim, total in zip(xs, dims, totals)]
    sizes = [x.numel() for x in xs]
    flat = xs[0].view(-1) if len(xs) == 1 else torch.cat([x.view(-1) for x in xs])
    blocks, work = flat.new_empty(n, flat.numel()), None
    how: dict[str, Any] = {"group": group.process_group, "async_op": not wait}
    if 0 < flat.numel() * n <= _SMALL and flat.device.type == "cpu":
        copies = flat.expand(n, -1).contiguous()
        work = dist.all_to_all_single(
            buffers.in_transport_dtype(blocks), buffers.in_transport_dtype(copies), **how
        )
    elif flat.numel():
        work = _gather_into(
            buffers.in_transport_dtype(blocks).view(-1), buffers.in_transport_dtype(flat), **how
        )
    shapes, major = [x.shape for x in xs], buffers.is_major(xs[0], dims[0])

    def finish() -> list[Tensor]:
        if len(shapes) == 1 and group.in_order and major:
            shape, dim, total = shapes[0], dims[0], totals[0]
            return [
                blocks.view(buffers.with_size(shape, dim, n * shape[dim])).narrow(dim, 0, total)
            ]
        columns = blocks.split(sizes, dim=1)
        return [
            buffers.joined([column[k].view(shape) for k in group.order], dim, total)
            for shape, dim, total, column in zip(shapes, dims, totals, columns)
        ]

    return buffers.Pending(work, finish)


def slice(mesh: Mesh, x: Tensor, dim: int, axes: Axes) -> Tensor:
    """This rank's shard of x along `dim`: a view, no communication."""
    start, stop = mesh.bounds(x.shape[dim], axes)
    return x.narrow(dim, start, stop - start)


def all_to_all(
    mesh: Mesh, x: Any, split_dim: int, concat_dim: int, axes: Axes, total: Any = None,
    wait: bool = True,
) -> Any:  # fmt: skip
    """Splits `split_dim` over the group and puts `concat_dim` together.

    total: size of `concat_dim` afterwards, needed where its shards are uneven. A list of tensors
    (total: one, or a list of them) travels as one flat buffer.
    """
    group = mesh.group(axes)
    if group.size == 1:
        return buffers.result(buffers.Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return buffers.result(
            buffers.only(_all_to_all(group, [x], split_dim, concat_dim, [total], wait)), wait
        )
    totals = buffers.for_each(total, x)
    pending = buffers.per_dtype(
        x,
        lambda at: _all_to_all(
            group, [x[i] for i in at], split_dim, concat_dim, [totals[i] for i in at], wait
        ),
    )
    return buffers.result(pending, wait)


def _all_to_all(
    group: Group, xs: list[Tensor], split_dim: int, concat_dim: int, totals: list, wait: bool
) -> buffers.Pending:
    n, first = group.size, xs[0]
    totals = [n * x.shape[concat_dim] if t is None else t for x, t in zip(xs, totals)]
    even = all(x.shape[split_dim] % n == 0 and t % n == 0 for x, t in zip(xs, totals))
    if len(xs) == 1 and even and group.in_order and buffers.is_major(first, split_dim):
        flat = first.view(-1)
        sends = None
    else:
        pieces = [
            [x.narrow(split_dim, *p) for p in buffers.parts(x.shape[split_dim], n)] for x in xs
        ]
        rows = list(zip(*(buffers.to_torch_order(group, of_one) for of_one in pieces)))
        flat = torch.cat([piece.reshape(-1) for row in rows for piece in row])
        sends = None if even else [sum(piece.numel() for piece in row) for row in rows]
    shapes = []
    for x, total in zip(xs, totals):
        own = buffers.with_size(
            x.shape, split_dim, buffers.parts(x.shape[split_dim], n)[group.index][1]
        )
        shapes.append(
            [buffers.with_size(own, concat_dim, size) for _, size in buffers.parts(total, n)]
        )
    rows = list(zip(*(buffers.to_torch_order(group, of_one) for of_one in shapes)))
    sizes = [math.prod(shape) for row in rows for shape in row]
    receives = None if even else [sum(map(math.prod, row)) for row in rows]
    out = flat.new_empty(sum(sizes))
    work = dist.all_to_all_single(
        buffers.in_transport_dtype(out),
        buffers.in_transport_dtype(flat),
        receives,
        sends,
        group=group.process_group,
        async_op=not wait,
    )

    def finish() -> list[Tensor]:
        count = len(totals)
        if count == 1 and group.in_order and math.prod(shapes[0][0][:concat_dim]) == 1:
            return [out.view(buffers.with_size(shapes[0][0], concat_dim, totals[0]))]
        parts = out.split(sizes)
        return [
            torch.cat([parts[p * count + i].view(rows[p][i]) for p in group.order], concat_dim)
            for i in range(count)
        ]

    return buffers.Pending(work, finish)


# ---- global values ---------------------------------------------------------------------------


def local_bounds(mesh: Mesh, shape: Sequence[int], dims: Sequence[Axes]) -> list[tuple[int, int]]:
    """Rows [start, stop) of each dimension that this rank holds of a value split by `dims`."""
    return [mesh.bounds(size, axes) for size, axes in zip(shape, dims)]


def gather_global(
    mesh: Mesh, x: Tensor, dims: Sequence[Axes], partial: tuple[str, Axes] | None,
    shape: Sequence[int],
) -> Tensor:  # fmt: skip
    """The global value on every rank, from their shards.

    dims: the axes that split each dimension; partial: the reduction still due, and its axes.
    """
    if partial is not None:
        x = all_reduce(mesh, x, partial[0], partial[1])
    for dim, axes in enumerate(dims):
        if isinstance(axes, Sized):
            largest = max(axes.sizes)
            blocks = all_gather(mesh, buffers.padded(x, dim, largest), dim, tuple(axes))
            blocks = blocks.split(largest, dim)
            x = torch.cat([b.narrow(dim, 0, n) for b, n in zip(blocks, axes.sizes)], dim)
        elif axes:
            x = all_gather(mesh, x, dim, axes, total=shape[dim])
    return x
