"""The messages of all-gathers and reduce-scatters: a block of each tensor to and from each member
of a group, without copies."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from . import buffers, channels
from .mesh import Group

# torch 2.13 has new names for them; 2.11 has only the old ones.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TAG = 1
"""The tag of all messages: two members exchange them in the order of the program."""


def is_library(x: Tensor) -> bool:
    """Whether the backend has collectives that move blocks of several tensors at once without
    copies: NCCL has, and a backend that supports coalescing."""
    if x.is_cuda:
        return not channels.is_by_host(x)
    return getattr(dist.group.WORLD, "supports_coalescing", False)


class Works(list):
    """Several communications in progress."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def gather(group: Group, flats: Sequence[Tensor], rows: Sequence[Tensor], wait: bool) -> Any:
    """Move each flat tensor into this rank's row of its `rows` [n, size] on each rank of the group,
    unless it is in that row already.

    Rows are in torch's order of the ranks, here and below.
    """
    flats, rows = ([buffers.in_transport_dtype(x) for x in xs] for xs in (flats, rows))
    if is_library(flats[0]):
        outs = [x.view(-1) for x in rows]
        if len(flats) == 1:
            return _gather_into(outs[0], flats[0], group=group.process_group, async_op=not wait)
        return _finish(group.process_group.allgather_into_tensor_coalesced(outs, flats), wait)
    work = _exchange(group, [[x] * group.size for x in flats], rows, wait)
    for x, row in zip(flats, rows, strict=True):
        own = row[group.order[group.index]]
        if own.data_ptr() != x.data_ptr():
            own.copy_(x)
    return work


def exchange(group: Group, blocks: Sequence[Tensor], received: Sequence[Tensor], wait: bool) -> Any:
    """Move row k of each of `blocks` [n, size] to rank k, into its tensors `received` [n - 1, size]
    with a row for each other rank."""
    sent, received = ([buffers.in_transport_dtype(x) for x in xs] for xs in (blocks, received))
    me = group.order[group.index]
    rows = [[*x[:me], x[:0], *x[me:]] for x in received]
    return _exchange(group, sent, rows, wait)


def scatter(
    group: Group, blocks: Sequence[Tensor], outs: Sequence[Tensor], reduction: Any, wait: bool
) -> Any:
    """Reduce row k of each of `blocks` [n, size] to `outs` [size] of rank k."""
    flats = [buffers.in_transport_dtype(x).view(-1) for x in blocks]
    outs = [buffers.in_transport_dtype(x) for x in outs]
    if len(flats) == 1:
        return _scatter_into(
            outs[0], flats[0], reduction, group=group.process_group, async_op=not wait
        )
    options = dist.ReduceScatterOptions()
    options.reduceOp = reduction
    work = group.process_group.reduce_scatter_tensor_coalesced(outs, flats, options)
    return _finish(work, wait)


def _exchange(group: Group, sent: Sequence[Any], received: Sequence[Any], wait: bool) -> Any:
    """Move row k of each of `sent` to rank k, and row k of each of `received` from it.

    Gloo's own collectives copy, or move blocks around a ring, which waits for the slowest rank in
    each round: they take twice as long for 4 MB on 4 ranks.
    """
    me, works, process_group = group.order[group.index], Works(), group.process_group
    others = [(me + k) % group.size for k in range(1, group.size)]
    for x in received:
        works += [_receive(process_group, x[k], k) for k in reversed(others)]
    for x in sent:
        works += [process_group.send([channels.to_transport(x[k])], k, _TAG) for k in others]
    return _finish(works, wait)


def _receive(process_group: Any, x: Tensor, rank: int) -> Any:
    return channels.receive_by_transport(x, lambda x: process_group.recv([x], rank, _TAG))


def _finish(work: Any, wait: bool) -> Any:
    """Wait for a work, or return it."""
    if not wait:
        return work
    work.wait()  # once: a second wait of Gloo's would be for another message
    return None
