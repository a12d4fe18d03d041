"""The search for the fastest plan between layouts of even shards: A* from the source, and plans
whose two ends meet in one exchange.

    [{a}, {}], partial sum {b}
      -> [{a, b}, {}]            from the source: the fastest path by any moves but exchanges
      -> [{b, a}, {c}]           one exchange
      -> [{b}, {}]               to the target: by any moves but exchanges

An exchange may lead to any layout, and most moves would be exchanges. So the fastest paths by other
moves are found, from the source and to the target, a few at a time, and then all exchanges between
both ends are compared at once (even_meeting.py): each plan found limits what follows. Exchanges of
uneven shards are estimated, so there some that may lead towards the target are moves too, those of
the plan are counted, and the search begins again with their times.

The order of A* is that of the time so far and the bound of what is left times WEIGHT, so that some
plan is found soon; a layout is left out only by the bound itself. So when none is left, no plan of
these moves is faster (Hansen and Zhou, Anytime heuristic search, 2007).
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.even_bound import EvenBound
from shardir.algebra.even_codes import Layouts
from shardir.algebra.even_meeting import EvenMeetings, MeetingEnds
from shardir.algebra.even_moves import EvenMoves, MoveArrays
from shardir.algebra.even_paths import EvenPaths, LayoutMoves
from shardir.algebra.even_places import PrimePlaces
from shardir.algebra.even_times import EXCHANGE, KINDS, EvenTimes
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import Table
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.steps import step_seconds
from shardir.algebra.traffic import Indices

WEIGHT = 1.5

MAX_DEVICES, MAX_ONE_BY_ONE = 16, 2
"""The numbers of devices and of sub-axes up to which layouts of uneven shards are searched one by
one: arrays take nearly twice as long there, in all of a search for strategies that splits
unevenly."""

MAX_DIFFERENCE = 1e-9
"""The relative difference of an estimated and a counted time that is none."""

MAX_COUNTED = 8
"""The number of plans of uneven shards by an exchange between both ends that are counted."""


EXPANDED = 64, 500, 1800
"""The layouts from which moves are made at the maximum, at either end, when exchanges between both
ends are compared: a fast plan that is found soon leaves few others."""

FEW, MANY = 64, 1024
"""The pairs of ends that are compared, of those partial over the same axes, are at most the squares
of these: many at last."""


class EvenSearch:
    """A search, which can go on when a faster plan is known, of a problem that `fits`."""

    def __init__(self, problem: RedistributionProblem, itemsize: int):
        self.problem = problem
        mesh, shape = problem.mesh, problem.shape
        places = PrimePlaces.of(mesh, _axes(problem), _reduction(problem))
        spelling = self.spelling = places.spelling
        self.moves = EvenMoves(problem, spelling)
        self.times = EvenTimes(mesh, shape, itemsize, spelling, places)
        self.bound = EvenBound(mesh, shape, itemsize, spelling, places)
        source, target = map(spelling.of_layout, (problem.source, problem.target))
        self.source, self.target = source, target
        self.from_source = self._started(self.moves.named)
        """The paths from the source."""
        self.to_target = EvenPaths(
            spelling, target, self.moves.to, self._before,
            lambda layouts: self.bound.seconds(source, layouts),
        )  # fmt: skip
        """Those to the target, without exchanges."""

    def _started(self, moves: LayoutMoves) -> EvenPaths:
        return EvenPaths(
            self.spelling, self.source, moves, self._after,
            lambda layouts: self.bound.seconds(layouts, self.target), WEIGHT,
        )  # fmt: skip

    def restart(self) -> None:
        """Search from the source anew, by all moves."""
        self.from_source = self._started(self.moves.of)

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
        many = problem.is_even or problem.mesh.size > MAX_DEVICES or k > MAX_ONE_BY_ONE
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
            self.restart()
        return slower

    def _counted(self, now: Layout, step: CollectiveStep) -> float:
        return step_seconds(self.problem.mesh, self.problem.shape, now, step, self.times.itemsize)

    def run_back(self, limit: float, layouts: int) -> None:
        """Search from the target for plans of less than `limit` seconds, until none can be, or
        moves are made from so many layouts."""
        while self.to_target.expanded < layouts and self.to_target.expand(limit):
            pass

    def ended(self, limit: float) -> bool:
        """Whether all paths are known by which a plan may take less than `limit` seconds."""
        return self.from_source.ended(limit) and self.to_target.ended(limit)

    def meetings(self, limit: float, *ends: int) -> list[list[CollectiveStep]]:
        """Return the fastest plan of a path that has been found, an exchange, and a path without
        one, if it takes less than `limit` seconds; of uneven shards some plans of which the fastest
        is to be found by counting.

        Args:
            ends: the square roots of the numbers of pairs that are compared.
        """
        meetings = EvenMeetings(self.times, limit, 1 if self.problem.is_even else MAX_COUNTED)
        for count in ends:
            for heads, tails in self._ends(meetings.limit, count):
                meetings.add(heads, tails)
        return [self._steps_by(head, tail) for _, head, tail in meetings.found]

    def _ends(self, limit: float, count: int) -> Iterator[tuple[MeetingEnds, MeetingEnds]]:
        """Yield the layouts of both ends by which a plan may take less than `limit` seconds, that
        are partial over the same axes: the first by that bound, in at most `count`**2 pairs."""
        both = self.from_source, self.to_target
        heads, tails = (_within(paths, limit) for paths in both)
        for partial in sorted({*self.to_target.layouts.partial[tails].tolist()}):
            i, j = (
                some[paths.layouts.partial[some] == partial]
                for paths, some in zip(both, (heads, tails), strict=True)
            )
            if len(i):
                most = [max(count, count**2 // len(others)) for others in (j, i)]
                yield MeetingEnds.of(both[0], i[: most[0]]), MeetingEnds.of(both[1], j[: most[1]])

    def _steps_to(self, at: int) -> list[CollectiveStep]:
        """Return the steps of the path to a layout of `from_source`."""
        from_source, now, found = self.from_source, self.problem.source, list[CollectiveStep]()
        for i in from_source.path(at)[-2::-1]:
            found.append(
                self._step(now, from_source.made[i], self.spelling.layout(from_source.layouts[i]))
            )
            now = found[-1].layout
        return found

    def _steps_by(self, first: int, last: int) -> list[CollectiveStep]:
        """Return the steps by an exchange from a layout of `from_source` to one of `to_target`."""
        found, to_target = self._steps_to(first), self.to_target
        now = found[-1].layout if found else self.problem.source
        path = to_target.path(last)
        found += self._between(now, self.spelling.layout(to_target.layouts[last]))
        for here, there in pairwise(path):
            now, layout = (self.spelling.layout(to_target.layouts[at]) for at in (here, there))
            found.append(self._step(now, to_target.made[here], layout))
        return found

    def _between(self, now: Layout, layout: Layout) -> Iterator[CollectiveStep]:
        """Yield an exchange, or where it would be over no axes, slices."""
        if axes := exchange_axes(now, layout):
            yield CollectiveStep("exchange", axes, layout)
            return
        for dim, (have, want) in enumerate(zip(now.dims, layout.dims, strict=True)):
            if have != want:
                step = self.problem.move(AxisState.REPLICATED, AxisState.SHARDED, now, want, dim)
                now = step.layout
                yield step

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


def _axes(problem: RedistributionProblem) -> Axes:
    """Return all sub-axes, in the mesh's order."""
    mesh = problem.mesh
    return tuple(sorted(mesh.cut(mesh.names, problem.spellings[0]), key=mesh.order))


def _reduction(problem: RedistributionProblem) -> str:
    """Return the reduction of all partial values."""
    return (problem.source if problem.source.partial else problem.target).reduction
