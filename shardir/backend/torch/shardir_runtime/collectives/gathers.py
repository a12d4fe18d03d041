"""All-gather and all-to-all, of a tensor or a list of tensors."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import blocks as block_moves
from . import buffers
from .mesh import Axes, Group, Mesh, bounds, shard_size
from .position import recorded


@recorded
def all_gather(
    mesh: Mesh, x: Any, dim: Any, axes: Axes, total: Any = None, wait: bool = True,
    out: buffers.CollectiveMemory | None = None,
) -> Any:  # fmt: skip
    """Return the group's shards, concatenated along `dim`, on each of its ranks.

    Args:
        x: a tensor, or a list of tensors, gathered at once: small tensors, and tensors whose shards
            are not contiguous in the result, share one flat buffer.
        dim, total: of all tensors, or a list with one for each. `total` is the size of `dim` after
            gathering, needed where shards are uneven.
        out: the memory of results and buffers.
    """
    group = mesh.group(axes)
    return buffers.start_collective(
        group, x, wait, out, lambda xs, at, memory: _all_gather(
            group, xs, buffers.select(dim, at), buffers.select(total, at), wait, memory
        ),
    )  # fmt: skip


def _all_gather(
    group: Group, xs: list[Tensor], dims: list[int], totals: list, wait: bool,
    memory: buffers.CollectiveMemory | None,
) -> buffers.Pending:  # fmt: skip
    n = group.size
    totals = [n * x.shape[d] if t is None else t for x, d, t in zip(xs, dims, totals, strict=True)]
    shapes = [
        buffers.with_size(x.shape, dim, shard_size(total, n))
        for x, dim, total in zip(xs, dims, totals, strict=True)
    ]
    direct = buffers.unpacked_tensors(group, shapes, dims, n)
    packed = [i for i in range(len(xs)) if i not in direct]
    sizes = [math.prod(shapes[i]) for i in packed]
    rows = [buffers.empty_result(memory, i, xs[i], n, math.prod(shapes[i])) for i in direct]
    flats = [
        _fill_row(group, row, [xs[i]], [dims[i]], [shapes[i]])
        for i, row in zip(direct, rows, strict=True)
    ]
    if packed:
        rows.append(buffers.empty_buffer(memory, xs[packed[0]], n, sum(sizes)))
        along, padded = [dims[i] for i in packed], [shapes[i] for i in packed]
        flats.append(_fill_row(group, rows[-1], [xs[i] for i in packed], along, padded))
    del xs
    moved = [k for k, flat in enumerate(flats) if flat.numel()]
    work = None
    if moved:
        work = block_moves.gather(group, [flats[k] for k in moved], [rows[k] for k in moved], wait)
    del flats

    def finish() -> list[Tensor]:
        columns = iter(rows[-1].split(sizes, dim=1) if packed else ())
        results = []
        for i, (shape, dim, total) in enumerate(zip(shapes, dims, totals, strict=True)):
            if i in direct:
                x = rows[direct.index(i)].view(buffers.with_size(shape, dim, n * shape[dim]))
                results.append(x.narrow(dim, 0, total))
            else:
                results.append(_unpack(group, next(columns), dim, shape, total, memory, i))
        return results

    return buffers.Pending(work, finish)


def _unpack(
    group: Group, column: Tensor, dim: int, shape: list[int], total: int,
    memory: buffers.CollectiveMemory | None, i: int,
) -> Tensor:  # fmt: skip
    """Return the members' blocks of a shape, which are the rows of `column`, as one tensor: result
    number i. Even blocks take one copy, however many members there are."""
    n = group.size
    if group.in_order and total == n * shape[dim]:
        out = buffers.empty_result(memory, i, column, *buffers.with_size(shape, dim, total))
        buffers.by_member(out, dim, n).copy_(column.view(n, *shape))
        return out
    blocks = [column[k].view(shape) for k in group.order]
    return buffers.join_blocks(blocks, dim, total, memory, i)


def _fill_row(
    group: Group, rows: Tensor, xs: list[Tensor], dims: list[int], shapes: list
) -> Tensor:  # fmt: skip
    """Return the elements that this rank sends: of tensors, each padded with zeros along its
    dimension to its shape. A single contiguous tensor is sent in place; others are copied to this
    rank's row of `rows` [n, size], which receives them in any case."""
    even = all(x.shape == torch.Size(shape) for x, shape in zip(xs, shapes, strict=True))
    if len(xs) == 1 and even and xs[0].is_contiguous():
        return xs[0].view(-1)
    row = rows[group.order[group.index]]
    if not even:
        row.zero_()
    parts = row.split([math.prod(shape) for shape in shapes])
    for x, dim, shape, part in zip(xs, dims, shapes, parts, strict=True):
        part.view(shape).narrow(dim, 0, x.shape[dim]).copy_(x)
    return row


@recorded
def all_to_all(
    mesh: Mesh, x: Any, split_dim: int, concat_dim: int, axes: Axes, total: Any = None,
    wait: bool = True, out: buffers.CollectiveMemory | None = None,
) -> Any:  # fmt: skip
    """Split `split_dim` over the group, and concatenate `concat_dim`.

    Args:
        x: a tensor, or a list of tensors, moved as one flat buffer.
        total: the size of `concat_dim` afterwards, or a list with one for each tensor; needed where
            its shards are uneven.
        out: the memory of results and buffers.
    """
    group = mesh.group(axes)
    return buffers.start_collective(
        group, x, wait, out, lambda xs, at, memory: _all_to_all(
            group, xs, split_dim, concat_dim, buffers.select(total, at), wait, memory
        ),
    )  # fmt: skip


def _all_to_all(
    group: Group, xs: list[Tensor], split_dim: int, concat_dim: int, totals: list, wait: bool,
    memory: buffers.CollectiveMemory | None,
) -> buffers.Pending:  # fmt: skip
    n, first = group.size, xs[0]
    totals = [n * x.shape[concat_dim] if t is None else t for x, t in zip(xs, totals, strict=True)]
    even = all(x.shape[split_dim] % n == 0 and t % n == 0 for x, t in zip(xs, totals, strict=True))
    if len(xs) == 1 and even and group.in_order and buffers.is_major(first, split_dim):
        flat = first.view(-1)
        sends = None
    else:
        rows = list(zip(*(buffers.split_by_member(group, x, split_dim) for x in xs), strict=True))
        flat = buffers.flatten([piece.reshape(-1) for row in rows for piece in row], memory)
        sends = None if even else [sum(piece.numel() for piece in row) for row in rows]
    shapes = []
    for x, total in zip(xs, totals, strict=True):
        start, stop = bounds(x.shape[split_dim], n, group.index)
        own = buffers.with_size(x.shape, split_dim, stop - start)
        spans = buffers.all_bounds(total, n)
        shapes.append([buffers.with_size(own, concat_dim, stop - start) for start, stop in spans])
    rows = list(zip(*(buffers.to_torch_order(group, each) for each in shapes), strict=True))
    sizes = [math.prod(shape) for row in rows for shape in row]
    receives = None if even else [sum(map(math.prod, row)) for row in rows]
    count = len(totals)
    is_result = count == 1 and group.in_order and math.prod(shapes[0][0][:concat_dim]) == 1
    if is_result:
        out = buffers.empty_result(memory, 0, flat, sum(sizes))
    else:
        out = buffers.empty_buffer(memory, flat, sum(sizes))
    work = dist.all_to_all_single(
        buffers.in_transport_dtype(out),
        buffers.in_transport_dtype(flat),
        receives,
        sends,
        group=group.process_group,
        async_op=not wait,
    )

    def finish() -> list[Tensor]:
        if is_result:
            return [out.view(buffers.with_size(shapes[0][0], concat_dim, totals[0]))]
        parts = out.split(sizes)
        results = []
        for i, total in enumerate(totals):
            blocks = [parts[p * count + i].view(rows[p][i]) for p in group.order]
            shape = buffers.with_size(blocks[0].shape, concat_dim, total)
            into = buffers.empty_result(memory, i, out, *shape)
            results.append(torch.cat(blocks, concat_dim, out=into))
        return results

    return buffers.Pending(work, finish)
