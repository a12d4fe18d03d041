"""Collectives that move shards within a group: all-gather and all-to-all, of a tensor or a list of
them.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import blocks as block_moves
from . import buffers
from .mesh import Axes, Group, Mesh, shard_size
from .position import recorded


@recorded
def all_gather(
    mesh: Mesh, x: Any, dim: Any, axes: Axes, total: Any = None, wait: bool = True,
    out: buffers.CollectiveMemory | None = None,
) -> Any:  # fmt: skip
    """Return the group's shards, concatenated along `dim`, on each of its ranks.

    total: size of `dim` after gathering, needed where shards are uneven. A list of tensors (dim and
    total: one, or a list of them) is gathered at once; those that are small, or whose shards are
    not contiguous in the result, in one flat buffer. out: the memory of results and buffers.
    """
    group = mesh.group(axes)
    buffers.begin(out)
    if group.size == 1:
        return buffers.result(buffers.Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return buffers.result(
            buffers.only(_all_gather(group, [x], [dim], [total], wait, out)), wait
        )
    dims, totals = buffers.for_each(dim, x), buffers.for_each(total, x)
    pending = buffers.per_dtype(
        x,
        lambda at: _all_gather(
            group,
            [x[i] for i in at],
            [dims[i] for i in at],
            [totals[i] for i in at],
            wait,
            buffers.part(out, at),
        ),
    )
    return buffers.result(pending, wait)


def _all_gather(
    group: Group, xs: list[Tensor], dims: list[int], totals: list, wait: bool,
    out: buffers.CollectiveMemory | None,
) -> buffers.Pending:  # fmt: skip
    n = group.size
    totals = [n * x.shape[d] if t is None else t for x, d, t in zip(xs, dims, totals, strict=True)]
    shapes = [
        buffers.with_size(x.shape, dim, shard_size(total, n))
        for x, dim, total in zip(xs, dims, totals, strict=True)
    ]
    direct = buffers.direct(group, shapes, dims, n)
    packed = [i for i in range(len(xs)) if i not in direct]
    sizes = [math.prod(shapes[i]) for i in packed]
    rows = [buffers.made(out, i, xs[i], n, math.prod(shapes[i])) for i in direct]
    flats = [
        _in_row(group, row, [xs[i]], [dims[i]], [shapes[i]])
        for i, row in zip(direct, rows, strict=True)
    ]
    if packed:
        rows.append(buffers.empty(out, xs[packed[0]], n, sum(sizes)))
        given = [xs[i] for i in packed]
        along, padded = [dims[i] for i in packed], [shapes[i] for i in packed]
        flats.append(_in_row(group, rows[-1], given, along, padded))
        del given
    del xs
    moved = [k for k, flat in enumerate(flats) if flat.numel()]
    work = None
    if moved:
        work = block_moves.gather(group, [flats[k] for k in moved], [rows[k] for k in moved], wait)
    del flats

    def finish() -> list[Tensor]:
        columns = iter(rows[-1].split(sizes, dim=1) if packed else ())
        found = []
        for i, (shape, dim, total) in enumerate(zip(shapes, dims, totals, strict=True)):
            if i in direct:
                x = rows[direct.index(i)].view(buffers.with_size(shape, dim, n * shape[dim]))
                found.append(x.narrow(dim, 0, total))
            else:
                found.append(_unpacked(group, next(columns), dim, shape, total, out, i))
        return found

    return buffers.Pending(work, finish)


def _unpacked(
    group: Group, column: Tensor, dim: int, shape: list[int], total: int,
    place: buffers.CollectiveMemory | None, i: int,
) -> Tensor:  # fmt: skip
    """Return the blocks of the members, each of a shape and in its row of `column`, as one tensor:
    result number i. Even ones take one copy, however many members there are."""
    n = group.size
    if group.in_order and total == n * shape[dim]:
        out = buffers.made(place, i, column, *buffers.with_size(shape, dim, total))
        buffers.by_member(out, dim, n).copy_(column.view(n, *shape))
        return out
    blocks = [column[k].view(shape) for k in group.order]
    return buffers.joined(blocks, dim, total, place, i)


def _in_row(
    group: Group, rows: Tensor, xs: list[Tensor], dims: list[int], shapes: list
) -> Tensor:  # fmt: skip
    """Return the elements of tensors, each padded with zeros along its dimension to its shape, as
    this rank sends them: a contiguous one as it stands, others in the rank's own row of `rows`
    [n, size], where they are to arrive in any case."""
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

    total: size of `concat_dim` afterwards, needed where its shards are uneven. A list of tensors
    (total: one, or a list of them) is moved as one flat buffer. out: as of `all_gather`.
    """
    group = mesh.group(axes)
    buffers.begin(out)
    if group.size == 1:
        return buffers.result(buffers.Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return buffers.result(
            buffers.only(_all_to_all(group, [x], split_dim, concat_dim, [total], wait, out)), wait
        )
    totals = buffers.for_each(total, x)
    pending = buffers.per_dtype(
        x,
        lambda at: _all_to_all(
            group,
            [x[i] for i in at],
            split_dim,
            concat_dim,
            [totals[i] for i in at],
            wait,
            buffers.part(out, at),
        ),
    )
    return buffers.result(pending, wait)


def _all_to_all(
    group: Group, xs: list[Tensor], split_dim: int, concat_dim: int, totals: list, wait: bool,
    place: buffers.CollectiveMemory | None,
) -> buffers.Pending:  # fmt: skip
    n, first = group.size, xs[0]
    totals = [n * x.shape[concat_dim] if t is None else t for x, t in zip(xs, totals, strict=True)]
    even = all(x.shape[split_dim] % n == 0 and t % n == 0 for x, t in zip(xs, totals, strict=True))
    if len(xs) == 1 and even and group.in_order and buffers.is_major(first, split_dim):
        flat = first.view(-1)
        sends = None
    else:
        pieces = [
            [x.narrow(split_dim, *p) for p in buffers.parts(x.shape[split_dim], n)] for x in xs
        ]
        rows = list(zip(*(buffers.to_torch_order(group, of_one) for of_one in pieces), strict=True))
        flat = buffers.flat([piece.reshape(-1) for row in rows for piece in row], place)
        sends = None if even else [sum(piece.numel() for piece in row) for row in rows]
    shapes = []
    for x, total in zip(xs, totals, strict=True):
        own = buffers.with_size(
            x.shape, split_dim, buffers.parts(x.shape[split_dim], n)[group.index][1]
        )
        shapes.append(
            [buffers.with_size(own, concat_dim, size) for _, size in buffers.parts(total, n)]
        )
    rows = list(zip(*(buffers.to_torch_order(group, of_one) for of_one in shapes), strict=True))
    sizes = [math.prod(shape) for row in rows for shape in row]
    receives = None if even else [sum(map(math.prod, row)) for row in rows]
    count = len(totals)
    is_result = count == 1 and group.in_order and math.prod(shapes[0][0][:concat_dim]) == 1
    if is_result:
        out = buffers.made(place, 0, flat, sum(sizes))
    else:
        out = buffers.empty(place, flat, sum(sizes))
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
        found = []
        for i, total in enumerate(totals):
            blocks = [parts[p * count + i].view(rows[p][i]) for p in group.order]
            shape = buffers.with_size(blocks[0].shape, concat_dim, total)
            found.append(torch.cat(blocks, concat_dim, out=buffers.made(place, i, out, *shape)))
        return found

    return buffers.Pending(work, finish)
