"""Gradients of weights where a rank would wait: W inserted into orders of F and I."""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from shardir.algebra.schedules.actions import Action, Orders
from shardir.algebra.schedules.costs import PipelineCosts

ROUNDING = 1e-9
"""The relative difference of bytes that is due to rounding."""


def split_orders(orders: Orders) -> list[list[Action]]:
    """Return orders without W, with I for B."""
    return [
        [a._replace(kind="I") if a.kind == "B" else a for a in order if a.kind != "W"]
        for order in orders
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
        self.hops, self.hops_back = costs.delays(placement)
        """The seconds from the end of a stage to the begin of the next one, and back."""

    def fill(self, orders: Sequence[Sequence[Action]], patience: Sequence[float]) -> Filled | None:
        """Insert W into orders of F and I.

        A rank computes the oldest W that it can when its next action has to wait: for a result, or
        for memory. It waits instead if the result arrives within `patience` of the rank, as a share
        of the time of W. If F has to wait for memory and there is no W, the next I of the order is
        moved before it. None if that does not help, or the orders have a cycle.
        """
        left, position = [list(o) for o in orders], [0] * len(orders)
        pending: list[deque[Action]] = [deque() for _ in orders]
        running = RunningRanks(self)
        for now, rank in running.free():
            order, waiting = left[rank], pending[rank]
            action, at, full = None, None, False
            if position[rank] < len(order):
                action = order[position[rank]]
                at = running.arrives.get(action)
                full = action.kind == "F" and not running.fits(
                    rank, self.costs.memory[action.stage]
                )
                if full and not waiting:
                    first = next(
                        (i for i in range(position[rank], len(order)) if order[i].kind == "I"), None
                    )
                    if first is None:
                        return None
                    order.insert(position[rank], order.pop(first))
                    action, full = order[position[rank]], False
                    at = running.arrives.get(action)
            if action is None or at is None or at > now or full:
                if not waiting:
                    running.wake(rank, at)
                    continue
                soon = now + patience[rank] * self.costs.weight[waiting[0].stage]
                if action and at is not None and not full and at < soon:
                    running.wake(rank, at)
                    continue
                action = waiting.popleft()
            else:
                position[rank] += 1
            running.run(now, rank, action)
            if action.kind == "I":
                waiting.append(action._replace(kind="W"))
        return running.filled()


class RunningRanks:
    """Ranks that run actions, in the order of time."""

    def __init__(self, filling: Filling):
        self.filling = filling
        ranks = len(filling.memory)
        self.arrives = {Action(0, "F", k): 0.0 for k in range(filling.microbatches)}
        """When what an F or I takes arrives on its rank, as far as that is known."""
        self.held = [0.0] * ranks
        self.clock = [0.0] * ranks
        self.found: list[list[Action]] = [[] for _ in range(ranks)]
        self.events = [(0.0, rank) for rank in range(ranks)]

    def free(self) -> Iterator[tuple[float, int]]:
        """Yield the times at which a rank is free and something may have arrived, and the rank."""
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.clock[rank]:  # otherwise it computes, and the end of that is an event
                yield now, rank

    def wake(self, rank: int, at: float | None) -> None:
        """Let a rank wait until a time; None if it is not known yet."""
        if at is not None:
            heappush(self.events, (at, rank))

    def fits(self, rank: int, size: float) -> bool:
        """Whether a rank has memory for this many bytes more."""
        return self.held[rank] + size <= self.filling.memory[rank]

    def run(self, now: float, rank: int, action: Action) -> None:
        """Run an action on a rank that is free."""
        c, hops, hops_back = self.filling.costs, self.filling.hops, self.filling.hops_back
        stage, kind, k = action
        taken, hop = None, 0.0
        if kind == "F":
            self.held[rank] += c.memory[stage]
            end = now + c.forward[stage]
            if stage < len(hops):
                taken, hop = Action(stage + 1, "F", k), hops[stage]
            else:
                taken = Action(stage, "I", k)
        elif kind == "I":
            end = now + c.input[stage]
            if stage:
                taken, hop = Action(stage - 1, "I", k), hops_back[stage - 1]
        else:
            self.held[rank] -= c.memory[stage]
            end = now + c.weight[stage]
        self.found[rank].append(action)
        self.clock[rank] = end
        heappush(self.events, (end, rank))
        if taken:
            self.arrives[taken] = end + hop
            other = self.filling.placement[taken.stage]
            heappush(self.events, (max(end + hop, self.clock[other]), other))

    def filled(self) -> Filled | None:
        """Return what has run, or None if that is not all."""
        count = 3 * len(self.filling.placement) * self.filling.microbatches
        if sum(map(len, self.found)) < count:
            return None
        return Filled(max(self.clock), tuple(map(tuple, self.found)))
