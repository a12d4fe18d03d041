"""Buffers of collectives, and collectives in progress: padding, packing, and the order of ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import position
from .mesh import Group, bounds

ALIGNMENT = 64
"""Of the parts of a place, in bytes."""

PACKED = 1 << 16
"""Up to this many elements, of all ranks of a group, copies of a tensor into and out of a buffer
that it shares with others take less time than messages of its own."""


def in_transport_dtype(x: Tensor) -> Tensor:
    """Return a view of x in a dtype that gloo and NCCL transport: they have no booleans."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def exchanged(
    parts: Sequence[Tensor], sizes: Sequence[list[int]], like: Tensor, group: Any
) -> Tensor:
    """Send flat parts, and return the elements received, in the order of ranks.

    Args:
        sizes: the elements for each rank of the group, and those from each.
        like: has the dtype and the device.
    """
    sends, receives = sizes
    sent = torch.cat([*parts]) if parts else like.new_empty(0)
    got = like.new_empty(sum(receives))
    dist.all_to_all_single(
        in_transport_dtype(got), in_transport_dtype(sent), receives, sends, group=group
    )
    return got


def with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Return x, contiguous, padded with zeros to `size`."""
    if x.shape[dim] == size:
        return x.contiguous()
    out = x.new_zeros(with_size(x.shape, dim, size))
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def is_major(x: Tensor, dim: int) -> bool:
    """Whether blocks along `dim` are contiguous, one after the other, in memory."""
    return math.prod(x.shape[:dim]) == 1 and x.is_contiguous()


def direct(
    group: Group, shapes: Sequence[Sequence[int]], dims: Sequence[int], parts: int
) -> list[int]:
    """Return the numbers of the tensors, moved together, whose blocks along `dims` need no buffer:
    those that are one after the other in memory, in torch's order, and not small in all of `parts`.
    Shapes alone decide, so that all ranks agree."""
    return [
        i for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
        if group.in_order
        and math.prod(shape[:dim]) == 1
        and (len(shapes) == 1 or math.prod(shape) * parts > PACKED)
    ]  # fmt: skip


class Memory:
    """Bytes that are given out one after the other."""

    def __init__(self, block: Tensor):
        self.block, self.used = block, 0

    def empty(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a tensor in the next of them; a new one if too few are left."""
        start, size = self.used, math.prod(shape) * like.element_size()
        if start + size > self.block.numel():
            return like.new_empty(shape)
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return self.block[start : start + size].view(like.dtype).view(tuple(shape))


class CollectiveMemory:
    """The memory of a collective in an arena: of results, by their numbers, of a reduction number 0
    for all; and of buffers. What has none there is made anew."""

    def __init__(self, results: Mapping[int, Memory], buffers: Memory | None):
        self.results, self.buffers = results, buffers

    def begin(self) -> None:
        """Begin with all of it free."""
        for memory in (*self.results.values(), self.buffers):
            if memory is not None:
                memory.used = 0


def begin(place: CollectiveMemory | None) -> None:
    """Begin a collective with the memory of a place, if it has one."""
    if place is not None:
        place.begin()


def part(place: CollectiveMemory | None, at: Sequence[int]) -> CollectiveMemory | None:
    """Return the place of some of the results, and of all buffers."""
    if place is None:
        return None
    found = {k: place.results[i] for k, i in enumerate(at) if i in place.results}
    return CollectiveMemory(found, place.buffers)


def empty(place: CollectiveMemory | None, like: Tensor, *shape: int) -> Tensor:
    """Return memory for a buffer."""
    memory = None if place is None else place.buffers
    return like.new_empty(shape) if memory is None else memory.empty(like, shape)


def made(place: CollectiveMemory | None, i: int, like: Tensor, *shape: int) -> Tensor:
    """Return memory for result number i."""
    memory = None if place is None else place.results.get(i)
    return like.new_empty(shape) if memory is None else memory.empty(like, shape)


def flat(xs: Sequence[Tensor], place: CollectiveMemory | None = None) -> Tensor:
    """Return the elements of contiguous tensors, one after the other: a view of a single one."""
    if len(xs) == 1:
        return xs[0].view(-1)
    out = empty(place, xs[0], sum(x.numel() for x in xs))
    return torch.cat([x.view(-1) for x in xs], out=out)


class Pending:
    """A collective in progress. `wait` returns its result, once: a tensor, or a list of them."""

    def __init__(self, work: Any, finish: Callable[[], Any]):
        self._work, self._finish = work, finish  # no work: it has ended, or there was none

    def wait(self) -> Any:
        work, finish = self._work, self._finish
        del self._work, self._finish  # which frees the buffers of the collective
        if work is not None:
            position.begin()
            work.wait()
            position.complete()
            del work
        return finish()


def per_dtype(tensors: Sequence[Tensor], start: Callable[[list[int]], Pending]) -> Pending:
    """Start a fused collective for each dtype; `start` gets indices in the list."""
    dtypes = dict.fromkeys(t.dtype for t in tensors)
    all_places = [[i for i, t in enumerate(tensors) if t.dtype == dtype] for dtype in dtypes]
    started = [(places, start(places)) for places in all_places]

    count = len(tensors)  # not the tensors, which may be freed once they are in a buffer

    def finish() -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for places, pending in started:
            results.update(zip(places, pending.wait(), strict=True))
        return [results[i] for i in range(count)]

    return Pending(None, finish)


def result(pending: Pending, wait: bool) -> Any:
    return pending.wait() if wait else pending


def for_each(value: Any, tensors: Sequence[Tensor]) -> list:
    """Return one value for each tensor of a list: a list as it is, a single one repeated."""
    return list(value) if isinstance(value, list | tuple) else [value] * len(tensors)


def only(pending: Pending) -> Pending:
    """Return the only tensor of a list."""
    return Pending(None, lambda: pending.wait()[0])


def by_member(x: Tensor, dim: int, n: int) -> Tensor:
    """Return a view of x: [n, *shape of a block], the blocks of n members along `dim`."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def joined(
    blocks: list[Tensor], dim: int, total: int, place: CollectiveMemory | None = None, i: int = 0
) -> Tensor:
    """Return the blocks, without their padding, as one tensor: result number i."""
    out = made(place, i, blocks[0], *with_size(blocks[0].shape, dim, total))
    spans = [bounds(total, len(blocks), k) for k in range(len(blocks))]
    return torch.cat(
        [b.narrow(dim, 0, t - s) for b, (s, t) in zip(blocks, spans, strict=True)], dim, out=out
    )


def parts(total: int, count: int) -> list[tuple[int, int]]:
    """Return the start and the size of each part."""
    return [(start, stop - start) for start, stop in all_bounds(total, count)]


def all_bounds(total: int, count: int) -> list[tuple[int, int]]:
    return [bounds(total, count, k) for k in range(count)]


def to_torch_order(group: Group, items: list) -> list:
    """Return the items, one for each member, in torch's order in place of that of the axes."""
    ordered = list(items)
    for item, place in zip(items, group.order, strict=True):
        ordered[place] = item
    return ordered
