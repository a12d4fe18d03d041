"""The search of a fast schedule for given costs, within memory: from the named schedules, with W
where ranks wait, improved by local search.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple

from shardir.algebra.schedules.actions import Action
from shardir.algebra.schedules.costs import PipelineCosts, lower_bound
from shardir.algebra.schedules.filling import Filled, Filling, split_orders
from shardir.algebra.schedules.named import NAMES, schedule
from shardir.algebra.schedules.schedule import Schedule
from shardir.algebra.schedules.simulation import PipelineTimeline, simulate
from shardir.diagnostics import ShardirError

PATIENCE = (0.0, 0.5, 1.0)
"""How long a rank waits for a result before it computes W instead, as shares of the time of W."""
EXCHANGED = (1, 1, 1, 2, 3, 4)
"""The numbers of positions by which an action is moved to the front, each as likely."""
CHANGED_PATIENCE = 0.15
"""The share of the trials that change the patience of a rank."""
EVALUATIONS = 600
"""The number of trials of the local search, on each placement."""


@dataclass(frozen=True)
class SearchedSchedule:
    """The fastest schedule that was found, from the named one that it was made of.

    `bound` is a time in seconds below which no schedule ends that has its stages placed as a named
    one, within the same memory.
    """

    schedule: Schedule
    timeline: PipelineTimeline
    origin: str
    bound: float

    @property
    def gap(self) -> float:
        """The relative difference of the makespan and the bound."""
        return self.timeline.makespan / self.bound - 1 if self.bound else 0.0


class Start(NamedTuple):
    """Orders of F and I of a named schedule, and the patience of ranks, to be filled with W."""

    makespan: float
    name: str
    filling: Filling
    orders: Sequence[Sequence[Action]]
    patience: Sequence[float]


def search(
    ranks: int,
    microbatches: int,
    costs: PipelineCosts,
    memory: Sequence[float] | None = None,
    evaluations: int = EVALUATIONS,
) -> SearchedSchedule:
    """Return a fast schedule of stages with these costs, on each rank within `memory`, in bytes.

    The result is the same on each run: the local search draws from a fixed sequence, and its length
    is a number of evaluations, not a time.

    Raises:
        ShardirError: the stages are not equally many on each rank, or no schedule was found within
            the memory.
    """
    if ranks < 1 or costs.stages % ranks:
        raise ShardirError(
            f"expected a number of ranks that divides the {costs.stages} stages, got {ranks}; use "
            "as many stages on each rank"
        )
    if memory is not None and len(memory) != ranks:
        raise ShardirError(
            f"expected the memory of {ranks} ranks, got {len(memory)}; write one number for each"
        )
    named = _named(ranks, microbatches, costs.stages // ranks)
    limits = [inf] * ranks if memory is None else memory
    bounds = {
        s.placement: lower_bound(s.placement, microbatches, costs, memory) for s in named.values()
    }
    found = [
        (t.makespan, name, s)
        for name, s in named.items()
        for t in [simulate(s, costs)]
        if all(held <= limit for held, limit in zip(t.peak_bytes, limits, strict=True))
    ]
    for start in _starts(named, costs, limits):
        placement = tuple(start.filling.placement)
        filled = _improved(start, bounds[placement], evaluations)
        searched = Schedule(costs.stages, ranks, microbatches, placement, filled.orders)
        found.append((filled.makespan, start.name, searched))
    if not found:
        smallest = min(max(simulate(s, costs).peak_bytes) for s in named.values())
        raise ShardirError(
            f"expected memory for a schedule of {microbatches} microbatches, got {min(limits):g} "
            f"bytes on a rank; use {smallest:g}, which a named schedule needs"
        )
    _, origin, best = min(found, key=lambda each: each[0])
    return SearchedSchedule(best, simulate(best, costs), origin, min(bounds.values()))


def _named(ranks: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
    """Return the named schedules with these numbers, as far as they exist."""
    found = {}
    for name, record in NAMES.items():
        if record.chunks in (None, chunks):
            try:
                found[name] = schedule(name, ranks, microbatches, chunks)
            except ShardirError:
                continue  # not with these numbers
    return found


def _starts(
    named: dict[str, Schedule], costs: PipelineCosts, memory: Sequence[float]
) -> list[Start]:
    """Return the fastest named schedule of each placement, filled."""
    found: dict[tuple[int, ...], Start] = {}
    for name, s in named.items():
        filling = Filling(s.placement, s.microbatches, costs, memory)
        orders = split_orders(s)
        for patience in PATIENCE:
            each = [patience] * s.ranks
            filled = filling.fill(orders, each)
            best = found.get(s.placement)
            if filled and (best is None or filled.makespan < best.makespan):
                found[s.placement] = Start(filled.makespan, name, filling, orders, each)
    return list(found.values())


def _improved(start: Start, bound: float, evaluations: int) -> Filled:
    """Return the fastest filled orders of a local search: each trial moves one or two actions to
    the front in the orders of ranks, or changes the patience of one, and stays if it is not
    slower."""
    draw = Random(0)
    orders, patience = list(start.orders), list(start.patience)
    best = start.filling.fill(orders, patience)
    assert best is not None
    for _ in range(evaluations):
        if best.makespan <= bound * (1 + 1e-9):
            break
        tried, waits = list(orders), list(patience)
        if draw.random() < CHANGED_PATIENCE:
            waits[draw.randrange(len(waits))] = draw.choice(PATIENCE)
        else:
            for _ in range(draw.choice((1, 2))):
                rank = draw.randrange(len(tried))
                order = list(tried[rank])
                i = draw.randrange(len(order))
                order.insert(max(0, i - draw.choice(EXCHANGED)), order.pop(i))
                tried[rank] = order
        filled = start.filling.fill(tried, waits)
        if filled is not None and filled.makespan <= best.makespan:
            best, orders, patience = filled, tried, waits
    return best
