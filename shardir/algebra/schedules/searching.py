"""The search of a fast schedule for given costs, within memory: from the named schedules, with W
where ranks wait, and from orders by priorities, improved by local search.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple

from shardir.algebra.schedules.actions import Action
from shardir.algebra.schedules.costs import PipelineCosts, lower_bound
from shardir.algebra.schedules.filling import ROUNDING, Filled, Filling, split_orders
from shardir.algebra.schedules.merging import improved, merged
from shardir.algebra.schedules.named import NAMES, schedule
from shardir.algebra.schedules.priorities import by_priority
from shardir.algebra.schedules.schedule import Schedule
from shardir.algebra.schedules.simulation import PipelineTimeline, simulate
from shardir.diagnostics import ShardirError

PATIENCE = (0.0, 0.5, 1.0)
"""How long a rank waits for a result before it computes W instead, as shares of the time of W."""
EXCHANGED = (1, 1, 1, 2, 3, 4)
"""The numbers of positions by which an action is moved to the front, each as likely."""
CHANGED_PATIENCE = 0.15
"""The share of the trials that change the patience of a rank."""
PRIORITIES = ("FIW", "IFW")
"""The orders of urgency of `by_priority`."""
EVALUATIONS = 600
"""The number of trials of the local search, on each placement."""
MERGING = 30
"""The trials of the local search with B for I and W, as a multiple of those before: it does not
fill orders, and takes a thirtieth of the time."""


@dataclass(frozen=True)
class SearchedSchedule:
    """The fastest schedule that was found, with the name of what it was made of.

    `bound` is a time in seconds below which no schedule ends whose stages have one of the
    `placements`, within the same memory.
    """

    schedule: Schedule
    timeline: PipelineTimeline
    origin: str
    bound: float

    @property
    def gap(self) -> float:
        """The relative difference of the makespan and the bound."""
        gap = self.timeline.makespan / self.bound - 1 if self.bound else 0.0
        return 0.0 if abs(gap) < ROUNDING else gap

    @property
    def summary(self) -> str:
        """The figures in a line."""
        t = self.timeline
        return (
            f"from {self.origin}: {t.makespan:.3g} s, ranks wait {t.bubble:.1%}; at least "
            f"{self.bound:.3g} s, gap {self.gap:.1%}"
        )


Limits = Sequence[float] | Callable[[Sequence[int]], Sequence[float]]
"""The bytes that each rank may hold of microbatches; or a function that returns them for a
placement of the stages."""


class Start(NamedTuple):
    """Orders of F and I, and the patience of ranks, to be filled with W."""

    name: str
    orders: Sequence[Sequence[Action]]
    patience: Sequence[float]


def placements(ranks: int, chunks: int) -> list[tuple[int, ...]]:
    """Return the placements of a search: stages in a loop, and back and forth, as a V or W."""
    loop = tuple(s % ranks for s in range(ranks * chunks))
    back = tuple(r if s // ranks % 2 == 0 else ranks - 1 - r for s, r in enumerate(loop))
    return list(dict.fromkeys((loop, back)))


def search(
    ranks: int,
    microbatches: int,
    costs: PipelineCosts,
    memory: Limits | None = None,
    evaluations: int = EVALUATIONS,
) -> SearchedSchedule:
    """Return a fast schedule of stages with these costs, on each rank within `memory`.

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
    if memory is not None and not callable(memory) and len(memory) != ranks:
        raise ShardirError(
            f"expected the memory of {ranks} ranks, got {len(memory)}; write one number for each"
        )
    chunks = costs.stages // ranks
    named = named_schedules(ranks, microbatches, chunks)
    tried = placements(ranks, chunks)
    limits = {p: memory(p) if callable(memory) else memory or [inf] * ranks for p in tried}
    found = [
        (t.makespan, name, s)
        for name, s in named.items()
        for t in [simulate(s, costs)]
        if all(n <= limit for n, limit in zip(t.peak_bytes, limits[s.placement], strict=True))
    ]
    bounds = []
    for placement in tried:
        bound = lower_bound(placement, microbatches, costs, limits[placement])
        bounds.append(bound)
        filling = Filling(placement, microbatches, costs, limits[placement])
        starts = sorted(_starts(filling, named, ranks), key=lambda s: s[0].makespan)
        for filled, start in starts[:1]:
            better = _improved(filling, start, filled, bound, evaluations)
            searched = Schedule(costs.stages, ranks, microbatches, placement, better.orders)
            found.append((better.makespan, start.name, searched))
    if not found:
        smallest = min(max(simulate(s, costs).peak_bytes) for s in named.values())
        raise ShardirError(
            f"expected memory for a schedule of {microbatches} microbatches, got "
            f"{min(map(min, limits.values())):g} bytes on a rank; use {smallest:g}, which a named "
            "schedule needs"
        )
    _, origin, best = min(found, key=lambda each: each[0])
    if costs.overhead:
        limit, trials = limits[best.placement], evaluations * MERGING
        best = improved(merged(best, costs), costs, limit, min(bounds), trials)
    return SearchedSchedule(best, simulate(best, costs), origin, min(bounds))


def named_schedules(ranks: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
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
    filling: Filling, named: dict[str, Schedule], ranks: int
) -> Iterator[tuple[Filled, Start]]:
    """Yield the named schedules with this placement, filled, and orders by priorities."""
    for patience in PATIENCE:
        each = [patience] * ranks
        for kinds in PRIORITIES:
            if listed := by_priority(filling, kinds, patience):
                yield listed, Start(f"priorities {kinds}", split_orders(listed.orders), each)
        for name, s in named.items():
            if s.placement == tuple(filling.placement):
                orders = split_orders(s.orders)
                if filled := filling.fill(orders, each):
                    yield filled, Start(name, orders, each)


def _improved(
    filling: Filling, start: Start, best: Filled, bound: float, evaluations: int
) -> Filled:
    """Return the fastest filled orders of a local search: each trial moves one or two actions to
    the front in the orders of ranks, or changes the patience of one, and stays if it is not
    slower."""
    draw = Random(0)
    orders, patience = list(start.orders), list(start.patience)
    first = filling.fill(orders, patience)  # orders by priorities may wait otherwise
    current = first.makespan if first else inf
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
        filled = filling.fill(tried, waits)
        if filled is not None and filled.makespan <= current:
            current, orders, patience = filled.makespan, tried, waits
            best = min(best, filled, key=lambda f: f.makespan)
    return best
