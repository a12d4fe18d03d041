"""`--broadcast`: rank 0 sends initial values to all ranks.

It sends a value in chunks. A rank keeps the elements of its shard, so that no rank needs memory for
the whole value.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .mesh import Mesh
from .transfers import broadcast

CHUNK_BYTES = 1 << 26
"""The maximum size of a chunk, unless it is one element along the first dimension: it bounds the
memory of a rank besides its shard."""

DimRanges = list[tuple[int, int]]
"""The range [start, stop) of each dimension."""


def from_rank_0(
    mesh: Mesh, shape: Sequence[int], dtype: torch.dtype, bounds: DimRanges,
    values: Callable[[DimRanges], Tensor],
) -> Tensor:  # fmt: skip
    """Return this rank's shard of a value, on its device. All ranks call it.

    Args:
        bounds: of the shard.
        values: the values within bounds; called on rank 0 alone.
    """
    shard = torch.empty([b - a for a, b in bounds], dtype=dtype, device=mesh.device)
    for chunk in _chunks(shape, dtype.itemsize):
        if mesh.rank == 0:
            x = values(chunk).to(mesh.device)
        else:
            x = torch.empty([b - a for a, b in chunk], dtype=dtype, device=mesh.device)
        if x.numel():
            x = broadcast(mesh, x, 0, tuple(mesh.axes))
        into, mine = shard, x
        for dim, ((start, stop), (low, high)) in enumerate(zip(chunk, bounds, strict=True)):
            first, size = max(start, low), max(0, min(stop, high) - max(start, low))
            mine = mine.narrow(dim, min(first - start, stop - start), size)
            into = into.narrow(dim, min(first - low, high - low), size)
        into.copy_(mine)
    return shard


def _chunks(shape: Sequence[int], itemsize: int) -> list[DimRanges]:
    """Return the bounds of chunks, which are ranges of the first dimension."""
    if not shape:
        return [[]]
    first, *rest = shape
    step = max(1, CHUNK_BYTES // max(1, itemsize * math.prod(rest)))
    starts = range(0, first, step)
    return [[(a, min(a + step, first)), *((0, n) for n in rest)] for a in starts]
