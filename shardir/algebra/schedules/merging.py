"""B in place of I and W: one action, where the step takes no longer.

The gradient that another stage waits for comes at the end of B, later than that of I. B takes less
time than both by the overhead of an action, and keeps nothing from I to W.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from shardir.algebra.schedules.actions import COMPUTE
from shardir.algebra.schedules.costs import PipelineCosts
from shardir.algebra.schedules.filling import ROUNDING
from shardir.algebra.schedules.schedule import Schedule
from shardir.algebra.schedules.simulation import PipelineModel, peak

TRIALS = 600
"""The groups of pairs of I and W for which B is tried."""
MOVED = (-4, -3, -2, -1, -1, 1, 1, 2, 3, 4)
"""The numbers of positions by which an action is moved, each as likely."""
JOINED, PARTED = 0.4, 0.2
"""The shares of the trials with I or W that make B of it, and of those with B that part it."""

CodedOrders = list[list[int]]
"""The actions of each rank, by `PipelineModel.code`."""


def merged(schedule: Schedule, costs: PipelineCosts) -> Schedule:
    """Return a schedule with B for I and W of as many microbatches as the step does not take longer
    with: in the place of I, or of W. It is tried of all of them, then of halves of what fails."""
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


def improved(
    schedule: Schedule,
    costs: PipelineCosts,
    memory: Sequence[float],
    bound: float,
    evaluations: int,
) -> Schedule:
    """Return a schedule that is changed by local search: each trial makes B of I and W, or I and W
    of B, or moves an action, and stays if the step is not slower.

    Args:
        memory: the bytes that each rank may hold of microbatches.
        bound: the seconds at which the search ends.
    """
    orders, draw = _MergedOrders(schedule, costs), Random(0)
    for _ in range(evaluations):
        if orders.end <= bound * (1 + ROUNDING):
            break
        orders.change(draw, memory)
    return orders.schedule()


class _MergedOrders:
    """The orders of a schedule, to be changed as long as the step takes no longer."""

    def __init__(self, schedule: Schedule, costs: PipelineCosts):
        self.given, self.costs = schedule, costs
        self.model = PipelineModel(schedule.placement, schedule.microbatches, costs)
        self.orders = [[self.model.code(a) for a in order] for order in schedule.orders]
        self.keys = schedule.stages * schedule.microbatches
        """The number of stages and microbatches: a code is one of these, and a kind."""
        self.end = self._end(self.orders)

    def schedule(self) -> Schedule:
        found = tuple(tuple(map(self.model.action, order)) for order in self.orders)
        return replace(self.given, orders=found)

    def kinds(self) -> dict[int, str]:
        """Return the kinds of the actions of each stage and microbatch."""
        found: dict[int, str] = {}
        for code in (code for order in self.orders for code in order):
            kind, key = divmod(code, self.keys)
            found[key] = found.get(key, "") + COMPUTE[kind]
        return found

    def _code(self, key: int, kind: str) -> int:
        return COMPUTE.index(kind) * self.keys + key

    def _end(self, orders: CodedOrders) -> float:
        ends = self.model.ends(orders)
        return float("inf") if ends is None else max(times[-1] for times in ends)

    def _keep(self, orders: CodedOrders) -> bool:
        """Take orders with which the step takes no longer."""
        if (end := self._end(orders)) > self.end * (1 + ROUNDING):
            return False
        self.orders, self.end = orders, min(end, self.end)
        return True

    def join(self, keys: Sequence[int], kind: str) -> bool:
        """Make B of I and W of some stages and microbatches, in the place of one of them."""
        becomes = {self._code(key, kind): self._code(key, "B") for key in keys}
        other = "W" if kind == "I" else "I"
        dropped = {self._code(key, other) for key in keys}
        return self._keep(
            [[becomes.get(c, c) for c in order if c not in dropped] for order in self.orders]
        )

    def change(self, draw: Random, memory: Sequence[float]) -> None:
        """Try a change that is drawn."""
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
                return  # of one microbatch a stage keeps its order
            order.insert(to, order.pop(at))
            held = peak([self.model.action(c) for c in order], self.costs.memory)
            if held > memory[rank] * (1 + ROUNDING):
                return
        self._keep([*self.orders[:rank], order, *self.orders[rank + 1 :]])
