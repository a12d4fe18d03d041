"""The search of a schedule for a step in stages, by the costs of its functions, within the memory
of a device.

The costs are those of a step in which the backward part of each stage is two functions, for I and
W; where the step takes no longer with B in their place, they are one. What a rank needs besides
microbatches, such as parameters and what a function needs while it runs, is what the model of
memory finds for a schedule beyond the bytes of its microbatches. It is not the same for all
schedules: if what is found needs more than a device has, the search runs again with the larger
difference.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from xdsl.dialects.func import FuncOp

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import (
    Action,
    Schedule,
    SearchedSchedule,
    lower_bound,
    merged,
    named_schedules,
    placements,
    search,
    simulate,
)
from shardir.algebra.schedules.searching import EVALUATIONS
from shardir.cost.pipeline import pipeline_costs, step_schedule
from shardir.diagnostics import ShardirError

MAX_ROUNDS = 4
"""How many times a schedule is looked for, each time with less memory for microbatches."""

MAX_ACTIONS = 400_000
"""The actions of all orders that the local search tries on a placement, about."""


def breadth_first(placement: Sequence[int], ranks: int, microbatches: int) -> Schedule:
    """Return a schedule for any placement: all forward parts, then all backward parts, in two."""
    orders = []
    for rank in range(ranks):
        own = [s for s, r in enumerate(placement) if r == rank]
        forward = [Action(s, "F", k) for s, k in product(own, range(microbatches))]
        backward = [
            Action(s, kind, k) for s, k, kind in product(own[::-1], range(microbatches), "IW")
        ]
        orders.append((*forward, *backward))
    return Schedule(len(placement), ranks, microbatches, tuple(placement), tuple(orders))


Measure = Callable[[Schedule], Sequence[int]]
"""Returns the bytes that a device of each rank needs with a schedule."""


def search_schedule(f: FuncOp, mesh: Mesh, limit: int | None, measure: Measure) -> SearchedSchedule:
    """Return a fast schedule for a step in stages, whose backward parts are all two functions.

    Args:
        mesh: with the axis of the stages.
        limit: the bytes of a device.
        measure: splits the step by a schedule.

    Raises:
        ShardirError: none was found within the limit.
    """
    return _ScheduleSearch(f, mesh, measure).within(limit)


class _ScheduleSearch:
    """The search for one step."""

    def __init__(self, f: FuncOp, mesh: Mesh, measure: Measure):
        given = step_schedule(f)
        self.costs, self.measure = pipeline_costs(f, mesh), measure
        self.ranks, self.microbatches = given.ranks, given.microbatches
        self.chunks = given.stages // given.ranks
        actions = 3 * given.stages * given.microbatches
        self.evaluations = min(EVALUATIONS, 1 + MAX_ACTIONS // actions)

    def within(self, limit: int | None) -> SearchedSchedule:
        """Return the fastest schedule that is found within a limit."""
        if limit is None:
            return self._found(None)
        besides = {
            placement: self._besides(breadth_first(placement, self.ranks, self.microbatches))
            for placement in placements(self.ranks, self.chunks)
        }
        for _ in range(MAX_ROUNDS):
            left = {p: [limit - n for n in other] for p, other in besides.items()}
            try:
                found = self._found(left)
            except ShardirError:
                break
            placement = found.schedule.placement
            if max(self.measure(found.schedule)) <= limit:
                return found
            pairs = zip(besides[placement], self._besides(found.schedule), strict=True)
            besides[placement] = [max(pair) for pair in pairs]
        return self._named(limit)

    def _found(self, left: Mapping[tuple[int, ...], Sequence[float]] | None) -> SearchedSchedule:
        """Return the fastest schedule, with so many bytes for microbatches on each rank."""
        limits = None if left is None else lambda placement: left[tuple(placement)]
        found = search(self.ranks, self.microbatches, self.costs, limits, self.evaluations)
        return self._reported(found.schedule, found.origin)

    def _reported(self, schedule: Schedule, origin: str) -> SearchedSchedule:
        """Return a schedule with its times; the bound is that of any memory, since what is left of
        a limit for microbatches is not the same for all schedules."""
        schedule = merged(schedule, self.costs)
        bound = min(
            lower_bound(p, self.microbatches, self.costs)
            for p in placements(self.ranks, self.chunks)
        )
        return SearchedSchedule(schedule, simulate(schedule, self.costs), origin, bound)

    def _besides(self, schedule: Schedule) -> list[float]:
        """Return the bytes that each rank needs besides those of microbatches."""
        held = simulate(schedule, self.costs).peak_bytes
        return [peak - n for peak, n in zip(self.measure(schedule), held, strict=True)]

    def _named(self, limit: int) -> SearchedSchedule:
        """Return the fastest named schedule within a limit."""
        named = named_schedules(self.ranks, self.microbatches, self.chunks)
        peaks = {name: max(self.measure(s)) for name, s in named.items()}
        fitting = {
            name: simulate(s, self.costs) for name, s in named.items() if peaks[name] <= limit
        }
        if not fitting:
            raise ShardirError(
                f"expected a schedule within {limit} B on a device, got {min(peaks.values())} B in "
                f"{min(peaks, key=peaks.__getitem__)}, the smallest one found; use more ranks or "
                "devices, or more and smaller microbatches"
            )
        name = min(fitting, key=lambda n: fitting[n].makespan)
        return self._reported(named[name], name)
