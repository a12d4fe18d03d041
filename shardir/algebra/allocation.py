"""Offsets of buffers in one block of memory, so that buffers that are live at once do not overlap.

    a = LiveBuffer(0, 2, 64); b = LiveBuffer(2, 4, 64); c = LiveBuffer(1, 3, 32)

    96 |   . c c .           offsets 0, 0 and 64; 96 bytes, the bound: a and c are live at once
    64 |   a a b b
     0 +---0-1-2-3-> time

The lower bound is the maximum of the live bytes over time. Best fit in several orders comes first.
If it exceeds the bound, `packing` searches for a smaller block: first at the bound, then by
bisection between the smallest block with a solution and the largest without one. Limits are numbers
of steps, not times, so that equal buffers have equal offsets on every machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardir.algebra.packing import PackingSearch

GAP = 1.002
"""Bounds the ratio of a block to its lower bound at which the search ends."""

MAX_WORK = 1_000_000_000
"""Bounds the search by default: the sum over its states of pairs of a buffer and a section; half a
minute to a minute."""


class LiveBuffer(NamedTuple):
    """A buffer that is live at the times from `start` to before `end`, and its bytes."""

    start: int
    end: int
    size: int


@dataclass(frozen=True)
class Allocation:
    """The offsets of buffers in a block.

    Attributes:
        offsets: of each buffer, in bytes.
        size: of the block, in bytes.
        bound: a lower bound of `size`.
        best_fit: the size of the block by best fit only.
    """

    offsets: tuple[int, ...]
    size: int
    bound: int
    best_fit: int

    @property
    def is_minimal(self) -> bool:
        """Whether no block is smaller."""
        return self.size == self.bound


def live_bytes_bound(buffers: Sequence[LiveBuffer], alignment: int = 1) -> int:
    """Return the maximum over times of the live bytes, each size rounded up to the alignment."""
    change: dict[int, int] = {}
    for b in buffers:
        size = aligned(b.size, alignment)
        change[b.start] = change.get(b.start, 0) + size
        change[b.end] = change.get(b.end, 0) - size
    now = peak = 0
    for time in sorted(change):
        now += change[time]
        peak = max(peak, now)
    return peak


def aligned(size: int, alignment: int) -> int:
    """Return `size` rounded up to a multiple of the alignment."""
    return -(-size // alignment) * alignment


def allocate(
    buffers: Sequence[LiveBuffer],
    alignment: int = 1,
    capacity: int | None = None,
    max_work: int = MAX_WORK,
) -> Allocation:
    """Allocate buffers in one block.

    Args:
        buffers: with `start` before `end`, and sizes of at least 0.
        alignment: of all offsets, in bytes.
        capacity: a size of the block at which the search ends; the bound if None.
        max_work: see MAX_WORK.
    """
    bound = live_bytes_bound(buffers, alignment)
    enough = max(bound, capacity or 0)
    shown = [i for i, b in enumerate(buffers) if b.size]
    real = [buffers[i]._replace(size=aligned(buffers[i].size, alignment)) for i in shown]
    near = max(enough, int(GAP * bound))
    offsets, best_fit = _best_fit(real, near)
    size = best_fit
    if size > near:
        search = PackingSearch(real, max_work)
        low, target = enough - 1, enough
        while size > near and search.work < max_work and low < target < size:
            share = max_work // 2 if target == enough else max_work // 8
            solution = search.run(target, share)
            if solution is None:
                low = target
            else:
                offsets, size = solution, _top(real, solution)
            target = aligned((low + size) // 2, alignment)
    placed = [0] * len(buffers)
    for i, offset in zip(shown, offsets, strict=True):
        placed[i] = offset
    return Allocation(tuple(placed), size, bound, best_fit)


def _top(buffers: Sequence[LiveBuffer], offsets: Sequence[int]) -> int:
    """Return the bytes of the block that offsets need."""
    return max((o + b.size for b, o in zip(buffers, offsets, strict=True)), default=0)


ORDERS: tuple[Callable[[LiveBuffer], tuple[int, ...]], ...] = (
    lambda b: (-b.size, b.start),
    lambda b: (-b.size * (b.end - b.start), b.start),
    lambda b: (b.start - b.end, -b.size),
    lambda b: (b.start, -b.size),
)
"""The orders of best fit: by size, by area, by lifetime, by start."""


def _best_fit(buffers: Sequence[LiveBuffer], enough: int) -> tuple[list[int], int]:
    """Return the offsets and size of the smallest block of best fit over ORDERS, or of the first
    one of at most `enough` bytes."""
    best, smallest = list[int](), -1
    for order in ORDERS:
        offsets = best_fit(buffers, sorted(range(len(buffers)), key=lambda i: order(buffers[i])))
        size = _top(buffers, offsets)
        if smallest < 0 or size < smallest:
            best, smallest = offsets, size
        if smallest <= enough:
            break
    return best, smallest


def best_fit(buffers: Sequence[LiveBuffer], order: Sequence[int]) -> list[int]:
    """Return the offsets of buffers placed in an order, each in the smallest gap that it fits in,
    else on top."""
    starts, ends, sizes = (np.array(x, int) for x in zip(*buffers, strict=True)) if buffers else (
        np.zeros((3, 0), int)
    )  # fmt: skip
    offsets, placed = np.zeros(len(buffers), int), np.zeros(len(buffers), bool)
    for i in order:
        start, end, size = buffers[i]
        beside = np.flatnonzero(placed & (starts < end) & (ends > start))
        beside = beside[np.argsort(offsets[beside], kind="stable")]
        below = offsets[beside]
        tops = np.maximum.accumulate(np.concatenate([[0], below + sizes[beside]]))
        gaps = below - tops[:-1]
        fits = np.flatnonzero(gaps >= size)
        offsets[i] = tops[fits[np.argmin(gaps[fits])]] if len(fits) else tops[-1]
        placed[i] = True
    return offsets.tolist()
