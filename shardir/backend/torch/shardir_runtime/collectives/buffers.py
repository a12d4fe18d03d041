"""Buffers of collectives, collectives in progress, padding, packing, and the order of ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import position
from .mesh import Group, bounds

ALIGNMENT = 64
"""The alignment of tensors in the memory of a collective, in bytes: a line of a CPU's cache."""

PACKED = 1 << 16
"""The largest tensor, in elements of all ranks of a group, that is packed with others: copies into
and out of a shared buffer take less time than a message of its own. Measured on Gloo."""


def in_transport_dtype(x: Tensor) -> Tensor:
    """Return a view of x in a dtype that gloo and NCCL transport: they have no booleans."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def exchange_parts(
    parts: Sequence[Tensor], sizes: Sequence[list[int]], like: Tensor, group: Any
) -> Tensor:
    """Send flat parts, and return the elements received, in the order of ranks.

    Args:
        sizes: the numbers of elements for each rank of the group, and from each rank.
        like: a tensor of the dtype and the device.
    """
    sends, receives = sizes
    sent = torch.cat([*parts]) if parts else like.new_empty(0)
    got = like.new_empty(sum(receives))
    dist.all_to_all_single(
        in_transport_dtype(got), in_transport_dtype(sent), receives, sends, group=group
    )
    return got


def with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Return a shape with another size of one dimension."""
    return [*shape[:dim], size, *shape[dim + 1 :]]


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    """Return x, contiguous, padded with zeros to `size`."""
    if x.shape[dim] == size:
        return x.contiguous()
    out = x.new_zeros(with_size(x.shape, dim, size))
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def is_major(x: Tensor, dim: int) -> bool:
    """Whether blocks along `dim` are contiguous, one after the other, in memory."""
    return math.prod(x.shape[:dim]) == 1 and x.is_contiguous()


def unpacked_tensors(
    group: Group, shapes: Sequence[Sequence[int]], dims: Sequence[int], parts: int
) -> list[int]:
    """Return the indices of the tensors of a fused collective that need no buffer: their blocks
    along `dims` follow each other in memory, in torch's order, and all `parts` together are larger
    than PACKED. Shapes alone decide, so that all ranks agree."""
    return [
        i for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
        if group.in_order
        and math.prod(shape[:dim]) == 1
        and (len(shapes) == 1 or math.prod(shape) * parts > PACKED)
    ]  # fmt: skip


class Memory:
    """A block of bytes, from which tensors are allocated one after the other."""

    def __init__(self, block: Tensor):
        self.block, self.used = block, 0

    def empty(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a tensor in the next bytes; elsewhere if too few are left."""
        start, size = self.used, math.prod(shape) * like.element_size()
        if start + size > self.block.numel():
            return like.new_empty(shape)
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return self.block[start : start + size].view(like.dtype).view(tuple(shape))


class CollectiveMemory:
    """The memory of a collective in an arena: of each result, by its index (a reduction has one for
    all, 0), and of buffers. A tensor without memory here is allocated by torch."""

    def __init__(self, results: Mapping[int, Memory], buffers: Memory | None):
        self.results, self.buffers = results, buffers

    def free(self) -> None:
        """Free the results and buffers of the collective's last call."""
        for memory in (*self.results.values(), self.buffers):
            if memory is not None:
                memory.used = 0

    def select(self, indices: Sequence[int]) -> "CollectiveMemory":
        """Return the memory of some results, and of all buffers."""
        results = {k: self.results[i] for k, i in enumerate(indices) if i in self.results}
        return CollectiveMemory(results, self.buffers)


def empty_buffer(memory: CollectiveMemory | None, like: Tensor, *shape: int) -> Tensor:
    """Allocate a buffer."""
    block = None if memory is None else memory.buffers
    return like.new_empty(shape) if block is None else block.empty(like, shape)


def empty_result(memory: CollectiveMemory | None, i: int, like: Tensor, *shape: int) -> Tensor:
    """Allocate result number i."""
    block = None if memory is None else memory.results.get(i)
    return like.new_empty(shape) if block is None else block.empty(like, shape)


def flatten(xs: Sequence[Tensor], memory: CollectiveMemory | None = None) -> Tensor:
    """Return the elements of contiguous tensors, one after the other: a view of a single tensor."""
    if len(xs) == 1:
        return xs[0].view(-1)
    out = empty_buffer(memory, xs[0], sum(x.numel() for x in xs))
    return torch.cat([x.view(-1) for x in xs], out=out)


class Pending:
    """A collective in progress. `wait` returns its result, once: a tensor, or a list of them."""

    def __init__(self, work: Any, finish: Callable[[], Any]):
        self._work, self._finish = work, finish  # no work: the collective has ended

    def wait(self) -> Any:
        work, finish = self._work, self._finish
        del self._work, self._finish  # which frees the buffers of the collective
        if work is not None:
            position.begin()
            work.wait()
            position.complete()
            del work
        return finish()


StartCollective = Callable[[list[Tensor], list[int], CollectiveMemory | None], Pending]
"""Starts a collective on tensors of one dtype, with their indices in the list of all tensors, and
the memory of their results."""


def start_collective(
    group: Group, x: Any, wait: bool, memory: CollectiveMemory | None, start: StartCollective
) -> Any:
    """Start a collective on a tensor, or a fused one for each dtype of a list of tensors. Return
    the result if `wait`, else a Pending."""
    if memory is not None:
        memory.free()
    if group.size == 1:
        pending = Pending(None, lambda: x)
    elif isinstance(x, Tensor):
        fused = start([x], [0], memory)
        pending = Pending(None, lambda: fused.wait()[0])
    else:
        pending = _start_by_dtype(x, memory, start)
    return pending.wait() if wait else pending


def _start_by_dtype(
    tensors: Sequence[Tensor], memory: CollectiveMemory | None, start: StartCollective
) -> Pending:
    started: list[tuple[list[int], Pending]] = []
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        own = None if memory is None else memory.select(indices)
        started.append((indices, start([tensors[i] for i in indices], indices, own)))
    count = len(tensors)  # not the tensors, which may be freed once they are in a buffer

    def finish() -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for indices, pending in started:
            results.update(zip(indices, pending.wait(), strict=True))
        return [results[i] for i in range(count)]

    return Pending(None, finish)


def select(value: Any, indices: Sequence[int]) -> list:
    """Return the values for some tensors of a list: of a list at their indices, else one value
    repeated."""
    is_list = isinstance(value, list | tuple)
    return [value[i] if is_list else value for i in indices]


def by_member(x: Tensor, dim: int, n: int) -> Tensor:
    """Return a view of x: [n, *shape of a block], the blocks of n members along `dim`."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def join_blocks(
    blocks: list[Tensor], dim: int, total: int, memory: CollectiveMemory | None = None, i: int = 0
) -> Tensor:
    """Return the blocks, without their padding, as one tensor: result number i."""
    out = empty_result(memory, i, blocks[0], *with_size(blocks[0].shape, dim, total))
    spans = all_bounds(total, len(blocks))
    return torch.cat(
        [b.narrow(dim, 0, t - s) for b, (s, t) in zip(blocks, spans, strict=True)], dim, out=out
    )


def split_by_member(group: Group, x: Tensor, dim: int) -> list[Tensor]:
    """Return the blocks of x for the members of a group along `dim`, in torch's order."""
    spans = all_bounds(x.shape[dim], group.size)
    return to_torch_order(group, [x.narrow(dim, s, t - s) for s, t in spans])


def all_bounds(total: int, count: int) -> list[tuple[int, int]]:
    """Return the range [start, stop) of each of `count` shards."""
    return [bounds(total, count, k) for k in range(count)]


def to_torch_order(group: Group, items: list) -> list:
    """Return the items, one for each member in the order of the axes, in torch's order."""
    ordered = list(items)
    for item, place in zip(items, group.order, strict=True):
        ordered[place] = item
    return ordered
