"""The search of a fast schedule for given costs, within memory.

1. Named schedules, with W moved to where ranks wait, and orders by priorities.
2. A local search on the fastest of them.
3. B in place of I and W, if the step takes no longer. The gradient that another stage waits for
   comes at the end of B, later than that of I. But B takes less time than both by the overhead of
   an action, and keeps nothing from I to W.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import NamedTuple

from shardir.algebra.schedules.costs import PipelineCosts, lower_bound
from shardir.algebra.schedules.filling import (
    ROUNDING,
    Filled,
    Filling,
    schedule_by_priority,
    split_orders,
)
from shardir.algebra.schedules.named import NAMES, schedule
from shardir.algebra.schedules.schedule import COMPUTE, Action, Schedule, peak
from shardir.algebra.schedules.simulation import PipelineModel, PipelineTimeline, simulate
from shardir.diagnostics import ShardirError

PATIENCE = (0.0, 0.5, 1.0)
"""How long a rank waits for a result before it runs W, as shares of the time of W."""
EXCHANGED = (1, 1, 1, 2, 3, 4)
"""The numbers of positions by which a trial moves an action to the front, drawn uniformly."""
CHANGED_PATIENCE = 0.15
"""The share of trials that change the patience of a rank."""
PRIORITIES = ("FIW", "IFW")
"""The urgencies of `schedule_by_priority`."""
EVALUATIONS = 600
"""Bounds the trials of the local search on each placement, and so the time of `search`."""
MERGING = 30
"""Trials of `improve_merged` for each trial of the first local search: a trial without filling
orders takes a thirtieth of the time."""


@dataclass(frozen=True)
class SearchedSchedule:
    """The fastest schedule of a search.

    Attributes:
        origin: the schedule or priorities from which the search started.
        bound: a lower bound, in seconds, of schedules with one of the `placements` within memory.
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
"""The bytes that each rank may hold of microbatches; or a function from a placement to them."""


class Start(NamedTuple):
    """A start of the local search: orders of F and I, and the patience of ranks."""

    name: str
    orders: Sequence[Sequence[Action]]
    patience: Sequence[float]


def placements(ranks: int, chunks: int) -> list[tuple[int, ...]]:
    """Return the placements of a search: stages in a loop, and back and forth (a V or W)."""
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
    """Return a fast schedule of stages with these costs, within the memory of each rank.

    The result is deterministic: the local search draws from a fixed sequence, and its length is a
    number of evaluations, not a time.

    Raises:
        ShardirError: the ranks do not divide the stages, or no schedule is within the memory.
    """
    if ranks < 1 or costs.stages % ranks:
        raise ShardirError(
            f"expected a number of ranks that divides the {costs.stages} stages, got {ranks}; put "
            "equal numbers of stages on all ranks"
        )
    if memory is not None and not callable(memory) and len(memory) != ranks:
        raise ShardirError(
            f"expected the memory of {ranks} ranks, got {len(memory)}; write one number for each"
        )
    chunks = costs.stages // ranks
    named = named_schedules(ranks, microbatches, chunks)
    choices = placements(ranks, chunks)
    limits = {p: memory(p) if callable(memory) else memory or [inf] * ranks for p in choices}
    candidates = [
        (t.makespan, name, s)
        for name, s in named.items()
        for t in [simulate(s, costs)]
        if all(n <= limit for n, limit in zip(t.peak_bytes, limits[s.placement], strict=True))
    ]
    bounds = []
    for placement in choices:
        bound = lower_bound(placement, microbatches, costs, limits[placement])
        bounds.append(bound)
        filling = Filling(placement, microbatches, costs, limits[placement])
        starts = sorted(_starts(filling, named, ranks), key=lambda s: s[0].makespan)
        for filled, start in starts[:1]:
            better = _improve(filling, start, filled, bound, evaluations)
            searched = Schedule(costs.stages, ranks, microbatches, placement, better.orders)
            candidates.append((better.makespan, start.name, searched))
    if not candidates:
        smallest = min(max(simulate(s, costs).peak_bytes) for s in named.values())
        raise ShardirError(
            f"expected memory for a schedule of {microbatches} microbatches, got "
            f"{min(map(min, limits.values())):g} bytes on a rank; use {smallest:g}, which a named "
            "schedule needs"
        )
    _, origin, best = min(candidates, key=lambda candidate: candidate[0])
    if costs.overhead:
        limit, trials = limits[best.placement], evaluations * MERGING
        best = improve_merged(merged(best, costs), costs, limit, min(bounds), trials)
    return SearchedSchedule(best, simulate(best, costs), origin, min(bounds))


def named_schedules(ranks: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
    """Return the named schedules that exist with these numbers."""
    schedules = {}
    for name, record in NAMES.items():
        if record.chunks in (None, chunks):
            try:
                schedules[name] = schedule(name, ranks, microbatches, chunks)
            except ShardirError:
                continue  # does not exist with these numbers
    return schedules


def _starts(
    filling: Filling, named: dict[str, Schedule], ranks: int
) -> Iterator[tuple[Filled, Start]]:
    """Yield orders by priorities, and the named schedules with this placement, filled."""
    for share in PATIENCE:
        patience = [share] * ranks
        for kinds in PRIORITIES:
            if listed := schedule_by_priority(filling, kinds, share):
                yield listed, Start(f"priorities {kinds}", split_orders(listed.orders), patience)
        for name, s in named.items():
            if s.placement == tuple(filling.placement):
                orders = split_orders(s.orders)
                if filled := filling.fill(orders, patience):
                    yield filled, Start(name, orders, patience)


def _improve(
    filling: Filling, start: Start, best: Filled, bound: float, evaluations: int
) -> Filled:
    """Return the fastest orders of a local search.

    A trial moves one or two actions to the front, or changes the patience of a rank, and is kept if
    it is not slower.
    """
    draw = Random(0)
    orders, patience = list(start.orders), list(start.patience)
    first = filling.fill(orders, patience)  # may differ from orders by priorities
    current = first.makespan if first else inf
    for _ in range(evaluations):
        if best.makespan <= bound * (1 + ROUNDING):
            break
        trial, waits = list(orders), list(patience)
        if draw.random() < CHANGED_PATIENCE:
            waits[draw.randrange(len(waits))] = draw.choice(PATIENCE)
        else:
            for _ in range(draw.choice((1, 2))):
                rank = draw.randrange(len(trial))
                order = list(trial[rank])
                i = draw.randrange(len(order))
                order.insert(max(0, i - draw.choice(EXCHANGED)), order.pop(i))
                trial[rank] = order
        filled = filling.fill(trial, waits)
        if filled is not None and filled.makespan <= current:
            current, orders, patience = filled.makespan, trial, waits
            best = min(best, filled, key=lambda f: f.makespan)
    return best


TRIALS = 600
"""Bounds the groups of I and W for which `merged` tries B."""
MOVED = (-4, -3, -2, -1, -1, 1, 1, 2, 3, 4)
"""The numbers of positions by which a trial moves an action, drawn uniformly."""
JOINED, PARTED = 0.4, 0.2
"""The shares of trials on I or W that make B of both, and of trials on B that split it."""

CodedOrders = list[list[int]]
"""The actions of each rank, by `PipelineModel.code`."""


def merged(schedule: Schedule, costs: PipelineCosts) -> Schedule:
    """Return a schedule with B in place of I and W wherever the step takes no longer.

    B stands in the place of I or of W. It is tried for all microbatches together, and by bisection
    if that fails.
    """
    orders = _MergedOrders(schedule, costs)
    groups = [sorted(key for key, kinds in orders.kinds().items() if "I" in kinds)]
    for _ in range(TRIALS):
        if not groups:
            break
        group = groups.pop()
        if not any(orders.join(group, kind) for kind in "IW") and len(group) > 1:
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
    return orders.schedule()


def improve_merged(
    schedule: Schedule,
    costs: PipelineCosts,
    memory: Sequence[float],
    bound: float,
    evaluations: int,
) -> Schedule:
    """Return a schedule improved by local search.

    A trial makes B of I and W, or I and W of B, or moves an action, and is kept if the step is not
    slower.

    Args:
        memory: the bytes that each rank may hold of microbatches.
        bound: a makespan, in seconds, at which the search ends.
        evaluations: the maximum number of trials.
    """
    orders, draw = _MergedOrders(schedule, costs), Random(0)
    for _ in range(evaluations):
        if orders.end <= bound * (1 + ROUNDING):
            break
        orders.change(draw, memory)
    return orders.schedule()


class _MergedOrders:
    """The orders of a schedule, changed as long as the step takes no longer."""

    def __init__(self, schedule: Schedule, costs: PipelineCosts):
        self.given, self.costs = schedule, costs
        self.model = PipelineModel(schedule.placement, schedule.microbatches, costs)
        self.orders = [[self.model.code(a) for a in order] for order in schedule.orders]
        self.keys = schedule.stages * schedule.microbatches
        """The number of pairs of a stage and a microbatch: a code is a kind times this, plus the
        key of a pair."""
        self.end = self._makespan(self.orders)

    def schedule(self) -> Schedule:
        """Return the schedule of the orders."""
        orders = tuple(tuple(map(self.model.action, order)) for order in self.orders)
        return replace(self.given, orders=orders)

    def kinds(self) -> dict[int, str]:
        """Return the kinds of the actions of each key."""
        kinds: dict[int, str] = {}
        for code in (code for order in self.orders for code in order):
            kind, key = divmod(code, self.keys)
            kinds[key] = kinds.get(key, "") + COMPUTE[kind]
        return kinds

    def _code(self, key: int, kind: str) -> int:
        return COMPUTE.index(kind) * self.keys + key

    def _makespan(self, orders: CodedOrders) -> float:
        """Return the makespan of orders, in seconds; infinite if they cannot run."""
        ends = self.model.ends(orders)
        return float("inf") if ends is None else max(times[-1] for times in ends)

    def _keep(self, orders: CodedOrders) -> bool:
        """Keep orders if the step takes no longer with them; whether they are kept."""
        if (end := self._makespan(orders)) > self.end * (1 + ROUNDING):
            return False
        self.orders, self.end = orders, min(end, self.end)
        return True

    def join(self, keys: Sequence[int], kind: str) -> bool:
        """Make B of I and W of some keys, in the place of the action of a kind; whether it is
        kept."""
        becomes = {self._code(key, kind): self._code(key, "B") for key in keys}
        other = "W" if kind == "I" else "I"
        dropped = {self._code(key, other) for key in keys}
        return self._keep(
            [[becomes.get(c, c) for c in order if c not in dropped] for order in self.orders]
        )

    def change(self, draw: Random, memory: Sequence[float]) -> None:
        """Try a random change."""
        rank, which = draw.randrange(len(self.orders)), draw.random()
        order = list(self.orders[rank])
        at = draw.randrange(len(order))
        kind, key = divmod(order[at], self.keys)
        if COMPUTE[kind] in "IW" and which < JOINED:
            self.join([key], COMPUTE[kind])
            return
        if COMPUTE[kind] == "B" and which < PARTED:
            order[at : at + 1] = self._code(key, "I"), self._code(key, "W")
        else:
            to = min(max(at + draw.choice(MOVED), 0), len(order) - 1)
            between = order[min(at, to) : max(at, to) + 1]
            if sum(code % self.keys == key for code in between) > 1:
                return  # the actions of a key keep their order
            order.insert(to, order.pop(at))
            held = peak([self.model.action(c) for c in order], self.costs.memory)
            if held > memory[rank] * (1 + ROUNDING):
                return
        self._keep([*self.orders[:rank], order, *self.orders[rank + 1 :]])
