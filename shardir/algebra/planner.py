"""The search for the fastest plan between two layouts: candidates, A*, and meetings in an exchange.

The first searches of A* find some plan, plans whose two ends meet in an exchange (meeting.py) a
better one, and the last searches prove it or end early.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, product
from typing import NamedTuple

from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.meeting import meeting
from shardir.algebra.mesh import Mesh, sizes_of
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.plan_costs import PlanCosts
from shardir.algebra.recipe import Recipe
from shardir.algebra.routes import routes
from shardir.algebra.steps import elements, step_memory
from shardir.algebra.traffic import sub_axes_of_primes

_, SHARDED, PARTIAL, _ = AxisState

MAX_PRICED = {3: 1000, 2: 2000, 1.5: 4000, 1.2: 6000, 1: 6000}
"""The number of steps that A* prices at the maximum, by the weight of the bound of what is left:
first it searches for a plan that takes at most twice the minimum time, then for the fastest."""

MAX_BOUNDED = 1000
"""The number of layouts of which the bound is found at the maximum, in all searches, once a plan is
known: half a millisecond each, and most of the time on large meshes with sub-axes."""

MEETING = 1.2
"""The weight before whose search plans that meet in an exchange are tried (meeting.py): the fastest
plan found so far limits them, and they limit the searches after them."""


def known_path(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, itemsize: int
) -> list[CollectiveStep] | None:
    """Return the shortest path of a table; None unless it has both layouts, and no other path is
    faster: between even layouts of full axes, and between all where the table is complete."""
    if any(map(sizes_of, (*source.dims, *target.dims))):
        return None  # only an exchange has an operand with explicit sizes
    reduction = source.reduction if source.partial else target.reduction
    known = routes(mesh, len(shape), reduction)
    return known.steps(shape, itemsize, source, target) if known else None


MAX_SPREAD = 27
"""The number of ways to spread partial axes over dimensions, at the maximum."""


@dataclass(slots=True)
class PricedMove:
    """A move from a layout: its latency, a lower bound of the latencies after it, and its time when
    it has been priced. The searches with other weights of the bound use it again."""

    step: CollectiveStep
    latency: float
    rest: float
    seconds: float | None = None


class QueueEntry(NamedTuple):
    """A path that may lead to the fastest plan: the first to be followed is the smallest."""

    first: float
    """A lower bound of the time of a plan by this path; after MAX_PRICED steps with the bound of
    what is left twice."""
    length: int
    serial: int
    seconds: float
    """The time of the steps."""
    layout: Layout
    """The layout after them, and the elements that the value retains there."""
    retained: int
    steps: tuple[CollectiveStep, ...]
    following: PricedMove | None = None
    """One step more, which is not priced yet."""


class Search:
    """The search for the fastest plan whose steps are all within `memory`; `refused` is the
    minimum memory of those that are not."""

    def __init__(self, problem: RedistributionProblem, itemsize: int, memory: int | None):
        self.problem, self.itemsize, self.memory = problem, itemsize, memory
        self.refused = -1
        self.best: tuple[float, tuple[CollectiveStep, ...]] | None = None
        self.bounds: dict[Layout, float] = {}
        self.costs = PlanCosts(problem, itemsize)
        self.found: dict[Layout, list[PricedMove]] = {}

    def run(self) -> tuple[CollectiveStep, ...] | None:
        """Return the fastest plan that is found; None if none is within the memory."""
        p = self.problem
        for steps in _candidates(p, self.itemsize):
            self.offer(steps)
        minimum = self.bound(p.source)
        if self.best is None or minimum < self.best[0] * IMPROVEMENT:
            self.search()
        return None if self.best is None else self.best[1]

    def search(self) -> None:
        """Search by A*, and for plans that meet in an exchange, until no plan by single moves is
        faster than the best, or the limits of all searches are reached."""
        meets = self.memory is None and not self.problem.crosses
        for weight in MAX_PRICED:
            if meets and weight == MEETING:
                self.meet()
            if self.expand(weight):
                return

    def offer(self, steps: list[CollectiveStep]) -> None:
        """Take a plan if it is within the memory and faster than the best."""
        layout, retained, seconds = self.problem.source, self.retained(), 0.0
        for step in steps:
            if (found := self.after(layout, step, retained)) is None:
                return
            seconds += self.costs.seconds(layout, step)
            retained, layout = found, step.layout
        if self.best is None or seconds < self.best[0] * IMPROVEMENT:
            self.best = seconds, tuple(steps)

    def retained(self) -> int:
        """Return the elements that the source retains."""
        p = self.problem
        return 0 if self.memory is None else elements(p.mesh, p.shape, p.source)

    def after(self, layout: Layout, step: CollectiveStep, retained: int) -> int | None:
        """Return the elements that the result of a step retains; None where it needs more than the
        memory."""
        p = self.problem
        if self.memory is not None:
            peak, retained = step_memory(p.mesh, p.shape, layout, step, retained)
            if (needed := peak * self.itemsize) > self.memory:
                self.refused = needed if self.refused < 0 else min(needed, self.refused)
                return None
        return retained

    def expand(self, weight: float) -> bool:
        """Search by A* from the source, as long as a plan can be faster than the best, with the
        bound of what is left times `weight`; return whether none is faster than the best then. A
        step is priced when its bound is the lowest: most steps never are."""
        p, serial, priced = self.problem, count(), 0
        target, start = p.spelled(p.target), (p.spelled(p.source), self.retained())
        seen = {start: 0.0}
        todo = [QueueEntry(0.0, 0, next(serial), 0.0, *start, ())]
        while todo and priced < MAX_PRICED[weight]:
            if self.best is not None and len(self.bounds) >= MAX_BOUNDED:
                return False
            first, n, _, so_far, layout, retained, steps, following = heappop(todo)
            best = float("inf") if self.best is None else self.best[0] * IMPROVEMENT
            if weight == 1 and first >= best:
                return True
            if so_far > seen[layout, retained]:
                continue
            if following is not None:
                priced += 1
                step = following.step
                if (kept := self.after(layout, step, retained)) is not None:
                    if following.seconds is None:
                        following.seconds = self.costs.seconds(layout, step)
                    seconds, key = so_far + following.seconds, (step.layout, kept)
                    rest = self.bound(step.layout)
                    if seconds < min(best - rest, seen.get(key, best)):
                        seen[key] = seconds
                        order = seconds + weight * rest, n, next(serial)
                        heappush(todo, QueueEntry(*order, seconds, *key, (*steps, step)))
            elif layout == target:
                self.best = so_far, steps
                return weight == 1
            else:
                for move, rest in self.following(layout, so_far, best):
                    limit, seconds = best - rest, so_far + move.latency
                    if self.memory is None:  # nothing is retained, so only the fastest path counts
                        limit = min(limit, seen.get((move.step.layout, retained), limit))
                    if seconds < limit:
                        order = seconds + weight * rest, n + 1, next(serial)
                        heappush(todo, QueueEntry(*order, so_far, layout, retained, steps, move))
        return not todo

    def meet(self) -> None:
        """Take the fastest plan whose ends meet in an exchange, if it is faster."""
        assert self.best is not None, "an exchange is a plan"
        limit = self.best[0] * IMPROVEMENT
        if steps := meeting(self.problem, self.itemsize, limit, self.costs).steps:
            self.offer([*steps])

    def following(
        self, layout: Layout, so_far: float, best: float
    ) -> Iterator[tuple[PricedMove, float]]:
        """Yield the moves by which a plan may be faster than `best`, each with the lower bound of
        the time after it."""
        for move in self.moves(layout, best):
            if so_far + move.latency < best - move.rest:
                yield move, self.bound(move.step.layout)

    def moves(self, layout: Layout, best: float) -> list[PricedMove]:
        """Return the moves from a layout, without those of which the latency alone is `best` or
        more: no later plan is slower."""
        if (found := self.found.get(layout)) is None:
            p, costs, found = self.problem, self.costs, []
            for step in p.moves(layout):
                if p.crosses:
                    step = replace(step, layout=p.spelled(step.layout))
                if (latency := costs.latency(step)) < best:
                    rest = costs.latency_bound(step.layout, p.target)
                    if latency + rest < best:
                        found.append(PricedMove(step, latency, rest))
            self.found[layout] = found
        return found

    def bound(self, layout: Layout) -> float:
        """Return a lower bound of the time from a layout to the target."""
        if (found := self.bounds.get(layout)) is None:
            found = self.bounds[layout] = self.costs.bound(layout, self.problem.target)
        return found


def _candidates(problem: RedistributionProblem, itemsize: int) -> Iterator[list[CollectiveStep]]:
    """Yield plans that need no search, the preferred one first."""
    p = problem
    near = problem.near
    if near.target == problem.target:
        yield Recipe(problem).run()
    reductions = [Recipe.reduced]
    if near.left(near.source):
        reductions.append(Recipe.reduce)
    for reduce in reductions:
        recipe = Recipe(near)
        reduce(recipe)
        yield from _spread(p, recipe.now, recipe.steps)
        recipe.exchange(problem.target)
        recipe.make_partial()
        yield recipe.steps
    path = known_path(p.shape, p.mesh, p.source, p.target, itemsize)
    if path is not None:
        yield path


def _spread(
    problem: RedistributionProblem, now: Layout, steps: list[CollectiveStep]
) -> Iterator[list[CollectiveStep]]:
    """Yield plans by an exchange after which the axes over which the target is partial split
    several dimensions, in primes; then they become partial where they are. Each single step of
    moves.py puts all of them into one dimension, whose shards may be less even."""
    p, target = problem, problem.target
    axes = tuple([a for a in target.partial if a not in now.partial])
    parts = [p.mesh.simplify((prime,)) for prime, _ in sub_axes_of_primes(p.mesh, axes)]
    primes = tuple([prime for part in parts for prime in part])
    rank = len(p.shape)
    if target.reduction != "sum" or any(map(sizes_of, (*now.dims, *target.dims))):
        return
    if len(primes) < 2 or rank ** len(primes) > MAX_SPREAD:
        return
    for dims in product(range(rank), repeat=len(primes)):
        added = [
            tuple([a for a, e in zip(primes, dims, strict=True) if e == d]) for d in range(rank)
        ]
        ends = [x + more for x, more in zip(target.dims, added, strict=True)]
        nest = all(p.nests(d, target.dims[d], ends[d]) for d in dims)
        if len({*dims}) < 2 or not nest:
            continue
        layout = Layout(target.mesh, tuple(ends)).with_partial(now.partial, now.reduction)
        found = [*steps, CollectiveStep("exchange", exchange_axes(now, layout), layout)]
        for d, more in enumerate(added):
            if more:
                found.append(p.move(SHARDED, PARTIAL, found[-1].layout, more, d))
        yield [*found[:-1], replace(found[-1], layout=target)]
