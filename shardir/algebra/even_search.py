"""The search for the fastest plan between layouts of even shards: A* from the source, and plans
whose two ends meet in one exchange.

    [{a}, {}], partial sum {b}
      -> [{a, b}, {}]            from the source: the fastest path by any moves
      -> [{b, a}, {c}]           one exchange
      -> [{b}, {}]               to the target: by any moves but exchanges

The order of A* is that of the time so far and the bound of what is left times WEIGHT, so that some
plan is found soon; a layout is left out only by the bound itself. So when none is left, no plan by
single moves is faster (Hansen and Zhou, Anytime heuristic search, 2007). An exchange to any layout
is no single move: there would be too many. So the fastest paths to the target are found too, and
all exchanges between both ends are priced at once (exchange_costs.py).
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.even_bound import EvenBound
from shardir.algebra.even_codes import Layouts, Spelling
from shardir.algebra.even_moves import EvenMoves, MoveArrays
from shardir.algebra.even_paths import EvenPaths
from shardir.algebra.even_places import PrimePlaces
from shardir.algebra.even_times import EXCHANGE, KINDS, EvenTimes
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import ManyExchanges, Table
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.split_arrays import SplitArrays
from shardir.algebra.steps import step_seconds
from shardir.algebra.traffic import Indices

WEIGHT = 1.5

MAX_EXPANDED = 500
"""The number of layouts from which moves to the target are made, at the maximum."""

MAX_ONE_BY_ONE = 16
"""The number of devices up to which layouts of uneven shards are searched one by one: there arrays
take twice as long, in all of a search for strategies that splits unevenly."""

MAX_DIFFERENCE = 1e-9
"""The relative difference of an estimated and a counted time that is none."""

MAX_COUNTED = 8
"""The number of plans of uneven shards by an exchange between both ends that are counted."""

MAX_EXCHANGES = 200_000
"""The number of exchanges that are priced at once, or those from one layout, which limits the
memory."""

ENDS = 64, 512
"""The pairs of paths from both ends that are priced, of those partial over the same axes, are at
most the squares of these: first few, since a fast plan that is found soon leaves few others."""


class EvenSearch:
    """A search, which can go on when a faster plan is known, of a problem that `fits`."""

    def __init__(self, problem: RedistributionProblem, itemsize: int):
        self.problem = problem
        mesh, shape = problem.mesh, problem.shape
        spelling = self.spelling = Spelling(mesh, _axes(problem), _reduction(problem))
        places = PrimePlaces(mesh, spelling)
        self.moves = EvenMoves(problem, spelling)
        self.times = EvenTimes(mesh, shape, itemsize, spelling, places)
        self.bound = EvenBound(mesh, shape, itemsize, spelling, places)
        source, target = map(spelling.of_layout, (problem.source, problem.target))
        self.source, self.target = source, target
        self.from_source = self._started()
        """The paths from the source."""

    def _started(self) -> EvenPaths:
        return EvenPaths(
            self.spelling, self.source, self.moves.of, self._after,
            lambda layouts: self.bound.seconds(layouts, self.target), WEIGHT,
        )  # fmt: skip

    @staticmethod
    def fits(problem: RedistributionProblem) -> bool:
        """Whether all layouts on the way are of usual shards and of one reduction, a layout is a
        number of 63 bits, and exchanges of even shards have a closed form: no inner link is slower
        than an outer one."""
        k, rank = len(_axes(problem)), len(problem.shape)
        primes = problem.mesh.size.bit_length()  # at the maximum
        speeds = [level.bandwidth for level in problem.mesh.cluster_or_default.levels]
        one = {l.reduction for l in (problem.source, problem.target) if l.partial}
        bits = max(k.bit_length() * (k + rank) + k, primes.bit_length() * primes)
        closed = speeds == sorted(speeds, reverse=True)
        many = problem.is_even or problem.mesh.size > MAX_ONE_BY_ONE
        usual = many and problem.is_regular and closed
        return rank > 0 and usual and len(one) < 2 and bits < 64

    def _after(self, layouts: Layouts, moves: MoveArrays) -> Table:
        """Return the times of moves from layouts."""
        return self.times.seconds(layouts, moves.others, moves.kinds, moves.axes, moves.dims)

    def _before(self, layouts: Layouts, moves: MoveArrays) -> Table:
        """Return the times of moves to layouts."""
        return self.times.seconds(moves.others, layouts, moves.kinds, moves.axes, moves.dims)

    def run(self, best: float, limit: int) -> tuple[bool, float]:
        """Search until no plan can be faster, or moves are made from `limit` layouts; return
        whether none can, and the time of the fastest plan."""
        while True:
            if (at := self.from_source.number(self.target)) is not None:
                best = min(best, float(self.from_source.so_far[at]))
            if not self.from_source.expand(best * IMPROVEMENT):
                return True, best
            if self.from_source.expanded >= limit:
                return False, best

    def steps(self) -> list[CollectiveStep]:
        """Return the steps of the fastest path to the target."""
        at = self.from_source.number(self.target)
        assert at is not None, "a path has been found"
        return self._steps_to(at)

    def correct(self, steps: list[CollectiveStep]) -> bool:
        """Count the exchanges of a plan of uneven shards, and start again if one takes longer than
        estimated; return whether one does."""
        if self.problem.is_even:
            return False
        now, slower = self.problem.source, False
        for step in steps:
            if step.kind == "exchange":
                ends = [self.spelling.of_layout(layout) for layout in (now, step.layout)]
                estimated = float(self.times.exchanges(*ends)[0])
                counted = self._counted(now, step)
                slower |= counted > estimated * (1 + MAX_DIFFERENCE)
                first, last = (int(self.spelling.keys(end)[0]) for end in ends)
                self.times.counted[first, last] = counted
            now = step.layout
        if slower:
            self.from_source = self._started()
        return slower

    def _counted(self, now: Layout, step: CollectiveStep) -> float:
        return step_seconds(self.problem.mesh, self.problem.shape, now, step, self.times.itemsize)

    def meetings(self, limit: float) -> list[list[CollectiveStep]]:
        """Return the fastest plan of a path that has been found, an exchange, and a path without
        one, if it takes less than `limit` seconds; of uneven shards some plans of which the fastest
        is to be found by counting."""
        to_target = EvenPaths(
            self.spelling, self.target, self.moves.to, self._before,
            lambda layouts: self.bound.seconds(self.source, layouts),
        )  # fmt: skip
        while to_target.expanded < MAX_EXPANDED and to_target.expand(limit):
            pass
        return [self._steps_by(to_target, *ends) for ends in self._joined(to_target, limit)]

    def _joined(self, to_target: EvenPaths, limit: float) -> list[tuple[int, int]]:
        """Return the ends of the paths that the exchanges of the fastest plans join, of those that
        take less than `limit` seconds. The plans of the first ends limit all others."""
        count = 1 if self.problem.is_even else MAX_COUNTED
        best = list[tuple[float, int, int]]()
        for ends in ENDS:
            found = self._best(to_target, self._ends(to_target, limit, ends), limit, count)
            best = sorted({*best, *found})[:count]
            if len(best) == count:
                limit = best[-1][0]
        return [(head, tail) for _, head, tail in best]

    def _best(
        self, to_target: EvenPaths, ends: list[tuple[Indices, Indices]], limit: float, count: int
    ) -> list[tuple[float, int, int]]:
        """Return the fastest plans of less than `limit` seconds: of each these, and both ends."""
        from_source, size, found = self.from_source, self.times.size, list[tuple[float, int, int]]()
        if not ends:
            return found
        (old, source), (new, target) = (
            self._splits(paths.layouts.splits, np.concatenate(some))
            for paths, some in zip((from_source, to_target), zip(*ends, strict=True), strict=True)
        )
        exchanges = ManyExchanges(self.problem.mesh, old, new)
        for heads, tails in ends:
            for i, j in _pairs(from_source.so_far, to_target.so_far, heads, tails, limit):
                sums = from_source.so_far[i] + to_target.so_far[j]
                latency, rate = exchanges.lowest(source[i], target[j])
                some = latency + rate * size + sums < limit
                i, j, sums = i[some], j[some], sums[some]
                latency, rate = exchanges.costs(source[i], target[j])
                seconds = np.where(np.isnan(rate), np.inf, latency + rate * size) + sums
                best = np.argsort(seconds, kind="stable")[:count]
                best = best[seconds[best] < limit]
                rows = (seconds[best].tolist(), i[best].tolist(), j[best].tolist())
                found = sorted([*found, *zip(*rows, strict=True)])[:count]
                if len(found) == count:
                    limit = found[-1][0]
        return found

    def _ends(
        self, to_target: EvenPaths, limit: float, count: int
    ) -> list[tuple[Indices, Indices]]:
        """Return the layouts of both ends by which a plan may take less than `limit` seconds, that
        are partial over the same axes: the first by that bound, in at most `count`**2 pairs."""
        from_source, found = self.from_source, list[tuple[Indices, Indices]]()
        heads, tails = (_within(paths, limit) for paths in (from_source, to_target))
        for partial in np.unique(to_target.layouts.partial[tails]):
            i = heads[from_source.layouts.partial[heads] == partial]
            j = tails[to_target.layouts.partial[tails] == partial]
            if len(i):
                most = [max(count, count**2 // len(others)) for others in (j, i)]
                found.append((i[: most[0]], j[: most[1]]))
        return found

    def _splits(self, splits: Indices, some: Indices) -> tuple[SplitArrays, Indices]:
        """Return the splits of a dimension that occur in some layouts, and for each layout their
        numbers: [layout, dimension]."""
        used = np.zeros(len(splits), dtype=np.bool_)
        used[some] = True
        codes, at = np.unique(splits[used], return_inverse=True)
        found = np.zeros(splits.shape, dtype=np.int64)
        found[used] = at.reshape(-1, splits.shape[1])
        spelled = [*map(self.spelling.spelled, codes.tolist())]
        return SplitArrays(self.problem.mesh, spelled), found

    def _steps_to(self, at: int) -> list[CollectiveStep]:
        """Return the steps of the path to a layout of `from_source`."""
        from_source, now, found = self.from_source, self.problem.source, list[CollectiveStep]()
        for i in from_source.path(at)[-2::-1]:
            found.append(
                self._step(now, from_source.made[i], self.spelling.layout(from_source.layouts[i]))
            )
            now = found[-1].layout
        return found

    def _steps_by(self, to_target: EvenPaths, first: int, last: int) -> list[CollectiveStep]:
        """Return the steps by an exchange from a layout of `from_source` to one of `to_target`."""
        found = self._steps_to(first)
        now = found[-1].layout if found else self.problem.source
        path = to_target.path(last)
        if now != (layout := self.spelling.layout(to_target.layouts[last])):
            found.append(CollectiveStep("exchange", exchange_axes(now, layout), layout))
        for here, there in pairwise(path):
            now, layout = (self.spelling.layout(to_target.layouts[at]) for at in (here, there))
            found.append(self._step(now, to_target.made[here], layout))
        return found

    def _step(self, now: Layout, made: Indices, layout: Layout) -> CollectiveStep:
        """Return a move as a step to a layout."""
        _, kind, axes, dim, concat = made.tolist()
        if kind == EXCHANGE:
            return CollectiveStep("exchange", exchange_axes(now, layout), layout)
        start, end = KINDS[kind]
        reduction = self.spelling.reduction if end is AxisState.PARTIAL else ""
        spelled = self.spelling.spelled(axes)
        return self.problem.move(start, end, now, spelled, dim, concat, reduction)


def _within(paths: EvenPaths, limit: float) -> Indices:
    """Return the layouts by which a plan may take less than `limit` seconds, in the order of that
    bound."""
    bounds = paths.so_far + paths.left
    found = np.flatnonzero(bounds < limit)
    return found[np.argsort(bounds[found], kind="stable")]


def _pairs(
    before: Table, after: Table, heads: Indices, tails: Indices, limit: float
) -> Iterator[tuple[Indices, Indices]]:
    """Yield each head and tail whose times `before` and `after` an exchange are less than `limit`
    together, in parts of about MAX_EXCHANGES, or of all those of a head."""
    heads = heads[np.argsort(before[heads], kind="stable")]
    tails = tails[np.argsort(after[tails], kind="stable")]
    counts = np.searchsorted(after[tails], limit - before[heads])
    parts = np.cumsum(counts) // MAX_EXCHANGES
    for part in np.unique(parts):
        some = parts == part
        each = counts[some]
        starts = np.repeat(np.cumsum(each) - each, each)
        yield np.repeat(heads[some], each), tails[np.arange(len(starts)) - starts]


def _axes(problem: RedistributionProblem) -> Axes:
    """Return all sub-axes, in the mesh's order."""
    mesh = problem.mesh
    return tuple(sorted(mesh.cut(mesh.names, problem.spellings[0]), key=mesh.order))


def _reduction(problem: RedistributionProblem) -> str:
    """Return the reduction of all partial values."""
    return (problem.source if problem.source.partial else problem.target).reduction
