"""The split of the ops of a model into stages: the slowest one as fast as it can be, within SLACK,
of the splits that keep to the memory; and of these the one that transfers the fewest bytes.

A rank holds what its stages hold throughout, what each of them holds of a microbatch, as many times
as the schedule has microbatches in flight there, and for one stage at a time what an op needs while
it runs, and what has arrived from the adjacent stages for the next microbatch. With one stage on
each rank the minimum of the slowest stage is found by dynamic programming over the cuts. With
several the memory of a rank is a sum over stages that are far apart. So the stages of all chunks
are cut at the same time, rank by rank: a state is a cut in each chunk. The limit of the slowest
stage is found by bisection. Both are exact for the cuts that are considered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np
from xdsl.ir import Operation

from shardir.analysis.in_flight import StageCounts
from shardir.analysis.repeats import equal_blocks
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import size_of
from shardir.search.stages.stage_costs import Held, UnitCosts

SLACK = 0.02
"""The part by which a stage may take longer than the slowest one has to."""

MAX_CUTS = {1: 1024, 2: 96}
"""The number of cuts between ops that are considered, by the stages of a rank: those that the
fewest bytes cross."""

FEW_CUTS = 40
"""That number with more stages on each rank."""

MAX_STATES = 200_000
"""The number of stages of a rank that are tried for a limit of the slowest one; with more, half as
many cuts are considered."""


def candidate_cuts(ops: Sequence[Operation], stages: int, chunks: int) -> list[int]:
    """Return the cuts between ops that are considered, with both ends: those between repeated
    blocks and around them, if they are enough for the stages, otherwise all."""
    bytes_, inner = crossing(ops), cuts_of_blocks(ops)
    if len(inner) < stages - 1:
        inner = list(range(1, len(ops)))
    most = MAX_CUTS.get(chunks, FEW_CUTS)
    return [0, *sorted(sorted(inner, key=lambda i: (bytes_[i], i))[:most]), len(ops)]


def cuts_of_blocks(ops: Sequence[Operation]) -> list[int]:
    """Return the cuts between ops that are in no repeated block."""
    at = {op: i for i, op in enumerate(ops)}
    inside = {
        i for blocks in equal_blocks(ops) for block in blocks.blocks
        for i in range(at[block[0]] + 1, at[block[-1]] + 1)
    }  # fmt: skip
    return [i for i in range(1, len(ops)) if i not in inside]


def crossing(ops: Sequence[Operation]) -> Array:
    """Return the bytes of the values that ops before each op make and others read, of the ops and
    of their end."""
    at = {op: i for i, op in enumerate(ops)}
    change = [0] * (len(ops) + 1)
    for op, i in at.items():
        for v in op.results:
            last = max((at.get(use.operation, i) for use in v.uses), default=i)
            change[i + 1] += size_of(v)
            change[last + 1] -= size_of(v)
    return np.cumsum(change)


@dataclass(frozen=True)
class Segments:
    """The costs of the ops between two cuts, for each pair of cuts: tables with a row for the first
    one, a column for the second one; inf where that is not after the first.

    Attributes:
        seconds: of the ops.
        fixed, saved: the bytes that a rank holds of them, throughout, and of each microbatch with
            what crosses the second cut: a send is held until a gradient comes back.
        extra: the most bytes that one of them needs while it runs, with those that cross both cuts:
            what has arrived for the next microbatch, and a gradient that is sent.
        crossing: the bytes that cross each cut.
    """

    seconds: Array
    fixed: Array
    saved: Array
    extra: Array
    crossing: Array

    @classmethod
    def of(cls, costs: UnitCosts, cuts: Sequence[int]) -> "Segments":
        n, crossing = len(cuts), np.array(costs.crossing, float)[list(cuts)]
        earlier = np.arange(n)[:, None] < np.arange(n)[None, :]
        spent = np.cumsum([0.0, *costs.seconds])[list(cuts)]
        between = [max(costs.extra[a:b], default=0) for a, b in pairwise(cuts)]
        extra = np.zeros((n, n))
        for width in range(1, n):
            first = np.arange(n - width)
            last = np.array(between)[width - 1 :]
            extra[first, first + width] = np.maximum(extra[first, first + width - 1], last)
        return cls(
            np.where(earlier, spent[None, :] - spent[:, None], np.inf),
            _bytes_between(costs.fixed, cuts),
            _bytes_between(costs.saved, cuts) + crossing[None, :],
            extra + 2 * crossing[:, None] + crossing[None, :], crossing,
        )  # fmt: skip

    def among(self, cuts: Sequence[int]) -> "Segments":
        """Return the costs between some of the cuts."""
        rows = np.ix_(cuts, cuts)
        return Segments(
            self.seconds[rows], self.fixed[rows], self.saved[rows], self.extra[rows],
            self.crossing[list(cuts)],
        )  # fmt: skip

    def need(self, counts: Sequence[StageCounts], stages: Sequence[tuple[int, int]]) -> float:
        """Return the bytes of a rank whose stages are between these cuts."""
        saved = [self.saved[each] for each in stages]
        most = max(sum(k * n for k, n in zip(c, saved, strict=True)) for c in counts)
        fixed = sum(self.fixed[each] for each in stages)
        return float(fixed + most + max(self.extra[each] for each in stages))


def _bytes_between(held: Sequence[Held], cuts: Sequence[int]) -> Array:
    """Return the bytes of what ops between two cuts read, each once, for each pair of cuts."""
    n = len(cuts)
    change = np.zeros((n + 1, n + 1))
    for size, readers in held:
        parts = sorted({int(np.searchsorted(cuts, r, "right")) - 1 for r in readers})
        before = -1
        for part in parts:  # counted by the first reader after the first cut
            change[before + 1, part + 1] += size
            change[part + 1, part + 1] -= size
            before = part
    return change.cumsum(0).cumsum(1)[:n, :n]


@dataclass(frozen=True)
class StageSplit:
    """The cuts at which the stages begin, and the last one, by their indices among the candidates;
    None where no split keeps to the memory. `need`: the bytes of the rank that needs most, then of
    the split that needs the fewest, of those that were tried."""

    cuts: list[int] | None
    need: float


def split(
    segments: Segments,
    placement: Sequence[int],
    counts: Sequence[Sequence[StageCounts]],
    limit: float = np.inf,
    shares: Sequence[float] = (),
) -> StageSplit:
    """Return the best split.

    Args:
        placement: the rank of each stage.
        counts: of each rank, as of `in_flight`.
        limit: the bytes of a device.
        shares: the relative seconds that the stages of a rank, the first, the second, ..., are to
            take; by default equal ones. The slowest stage is that by its seconds over its share.
    """
    ranks = len(counts)
    shares = shares or [1.0] * (len(placement) // ranks)
    alone = len(placement) == ranks or not np.isfinite(limit)
    if alone or not _Chunks.exist(placement, ranks):
        return _split_alone(segments, placement, counts, limit, shares)
    kept = list(range(len(segments.crossing)))
    while True:
        try:
            found = _Chunks(segments.among(kept), placement, counts, limit, shares).split()
        except _TooManyStatesError:
            kept = [0, *kept[2:-1:2], kept[-1]]
            continue
        cuts = found.cuts and [kept[i] for i in found.cuts]
        return StageSplit(cuts, found.need)


def _split_alone(
    segments: Segments,
    placement: Sequence[int],
    counts: Sequence[Sequence[StageCounts]],
    limit: float,
    shares: Sequence[float],
) -> StageSplit:
    """Return the best split where the memory of each stage is limited by itself."""
    needs = _needs(segments, placement, counts)
    of = [shares[placement[:stage].count(rank)] for stage, rank in enumerate(placement)]
    pairs = zip(needs, of, strict=True)
    allowed = [np.where(need <= limit, segments.seconds / share, np.inf) for need, share in pairs]
    slowest = _min_max(allowed)
    if not np.isfinite(slowest):
        return StageSplit(None, _min_max(needs))
    cuts = _fewest_bytes([t <= slowest * (1 + SLACK) for t in allowed], segments.crossing)
    return StageSplit(cuts, max(n[c] for n, c in zip(needs, pairwise(cuts), strict=True)))


def _needs(
    segments: Segments, placement: Sequence[int], counts: Sequence[Sequence[StageCounts]]
) -> list[Array]:
    """Return the bytes that each stage needs, without other stages of its rank."""
    found = []
    for stage, rank in enumerate(placement):
        index = placement[:stage].count(rank)
        most = max(c[index] for c in counts[rank])
        need = segments.fixed + most * segments.saved + segments.extra
        found.append(np.where(np.isfinite(segments.seconds), need, np.inf))
    return found


def _min_max(tables: Sequence[Array]) -> float:
    """Return the smallest maximum over splits of a table's entry for each stage."""
    best = tables[0][0]
    for table in tables[1:]:
        best = np.maximum(best[:, None], table).min(0)
    return float(best[-1])


def _fewest_bytes(fits: Sequence[Array], crossing: Array) -> list[int]:
    """Return the cuts of the split whose stages all fit that transfers the fewest bytes."""
    transferred = np.where(fits[0][0], 0.0, np.inf)
    begins = list[Array]()
    for each in fits[1:]:
        total = np.where(each, (transferred + crossing)[:, None], np.inf)
        begins.append(total.argmin(0))
        transferred = total.min(0)
    cuts = [len(crossing) - 1]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return [0, *reversed(cuts)]


class _TooManyStatesError(Exception):
    """The cuts are too many for a limit of the slowest stage that is far above the minimum."""


Frontier = tuple[int, ...]
"""A cut in each chunk: the stages of the ranks so far are on one side of it."""


class _Chunks:
    """The splits in which each rank has a stage in each chunk, in the order of the ranks or in the
    opposite one."""

    def __init__(
        self,
        segments: Segments,
        placement: Sequence[int],
        counts: Sequence[Sequence[StageCounts]],
        limit: float,
        shares: Sequence[float],
    ):
        self.segments, self.placement, self.counts, self.limit = segments, placement, counts, limit
        self.seconds = [segments.seconds / share for share in shares]
        self.ranks, self.cuts = len(counts), len(segments.crossing)
        self.chunks = len(placement) // self.ranks
        self.rising = [placement[c * self.ranks] == 0 for c in range(self.chunks)]
        self.states = 0

    @staticmethod
    def exist(placement: Sequence[int], ranks: int) -> bool:
        """Whether the stages are placed like that."""
        up = list(range(ranks))
        chunks = [list(placement[i : i + ranks]) for i in range(0, len(placement), ranks)]
        return len(placement) % ranks == 0 and all(c in (up, up[::-1]) for c in chunks)

    def split(self) -> StageSplit:
        """Return the best split.

        Raises:
            _TooManyStatesError: there are too many cuts.
        """
        minimum = _min_max([each for each in self.seconds for _ in range(self.ranks)])
        seconds = np.stack(self.seconds)
        times = np.unique(seconds[np.isfinite(seconds) & (seconds >= minimum)])
        low, high = 0, 0
        while high < len(times) - 1 and self._within(times[high]) is None:
            low, high = high + 1, min(2 * high + 1, len(times) - 1)
        while low < high:
            middle = (low + high) // 2
            if self._within(times[middle]) is None:
                low = middle + 1
            else:
                high = middle
        cuts = self._within(times[high] * (1 + SLACK))
        return StageSplit(cuts, self._need(cuts) if cuts else self._smallest())

    def _smallest(self) -> float:
        """Return the bytes of the rank that needs most, in the split whose stages by themselves
        need the fewest."""
        needs = _needs(self.segments, self.placement, self.counts)
        minimum = _min_max(needs)
        return self._need(_fewest_bytes([n <= minimum for n in needs], self.segments.crossing))

    def _need(self, cuts: Sequence[int]) -> float:
        return max(
            self.segments.need(counts, [
                cut for cut, r in zip(pairwise(cuts), self.placement, strict=True) if r == rank
            ])
            for rank, counts in enumerate(self.counts)
        )  # fmt: skip

    def _within(self, slowest: float) -> list[int] | None:
        """Return the cuts of the split that transfers the fewest bytes, of those whose stages take
        at most so long; None if there is none."""
        chunks = [_Reach.of(seconds <= slowest) for seconds in self.seconds]
        self.states = 0
        best, found = np.inf, None
        for inner in combinations(range(1, self.cuts - 1), self.chunks - 1):
            bounds = (0, *inner, self.cuts - 1)
            ends = list(pairwise(bounds))
            pairs = zip(ends, chunks, strict=True)
            if any(b - a < self.ranks or _moved(c.last, a, self.ranks) < b for (a, b), c in pairs):
                continue
            moved, cuts = self._best(ends, chunks)
            if moved < best:
                best, found = moved, cuts
        return found

    def _best(
        self, ends: Sequence[tuple[int, int]], chunks: Sequence["_Reach"]
    ) -> tuple[float, list[int] | None]:
        """Return the fewest bytes, and the cuts, with these ends of the chunks."""
        start = tuple(a if up else b for (a, b), up in zip(ends, self.rising, strict=True))
        goal = tuple(b if up else a for (a, b), up in zip(ends, self.rising, strict=True))
        found: dict[Frontier, tuple[float, tuple[Frontier, ...]]] = {start: (0.0, (start,))}
        for rank in range(self.ranks):
            left = self.ranks - 1 - rank
            after: dict[Frontier, tuple[float, tuple[Frontier, ...]]] = {}
            for at, (moved, path) in found.items():
                each = [
                    [y for y in self._next(x, end, up, chunk.fits)
                     if _arrives(y, end, up, left, chunk)]
                    for x, end, up, chunk in zip(at, goal, self.rising, chunks, strict=True)
                ]  # fmt: skip
                for to in product(*each):
                    stages = [(min(x, y), max(x, y)) for x, y in zip(at, to, strict=True)]
                    total = moved + sum(float(self.segments.crossing[a]) for a, _ in stages if a)
                    if total >= after.get(to, (np.inf,))[0]:
                        continue
                    self.states += 1
                    if self.segments.need(self.counts[rank], stages) <= self.limit:
                        after[to] = total, (*path, to)
            found = after
            if self.states > MAX_STATES:
                raise _TooManyStatesError
        if goal not in found:
            return np.inf, None
        moved, path = found[goal]
        return moved, sorted({cut for frontier in path for cut in frontier})

    @staticmethod
    def _next(x: int, end: int, up: bool, fits: Array) -> Iterator[int]:
        """Yield the cuts to which the next stage of a chunk may go."""
        cuts = range(x + 1, end + 1) if up else range(x - 1, end - 1, -1)
        for y in cuts:
            if not fits[min(x, y), max(x, y)]:
                return
            yield y


@dataclass(frozen=True)
class _Reach:
    """The stages of a chunk that take at most some time.

    Attributes:
        fits: whether the ops between two cuts are one, for each pair of cuts.
        last, first: the last cut at which one ends that begins at a cut, and the first one at which
            one begins that ends at it.
    """

    fits: Array
    last: Array
    first: Array

    @classmethod
    def of(cls, fits: Array) -> "_Reach":
        n = len(fits)
        last = np.where(fits.any(1), n - 1 - fits[:, ::-1].argmax(1), np.arange(n))
        return cls(fits, last, np.where(fits.any(0), fits.argmax(0), np.arange(n)))


def _moved(reach: Array, cut: int, steps: int) -> int:
    for _ in range(steps):
        cut = int(reach[cut])
    return cut


def _arrives(y: int, end: int, up: bool, left: int, chunk: _Reach) -> bool:
    """Whether so many stages more may end at a cut."""
    if abs(end - y) < left or (left == 0 and y != end):
        return False
    return _moved(chunk.last, y, left) >= end if up else _moved(chunk.first, y, left) <= end
