"""Orders by list scheduling: W inserted where a rank would wait, or the most urgent action."""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from shardir.algebra.schedules.costs import PipelineCosts
from shardir.algebra.schedules.schedule import Action, Orders

ROUNDING = 1e-9
"""The relative difference of bytes or seconds that is due to rounding."""


def split_orders(orders: Orders) -> list[list[Action]]:
    """Return orders of F and I: without W, and with I for B."""
    return [
        [a._replace(kind="I") if a.kind == "B" else a for a in order if a.kind != "W"]
        for order in orders
    ]


class Filled(NamedTuple):
    """Orders of F, I and W, and their makespan in seconds."""

    makespan: float
    orders: Orders


class Filling:
    """List scheduling of stages with costs on ranks.

    Args:
        memory: the bytes that each rank may hold of microbatches.
    """

    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        costs: PipelineCosts,
        memory: Sequence[float],
    ):
        self.placement, self.microbatches, self.costs = placement, microbatches, costs
        self.memory = [limit * (1 + ROUNDING) for limit in memory]
        self.hops, self.hops_back = costs.delays(placement)

    def fill(self, orders: Sequence[Sequence[Action]], patience: Sequence[float]) -> Filled | None:
        """Insert W into orders of F and I.

        A rank runs its oldest W when its next action must wait for a result or for memory. It waits
        if the result arrives soon. If F must wait for memory and no W is left, the next I of the
        order moves before F.

        Args:
            patience: by rank, how long it waits for a result, as a share of the time of W.

        Returns:
            None if the memory is too small, or the orders have a cycle.
        """
        left, position = [list(o) for o in orders], [0] * len(orders)
        pending: list[deque[Action]] = [deque() for _ in orders]
        running = RunningRanks(self)
        for now, rank in running.free_ranks():
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
        return running.result()


class RunningRanks:
    """Ranks that run actions, simulated in the order of time.

    Attributes:
        arrives: when the input of an F or I arrives on its rank, in seconds, once it is known.
        held: by rank, the bytes of microbatches.
        clock: by rank, when it is free.
        orders: by rank, the actions so far.
        events: a heap of times and ranks.
    """

    def __init__(self, filling: Filling):
        self.filling = filling
        ranks = len(filling.memory)
        self.arrives = {Action(0, "F", k): 0.0 for k in range(filling.microbatches)}
        self.held = [0.0] * ranks
        self.clock = [0.0] * ranks
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.events = [(0.0, rank) for rank in range(ranks)]

    def free_ranks(self) -> Iterator[tuple[float, int]]:
        """Yield each time at which a rank is free and an input may have arrived, and the rank."""
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.clock[rank]:  # otherwise the end of its action is another event
                yield now, rank

    def wake(self, rank: int, at: float | None) -> None:
        """Let a rank wait until a time; None leaves it to the event of its input."""
        if at is not None:
            heappush(self.events, (at, rank))

    def fits(self, rank: int, size: float) -> bool:
        """Whether a rank has memory for `size` further bytes."""
        return self.held[rank] + size <= self.filling.memory[rank]

    def run(self, now: float, rank: int, action: Action) -> None:
        """Run an action on a free rank."""
        c, hops, hops_back = self.filling.costs, self.filling.hops, self.filling.hops_back
        stage, kind, k = action
        user, hop = None, 0.0
        if kind == "F":
            self.held[rank] += c.memory[stage]
            end = now + c.forward[stage]
            if stage < len(hops):
                user, hop = Action(stage + 1, "F", k), hops[stage]
            else:
                user = Action(stage, "I", k)
        elif kind == "I":
            end = now + c.input[stage]
            if stage:
                user, hop = Action(stage - 1, "I", k), hops_back[stage - 1]
        else:
            self.held[rank] -= c.memory[stage]
            end = now + c.weight[stage]
        self.orders[rank].append(action)
        self.clock[rank] = end
        heappush(self.events, (end, rank))
        if user:
            self.arrives[user] = end + hop
            other = self.filling.placement[user.stage]
            heappush(self.events, (max(end + hop, self.clock[other]), other))

    def result(self) -> Filled | None:
        """Return the orders; None if not all actions have run."""
        count = 3 * len(self.filling.placement) * self.filling.microbatches
        if sum(map(len, self.orders)) < count:
            return None
        return Filled(max(self.clock), tuple(map(tuple, self.orders)))


def schedule_by_priority(filling: Filling, kinds: str, patience: float) -> Filled | None:
    """Return the orders in which a free rank runs the most urgent action whose input has arrived.

    F runs only if the rank has memory for one microbatch on each of its later stages: otherwise
    nothing that it holds is ever freed.

    Args:
        kinds: by urgency: "IFW" runs I, then F, then W. F and I of later stages come first.
        patience: how long a rank waits for another input before it runs W, as a share of W.

    Returns:
        None if the memory is too small.
    """
    c, placement = filling.costs, filling.placement
    own = [[s for s, r in enumerate(placement) if r == rank] for rank in range(len(filling.memory))]
    needed = {
        s: sum(c.memory[later] for later in stages if later >= s) for stages in own for s in stages
    }
    count = {kind: [0] * len(placement) for kind in kinds}
    running = RunningRanks(filling)
    for now, rank in running.free_ranks():
        ready: list[tuple[int, int, Action]] = []
        soon = None
        for s in own[rank]:
            for kind in "FI":
                action = Action(s, kind, count[kind][s])
                at = running.arrives.get(action)
                if at is None or (kind == "F" and not running.fits(rank, needed[s])):
                    continue
                if at <= now:
                    ready.append((kinds.index(kind), -s, action))
                else:
                    soon = at if soon is None else min(soon, at)
            if count["W"][s] < count["I"][s]:
                ready.append((kinds.index("W"), count["W"][s], Action(s, "W", count["W"][s])))
        action = min(ready)[-1] if ready else None
        if action is None or (
            action.kind == "W"
            and soon is not None
            and soon < now + patience * c.weight[action.stage]
        ):
            running.wake(rank, soon)
            continue
        count[action.kind][action.stage] += 1
        running.run(now, rank, action)
    return running.result()
