"""Gradients of weights where a rank would wait: W inserted into orders of F and I."""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from shardir.algebra.schedules.actions import Action, Orders
from shardir.algebra.schedules.costs import PipelineCosts
from shardir.algebra.schedules.schedule import Schedule

ROUNDING = 1e-9
"""The relative difference of bytes that is due to rounding."""


def split_orders(schedule: Schedule) -> list[list[Action]]:
    """Return the orders of a schedule without W, with I for B."""
    return [
        [a._replace(kind="I") if a.kind == "B" else a for a in order if a.kind != "W"]
        for order in schedule.orders
    ]


class Filled(NamedTuple):
    """Orders of F, I and W, and the time at which the last rank ends, in seconds."""

    makespan: float
    orders: Orders


class Filling:
    """Stages on ranks with costs, and the bytes that each rank may hold of microbatches."""

    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        costs: PipelineCosts,
        memory: Sequence[float],
    ):
        self.placement, self.microbatches, self.costs = placement, microbatches, costs
        self.memory = [each * (1 + ROUNDING) for each in memory]
        pairs = zip(placement, placement[1:], costs.transfer, strict=False)
        self.hops = [t if a != b else 0.0 for a, b, t in pairs]
        """The seconds from the end of a stage to the begin of the next one."""

    def fill(self, orders: Sequence[Sequence[Action]], patience: Sequence[float]) -> Filled | None:
        """Insert W into orders of F and I.

        A rank computes the oldest W that it can when its next action has to wait: for a result, or
        for memory. It waits instead if the result arrives within `patience` of the rank, as a share
        of the time of W. If F has to wait for memory and there is no W, the next I of the order is
        moved before it. None if that does not help, or the orders have a cycle.
        """
        c, hops, placement = self.costs, self.hops, self.placement
        last = len(placement) - 1
        # When the value that F or I takes arrives on its rank, by stage and microbatch.
        arrives: dict[Action, float] = {Action(0, "F", k): 0.0 for k in range(self.microbatches)}
        left = [list(o) for o in orders]
        position = [0] * len(orders)
        clock = [0.0] * len(orders)
        held = [0.0] * len(orders)
        pending: list[deque[Action]] = [deque() for _ in orders]
        found: list[list[Action]] = [[] for _ in orders]
        events = [(0.0, rank) for rank in range(len(orders))]
        while events:
            now, rank = heappop(events)
            if now < clock[rank]:
                continue  # it computes; the end of that is an event, too
            order, waiting = left[rank], pending[rank]
            action, at, full = None, None, False
            if position[rank] < len(order):
                action = order[position[rank]]
                at = arrives.get(action)
                needed = held[rank] + c.memory[action.stage]
                full = action.kind == "F" and needed > self.memory[rank]
                if full and not waiting:
                    first = next(
                        (i for i in range(position[rank], len(order)) if order[i].kind == "I"), None
                    )
                    if first is None:
                        return None
                    order.insert(position[rank], order.pop(first))
                    action, full = order[position[rank]], False
                    at = arrives.get(action)
            if action is None or at is None or at > now or full:
                if not waiting:
                    if at is not None:
                        heappush(events, (at, rank))
                    continue
                soon = now + patience[rank] * c.weight[waiting[0].stage]
                if action and at is not None and not full and at < soon:
                    heappush(events, (at, rank))
                    continue
                action = waiting.popleft()
            else:
                position[rank] += 1
            stage, kind, k = action
            taken, hop = None, 0.0
            if kind == "F":
                held[rank] += c.memory[stage]
                end = now + c.forward[stage]
                taken = Action(stage, "I", k) if stage == last else Action(stage + 1, "F", k)
                hop = hop if stage == last else hops[stage]
            elif kind == "I":
                waiting.append(Action(stage, "W", k))
                end = now + c.input[stage]
                if stage:
                    taken, hop = Action(stage - 1, "I", k), hops[stage - 1]
            else:
                held[rank] -= c.memory[stage]
                end = now + c.weight[stage]
            found[rank].append(action)
            clock[rank] = end
            heappush(events, (end, rank))
            if taken:
                arrives[taken] = end + hop
                other = placement[taken.stage]
                heappush(events, (max(end + hop, clock[other]), other))
        if any(p < len(o) for p, o in zip(position, left, strict=True)):
            return None
        return Filled(max(clock), tuple(map(tuple, found)))
