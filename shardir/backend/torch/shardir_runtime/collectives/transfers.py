"""Transfers between one rank of a group and all, or between two ranks."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import buffers, channels
from .mesh import Axes, Mesh, bounds, shard_size
from .position import recorded


@recorded
def broadcast(mesh: Mesh, x: Tensor, root: int, axes: Axes) -> Tensor:
    """Return the root's x, on each rank of the group."""
    group = mesh.group(axes)
    if group.size == 1:
        return x
    out = x.contiguous() if group.index == root else torch.empty_like(x).contiguous()
    dist.broadcast(buffers.in_transport_dtype(out), group.ranks[root], group=group.process_group)
    return out


@recorded
def gather(
    mesh: Mesh, x: Tensor, dim: int, root: int, axes: Axes, total: int | None = None
) -> Tensor:
    """Return the group's shards, concatenated along `dim`, on the root; zeros of that shape
    elsewhere."""
    group = mesh.group(axes)
    if group.size == 1:
        return x
    total = group.size * x.shape[dim] if total is None else total
    x = buffers.pad_to(x, dim, shard_size(total, group.size))
    at_root = group.index == root
    blocks = [torch.empty_like(x) for _ in group.ranks] if at_root else None
    views = None if blocks is None else [buffers.in_transport_dtype(block) for block in blocks]
    if x.numel():
        dist.gather(
            buffers.in_transport_dtype(x), views, group.ranks[root], group=group.process_group
        )
    if blocks is None:
        return x.new_zeros(buffers.with_size(x.shape, dim, total))
    return buffers.join_blocks([blocks[k] for k in group.order], dim, total)


@recorded
def scatter(mesh: Mesh, x: Tensor, dim: int, root: int, axes: Axes) -> Tensor:
    """Return this rank's shard, along `dim`, of the root's x. On other ranks x has the shape
    alone."""
    group = mesh.group(axes)
    if group.size == 1:
        return x
    size = shard_size(x.shape[dim], group.size)
    start, stop = bounds(x.shape[dim], group.size, group.index)
    out = x.new_empty(buffers.with_size(x.shape, dim, size))
    views = None
    if group.index == root:
        blocks = buffers.split_by_member(group, x, dim)
        views = [buffers.in_transport_dtype(buffers.pad_to(b, dim, size)) for b in blocks]
    if out.numel():
        dist.scatter(
            buffers.in_transport_dtype(out), views, group.ranks[root], group=group.process_group
        )
    return out.narrow(dim, 0, stop - start)


@recorded
def permute(
    mesh: Mesh, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes,
    shape: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return x of the rank whose pair (source, target) has this rank as target; zeros if no pair
    has.

    shape: the result's, if it differs from x's (uneven shards).
    """
    group = mesh.group(axes)
    me = group.index
    for s, t in pairs:
        _connect(mesh, axes, s, t)
    source = next((s for s, t in pairs if t == me), None)
    if source == me:
        out = x
    else:
        make = torch.zeros if source is None else torch.empty
        out = make(x.shape if shape is None else shape, dtype=x.dtype, device=x.device)
    transfers = []
    if source is not None and source != me and out.numel():
        transfers.append(channels.start_receive(mesh, out, group.ranks[source]))
    if x.numel():
        x = x.contiguous()
        targets = [group.ranks[t] for s, t in pairs if s == me != t]
        transfers += [channels.start_send(mesh, x, target) for target in targets]
    for work in transfers:
        work.wait()
    return out


@recorded
def send(mesh: Mesh, x: Tensor, source: int, target: int, axes: Axes) -> None:
    """Send x from one rank of the group to another; do nothing on the other ranks.

    It does not wait for the receiver, so two ranks may send to each other and then receive.
    """
    group = mesh.group(axes)
    _connect(mesh, axes, source, target)
    if group.index != source:
        return
    x = x.clone(memory_format=torch.contiguous_format)  # the program may overwrite its own
    if source == target:
        mesh._to_self.setdefault(group.ranks, deque()).append(x)
        return
    while mesh._sends and mesh._sends[0][0].is_completed():
        mesh._sends.popleft()
    if x.numel():
        mesh.hold([(channels.start_send(mesh, x, group.ranks[target]), x)])


@recorded
def recv(
    mesh: Mesh, shape: Sequence[int], dtype: torch.dtype, source: int, target: int, axes: Axes
) -> Tensor:
    """Return on the target the value that `source` sent; zeros on the other ranks."""
    group = mesh.group(axes)
    _connect(mesh, axes, source, target)
    if group.index != target:
        return torch.zeros(tuple(shape), dtype=dtype, device=mesh.device)
    if source == target:
        return mesh._to_self[group.ranks].popleft()
    out = torch.empty(tuple(shape), dtype=dtype, device=mesh.device)
    if out.numel():
        channels.start_receive(mesh, out, group.ranks[source]).wait()
    return out


def _connect(mesh: Mesh, axes: Axes, source: int, target: int) -> None:
    if source != target:
        mesh.connect(axes, source, target)
