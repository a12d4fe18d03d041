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
  [min(k*c, N), min((k+1)*c, N)). The last shards may be short or empty; no collective minds.
* What a function returns may be its argument, or a view of it. Only `donate=True` writes into one.
* With `wait=False` a collective is only started, and gives a `Pending`; its arguments must stay as
  they are until its `wait()`.
* A group of one rank never communicates.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from runtime_mesh import Axes, Group, Mesh, bounds, shard_size
from runtime_plan import Sized
from torch import Tensor

# torch 2.13 has new names for these two; 2.11 has only the old ones.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Gloo gathers in a ring; up to this many elements, sending to all at once takes half the time.
_SMALL = 1 << 16


def main(functions: dict[str, Callable], single: bool = False) -> None:
    """Runs the functions of plan.json (see runtime_main.py); `single`: on one device, unsplit."""
    import runtime_main

    runtime_main.main(functions, single)


# ---- helpers ---------------------------------------------------------------------------------


def _wire(x: Tensor) -> Tensor:
    """The tensor as the back ends know it: they have no booleans."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x, contiguous, with zeros behind it up to `size`."""
    if x.shape[dim] == size:
        return x.contiguous()
    padded = x.new_zeros(_with_size(x.shape, dim, size))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _is_major(x: Tensor, dim: int) -> bool:
    """Whether blocks along `dim` lie behind each other in memory."""
    return math.prod(x.shape[:dim]) == 1 and x.is_contiguous()


class Pending:
    """A collective under way. `wait` gives what it makes, once: a tensor, or a list of them."""

    def __init__(self, work: Any, finish: Callable[[], Any]):
        self._work, self._finish = work, finish  # no work: it is done, or there was none

    def wait(self) -> Any:
        work, finish = self._work, self._finish
        del self._work, self._finish  # with them goes what the collective needed
        if work is not None:
            work.wait()
            del work
        return finish()


def _per_dtype(tensors: Sequence[Tensor], start: Callable[[list[int]], Pending]) -> Pending:
    """One fused collective for each dtype; `start` gets the places in the list."""
    dtypes = dict.fromkeys(t.dtype for t in tensors)
    all_places = [[i for i, t in enumerate(tensors) if t.dtype == dtype] for dtype in dtypes]
    started = [(places, start(places)) for places in all_places]

    count = len(tensors)  # and not the tensors: what is in a buffer need not live

    def finish() -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for places, pending in started:
            results.update(zip(places, pending.wait()))
        return [results[i] for i in range(count)]

    return Pending(None, finish)


def _result(pending: Pending, wait: bool) -> Any:
    return pending.wait() if wait else pending


def _for_each(value: Any, tensors: Sequence[Tensor]) -> list:
    """One value for each tensor of a list: a list as it is, a single one repeated."""
    return list(value) if isinstance(value, list | tuple) else [value] * len(tensors)


# ---- reductions ------------------------------------------------------------------------------


def all_reduce(
    mesh: Mesh, x: Any, op: str, axes: Axes, donate: bool = False, wait: bool = True
) -> Any:
    """The sum, max, min or mean over the group, on each of its ranks.

    A list of tensors is reduced as one flat buffer. donate: x itself may be overwritten.
    """
    group = mesh.group(axes)
    if group.size == 1:
        return _result(Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        out = x if donate and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return _result(_reduce_in_place(group, out, op, wait), wait)

    def fused(places: list[int]) -> Pending:
        flat = torch.cat([x[i].reshape(-1) for i in places])
        shapes = [x[i].shape for i in places]
        pending = _reduce_in_place(group, flat, op, wait)

        def finish() -> list[Tensor]:
            parts = pending.wait().split([shape.numel() for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes)]

        return Pending(None, finish)

    return _result(_per_dtype(x, fused), wait)


def _reduce_in_place(group: Group, x: Tensor, op: str, wait: bool) -> Pending:
    work = dist.all_reduce(
        _wire(x), _reduction(x, op), group=group.process_group, async_op=not wait
    )
    return Pending(work, lambda: x.div_(group.size) if op == "mean" else x)


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
        return _result(Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return _result(_only(_reduce_scatter(group, [x], op, [dim], wait)), wait)
    dims = _for_each(dim, x)
    pending = _per_dtype(
        x, lambda at: _reduce_scatter(group, [x[i] for i in at], op, [dims[i] for i in at], wait)
    )
    return _result(pending, wait)


def _reduce_scatter(
    group: Group, xs: list[Tensor], op: str, dims: list[int], wait: bool
) -> Pending:  # fmt: skip
    n = group.size
    shapes = [_with_size(x.shape, dim, shard_size(x.shape[dim], n)) for x, dim in zip(xs, dims)]
    sizes = [math.prod(shape) for shape in shapes]
    first, even = xs[0], all(x.shape[dim] % n == 0 for x, dim in zip(xs, dims))
    if len(xs) == 1 and even and group.in_order and _is_major(first, dims[0]):
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

    return Pending(None, finish)


def _reduce_blocks(group: Group, blocks: Tensor, op: str, wait: bool) -> Pending:
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
            _wire(received), _wire(blocks), group=group.process_group, async_op=not wait
        )

    def finish() -> Tensor:
        if received is not None:
            _reduce_rows(received, reduction, out)
        return out.div_(group.size) if op == "mean" else out

    return Pending(work, finish)


def _reduce_rows(rows: Tensor, reduction: Any, out: Tensor) -> None:
    if reduction == dist.ReduceOp.SUM:
        torch.sum(rows, 0, dtype=out.dtype, out=out)
    else:
        reduce = torch.amin if reduction == dist.ReduceOp.MIN else torch.amax
        reduce(rows, 0, out=out)


def _only(pending: Pending) -> Pending:
    """Of one tensor in a list the tensor."""
    return Pending(None, lambda: pending.wait()[0])


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
        return _result(Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return _result(_only(_all_gather(group, [x], [dim], [total], wait)), wait)
    dims, totals = _for_each(dim, x), _for_each(total, x)
    pending = _per_dtype(
        x,
        lambda at: _all_gather(
            group, [x[i] for i in at], [dims[i] for i in at], [totals[i] for i in at], wait
        ),
    )
    return _result(pending, wait)


def _all_gather(
    group: Group, xs: list[Tensor], dims: list[int], totals: list, wait: bool
) -> Pending:  # fmt: skip
    n = group.size
    totals = [n * x.shape[d] if t is None else t for x, d, t in zip(xs, dims, totals)]
    xs = [_padded(x, dim, shard_size(total, n)) for x, dim, total in zip(xs, dims, totals)]
    sizes = [x.numel() for x in xs]
    flat = xs[0].view(-1) if len(xs) == 1 else torch.cat([x.view(-1) for x in xs])
    blocks, work = flat.new_empty(n, flat.numel()), None
    how: dict[str, Any] = {"group": group.process_group, "async_op": not wait}
    if 0 < flat.numel() * n <= _SMALL and flat.device.type == "cpu":
        copies = flat.expand(n, -1).contiguous()
        work = dist.all_to_all_single(_wire(blocks), _wire(copies), **how)
    elif flat.numel():
        work = _gather_into(_wire(blocks).view(-1), _wire(flat), **how)
    shapes, lies = [x.shape for x in xs], _is_major(xs[0], dims[0])

    def finish() -> list[Tensor]:
        if len(shapes) == 1 and group.in_order and lies:
            shape, dim, total = shapes[0], dims[0], totals[0]
            return [blocks.view(_with_size(shape, dim, n * shape[dim])).narrow(dim, 0, total)]
        columns = blocks.split(sizes, dim=1)
        return [
            _joined([column[k].view(shape) for k in group.order], dim, total)
            for shape, dim, total, column in zip(shapes, dims, totals, columns)
        ]

    return Pending(work, finish)


def _joined(blocks: list[Tensor], dim: int, total: int) -> Tensor:
    """The blocks, without what they were padded with, as one tensor."""
    spans = [bounds(total, len(blocks), k) for k in range(len(blocks))]
    return torch.cat([b.narrow(dim, 0, t - s) for b, (s, t) in zip(blocks, spans)], dim)


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
        return _result(Pending(None, lambda: x), wait)
    if isinstance(x, Tensor):
        return _result(_only(_all_to_all(group, [x], split_dim, concat_dim, [total], wait)), wait)
    totals = _for_each(total, x)
    pending = _per_dtype(
        x,
        lambda at: _all_to_all(
            group, [x[i] for i in at], split_dim, concat_dim, [totals[i] for i in at], wait
        ),
    )
    return _result(pending, wait)


def _all_to_all(
    group: Group, xs: list[Tensor], split_dim: int, concat_dim: int, totals: list, wait: bool
) -> Pending:
    n, first = group.size, xs[0]
    totals = [n * x.shape[concat_dim] if t is None else t for x, t in zip(xs, totals)]
    even = all(x.shape[split_dim] % n == 0 and t % n == 0 for x, t in zip(xs, totals))
    if len(xs) == 1 and even and group.in_order and _is_major(first, split_dim):
        flat = first.view(-1)
        sends = None
    else:
        pieces = [[x.narrow(split_dim, *p) for p in _parts(x.shape[split_dim], n)] for x in xs]
        rows = list(zip(*(_to_torch_order(group, of_one) for of_one in pieces)))
        flat = torch.cat([piece.reshape(-1) for row in rows for piece in row])
        sends = None if even else [sum(piece.numel() for piece in row) for row in rows]
    shapes = []
    for x, total in zip(xs, totals):
        own = _with_size(x.shape, split_dim, _parts(x.shape[split_dim], n)[group.index][1])
        shapes.append([_with_size(own, concat_dim, size) for _, size in _parts(total, n)])
    rows = list(zip(*(_to_torch_order(group, of_one) for of_one in shapes)))
    sizes = [math.prod(shape) for row in rows for shape in row]
    receives = None if even else [sum(map(math.prod, row)) for row in rows]
    out = flat.new_empty(sum(sizes))
    work = dist.all_to_all_single(
        _wire(out), _wire(flat), receives, sends, group=group.process_group, async_op=not wait
    )

    def finish() -> list[Tensor]:
        count = len(totals)
        if count == 1 and group.in_order and math.prod(shapes[0][0][:concat_dim]) == 1:
            return [out.view(_with_size(shapes[0][0], concat_dim, totals[0]))]
        parts = out.split(sizes)
        return [
            torch.cat([parts[p * count + i].view(rows[p][i]) for p in group.order], concat_dim)
            for i in range(count)
        ]

    return Pending(work, finish)


def _parts(total: int, count: int) -> list[tuple[int, int]]:
    """Where each part begins, and its size."""
    return [(start, stop - start) for start, stop in _all_bounds(total, count)]


def _all_bounds(total: int, count: int) -> list[tuple[int, int]]:
    return [bounds(total, count, k) for k in range(count)]


def _to_torch_order(group: Group, items: list) -> list:
    """One item for each member, from the order of the axes to torch's."""
    ordered = list(items)
    for item, place in zip(items, group.order):
        ordered[place] = item
    return ordered


# ---- from one, to one ------------------------------------------------------------------------


def broadcast(mesh: Mesh, x: Tensor, root: int, axes: Axes) -> Tensor:
    """The root's x on each rank of the group."""
    group = mesh.group(axes)
    if group.size == 1:
        return x
    out = x.contiguous() if group.index == root else torch.empty_like(x).contiguous()
    dist.broadcast(_wire(out), group.ranks[root], group=group.process_group)
    return out


def gather(
    mesh: Mesh, x: Tensor, dim: int, root: int, axes: Axes, total: int | None = None
) -> Tensor:
    """The group's shards, concatenated along `dim`, on the root; zeros of that shape elsewhere."""
    group = mesh.group(axes)
    if group.size == 1:
        return x
    total = group.size * x.shape[dim] if total is None else total
    x = _padded(x, dim, shard_size(total, group.size))
    at_root = group.index == root
    blocks = [torch.empty_like(x) for _ in group.ranks] if at_root else None
    wires = None if blocks is None else [_wire(block) for block in blocks]
    if x.numel():
        dist.gather(_wire(x), wires, group.ranks[root], group=group.process_group)
    if blocks is None:
        return x.new_zeros(_with_size(x.shape, dim, total))
    return _joined([blocks[k] for k in group.order], dim, total)


def scatter(mesh: Mesh, x: Tensor, dim: int, root: int, axes: Axes) -> Tensor:
    """This rank's shard, along `dim`, of the root's x; elsewhere only the shape of x counts."""
    group = mesh.group(axes)
    if group.size == 1:
        return x
    size = shard_size(x.shape[dim], group.size)
    start, stop = bounds(x.shape[dim], group.size, group.index)
    out = x.new_empty(_with_size(x.shape, dim, size))
    wires = None
    if group.index == root:
        spans = _all_bounds(x.shape[dim], group.size)
        blocks = [_padded(x.narrow(dim, s, t - s), dim, size) for s, t in spans]
        wires = [_wire(block) for block in _to_torch_order(group, blocks)]
    if out.numel():
        dist.scatter(_wire(out), wires, group.ranks[root], group=group.process_group)
    return out.narrow(dim, 0, stop - start)


def permute(
    mesh: Mesh, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes,
    shape: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """x of the rank that is paired as source with this one as target; zeros where there is none.

    shape: of what this rank receives, where that differs from x (uneven shards).
    """
    group = mesh.group(axes)
    me = group.index
    peers = mesh.peers() if group.size > 1 else None
    source = next((s for s, t in pairs if t == me), None)
    if source == me:
        out = x
    else:
        make = torch.zeros if source is None else torch.empty
        out = make(x.shape if shape is None else shape, dtype=x.dtype, device=x.device)
    transfers = []
    if source is not None and source != me:
        transfers.append((dist.irecv, out, source))
    if any(s == me != t for s, t in pairs):
        x = x.contiguous()
        transfers += [(dist.isend, x, t) for s, t in pairs if s == me != t]
    transfers = [
        dist.P2POp(call, _wire(tensor), group.ranks[peer], peers)
        for call, tensor, peer in transfers
        if tensor.numel()
    ]
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return out


def send(mesh: Mesh, x: Tensor, source: int, target: int, axes: Axes) -> None:
    """Sends x from one rank of the group to another; nothing on all others.

    It does not wait for the receiver, so two ranks may send to each other first and receive then.
    """
    group = mesh.group(axes)
    peers = None if source == target else mesh.peers()
    if group.index != source:
        return
    x = x.clone(memory_format=torch.contiguous_format)  # the program may overwrite its own
    if source == target:
        mesh._to_self.setdefault(group.ranks, deque()).append(x)
        return
    while mesh._sends and mesh._sends[0][0].is_completed():
        mesh._sends.popleft()
    if x.numel():
        work = dist.isend(_wire(x), group.ranks[target], group=peers)
        mesh._sends.append((work, x))


def recv(
    mesh: Mesh, shape: Sequence[int], dtype: torch.dtype, source: int, target: int, axes: Axes
) -> Tensor:
    """What `source` sent, on the target; zeros on all other ranks."""
    group = mesh.group(axes)
    peers = None if source == target else mesh.peers()
    if group.index != target:
        return torch.zeros(tuple(shape), dtype=dtype, device=mesh.device)
    if source == target:
        return mesh._to_self[group.ranks].popleft()
    out = torch.empty(tuple(shape), dtype=dtype, device=mesh.device)
    if out.numel():
        dist.recv(_wire(out), group.ranks[source], group=peers)
    return out


# ---- whole values ----------------------------------------------------------------------------


def local_bounds(mesh: Mesh, shape: Sequence[int], dims: Sequence[Axes]) -> list[tuple[int, int]]:
    """Rows [start, stop) of each dimension that this rank holds of a value split by `dims`."""
    return [mesh.bounds(size, axes) for size, axes in zip(shape, dims)]


def gather_global(
    mesh: Mesh, x: Tensor, dims: Sequence[Axes], partial: tuple[str, Axes] | None,
    shape: Sequence[int],
) -> Tensor:  # fmt: skip
    """The whole value on every rank, from what each holds of it.

    dims: the axes that split each dimension; partial: the reduction still due, and its axes.
    """
    if partial is not None:
        x = all_reduce(mesh, x, partial[0], partial[1])
    for dim, axes in enumerate(dims):
        if isinstance(axes, Sized):
            most = max(axes.sizes)
            blocks = all_gather(mesh, _padded(x, dim, most), dim, tuple(axes)).split(most, dim)
            x = torch.cat([b.narrow(dim, 0, n) for b, n in zip(blocks, axes.sizes)], dim)
        elif axes:
            x = all_gather(mesh, x, dim, axes, total=shape[dim])
    return x
