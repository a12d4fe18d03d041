"""The search for the fastest plan between two layouts (anytime A*: Hansen and Zhou, 2007).

candidates             plan_candidates.py; the first that is at the lower bound is the plan
A*, weights 3 to 1.2   each ends with some plan at most `weight` times slower than the fastest
A*, weight 1           faster plans, or the proof that there is none; or a limit ends the search
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.layout import Layout
from shardir.algebra.moves import PlanCosts, RedistributionProblem
from shardir.algebra.plan_candidates import plan_candidates
from shardir.algebra.steps import elements, step_memory

MAX_PRICED = {3: 1000, 2: 2000, 1.5: 4000, 1.2: 6000, 1: 6000}
"""Bounds the steps that A* prices, by the weight of the remaining bound: the first search ends soon
with some plan, the last one proves the best plan."""

MAX_BOUNDED = 1000
"""Bounds the layouts whose lower bound is computed in all searches, once a plan is known: half a
millisecond each, and most of the time on large meshes with sub-axes."""


@dataclass(slots=True)
class PricedMove:
    """A move from a layout, shared by the searches with all weights.

    Attributes:
        latency: of the step.
        rest: a lower bound of the latencies after the step.
        seconds: of the step; None until it is priced.
    """

    step: CollectiveStep
    latency: float
    rest: float
    seconds: float | None = None


class QueueEntry(NamedTuple):
    """A path from the source. The queue is in the order of `estimate`, then of `length`.

    Attributes:
        estimate: seconds so far, and the weighted lower bound of the seconds that remain.
        length: the number of steps.
        serial: the number of the entry.
        seconds: of `steps`.
        layout: after `steps`.
        retained: elements that the value retains there.
        following: one further step, which is not priced yet.
    """

    estimate: float
    length: int
    serial: int
    seconds: float
    layout: Layout
    retained: int
    steps: tuple[CollectiveStep, ...]
    following: PricedMove | None = None


class Search:
    """The search for the fastest plan whose steps are all within `memory` bytes.

    Attributes:
        best: the seconds and steps of the fastest plan so far.
        refused: the minimum peak, in bytes, of the steps that need more than `memory`; -1 if none.
    """

    def __init__(self, problem: RedistributionProblem, itemsize: int, memory: int | None):
        self.problem, self.itemsize, self.memory = problem, itemsize, memory
        self.refused = -1
        self.best: tuple[float, tuple[CollectiveStep, ...]] | None = None
        self.bounds: dict[Layout, float] = {}
        self.costs = PlanCosts(problem, itemsize)
        self.moves: dict[Layout, list[PricedMove]] = {}

    def run(self) -> tuple[CollectiveStep, ...] | None:
        """Return the fastest plan; None if no plan is within the memory."""
        p = self.problem
        for steps in plan_candidates(p, self.itemsize):
            self.offer(steps)
        minimum = self.bound(p.source)
        if self.best is None or minimum < self.best[0] * IMPROVEMENT:
            self.search()
        return None if self.best is None else self.best[1]

    def search(self) -> None:
        """Search by A* with each weight, until the best plan is proven, or to all limits."""
        for weight in MAX_PRICED:
            if self.expand(weight):
                return

    def offer(self, steps: list[CollectiveStep]) -> None:
        """Take a plan if it is within the memory and faster than the best."""
        layout, retained, seconds = self.problem.source, self.retained(), 0.0
        for step in steps:
            if (kept := self.retained_after(layout, step, retained)) is None:
                return
            seconds += self.costs.seconds(layout, step)
            retained, layout = kept, step.layout
        if self.best is None or seconds < self.best[0] * IMPROVEMENT:
            self.best = seconds, tuple(steps)

    def retained(self) -> int:
        """Return the elements that the source retains."""
        p = self.problem
        return 0 if self.memory is None else elements(p.mesh, p.shape, p.source)

    def retained_after(self, layout: Layout, step: CollectiveStep, retained: int) -> int | None:
        """Return the elements that the result of a step retains; None if the step needs more than
        `memory`."""
        p = self.problem
        if self.memory is not None:
            peak, retained = step_memory(p.mesh, p.shape, layout, step, retained)
            if (needed := peak * self.itemsize) > self.memory:
                self.refused = needed if self.refused < 0 else min(needed, self.refused)
                return None
        return retained

    def expand(self, weight: float) -> bool:
        """Search by A* from the source, with the remaining bound times `weight`.

        A step is priced only when its estimate is the lowest of the queue: most steps never are.

        Returns:
            Whether the best plan is then proven to be the fastest.
        """
        p, serial, priced = self.problem, count(), 0
        target, start = p.normal(p.target), (p.normal(p.source), self.retained())
        seen = {start: 0.0}
        todo = [QueueEntry(0.0, 0, next(serial), 0.0, *start, ())]
        while todo and priced < MAX_PRICED[weight]:
            if self.best is not None and len(self.bounds) >= MAX_BOUNDED:
                return False
            estimate, n, _, so_far, layout, retained, steps, following = heappop(todo)
            best = float("inf") if self.best is None else self.best[0] * IMPROVEMENT
            if weight == 1 and estimate >= best:
                return True
            if so_far > seen[layout, retained]:
                continue
            if following is not None:
                priced += 1
                step = following.step
                if (kept := self.retained_after(layout, step, retained)) is not None:
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
                for move, rest in self.faster_moves(layout, so_far, best):
                    limit, seconds = best - rest, so_far + move.latency
                    if self.memory is None:  # memory does not matter: the fastest path is the best
                        limit = min(limit, seen.get((move.step.layout, retained), limit))
                    if seconds < limit:
                        order = seconds + weight * rest, n + 1, next(serial)
                        heappush(todo, QueueEntry(*order, so_far, layout, retained, steps, move))
        return not todo

    def faster_moves(
        self, layout: Layout, so_far: float, best: float
    ) -> Iterator[tuple[PricedMove, float]]:
        """Yield the moves with which a plan may take less than `best` seconds, each with a lower
        bound of the seconds after it."""
        for move in self.moves_from(layout, best):
            if so_far + move.latency < best - move.rest:
                yield move, self.bound(move.step.layout)

    def moves_from(self, layout: Layout, best: float) -> list[PricedMove]:
        """Return the moves from a layout whose latencies leave a plan below `best` seconds. They
        are found once, since `best` never grows."""
        if (moves := self.moves.get(layout)) is None:
            p, costs, moves = self.problem, self.costs, []
            for step in p.moves(layout):
                if p.crosses:
                    step = replace(step, layout=p.normal(step.layout))
                if (latency := costs.latency(step)) < best:
                    rest = costs.latency_bound(step.layout, p.target)
                    if latency + rest < best:
                        moves.append(PricedMove(step, latency, rest))
            self.moves[layout] = moves
        return moves

    def bound(self, layout: Layout) -> float:
        """Return a lower bound of the seconds from a layout to the target."""
        if (bound := self.bounds.get(layout)) is None:
            bound = self.bounds[layout] = self.costs.bound(layout, self.problem.target)
        return bound
