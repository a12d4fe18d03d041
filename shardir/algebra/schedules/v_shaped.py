"""The orders of schedules with two stages on each rank, placed as a V: stages s and 2p - 1 - s on
rank s of p. The last stage is on the rank of the first.

ZBV (Qi et al. 2023) and DualPipeV (DeepSeek 2024) are those of torch.distributed.pipelining.
"""

from collections import Counter, deque

from shardir.algebra.schedules.actions import Action, Orders


def zbv(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Two stages on each rank, I and W in turns, without a bubble in the middle where F, I and W
    take equally long."""
    count = max(2 * ranks - 1, microbatches)  # what the pattern needs; more is dropped below
    orders = (_zbv_order(rank, ranks, count) for rank in range(ranks))
    return tuple(tuple(a for a in o if (a.microbatch or 0) < microbatches) for o in orders)


def _zbv_order(rank: int, ranks: int, count: int) -> list[Action]:
    order = RankOrder((rank, 2 * ranks - 1 - rank))
    for _ in range(2 * (ranks - rank) - 1):
        order.add("F0")
    for _ in range(rank):
        order.add("F1 F0")
    for _ in range(ranks - rank):
        order.add("F1 I1 W1")
    while order.count["F1"] < count:
        if order.count["F0"] < count:
            order.add("F0")
        order.add("I0 W0 F1 I1 W1")
    for _ in range(rank):
        order.add("I0 I1")
    for _ in range(ranks - rank):
        order.add("I0 W0")
    for chunk in "10":
        while order.count[f"W{chunk}"] < count:
            order.add(f"W{chunk}")
    return order.actions


def dualpipev(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Forward parts of one stage and backward parts of the other in turns, which a rank could run
    at the same time; I and W are apart at both ends."""
    return tuple(_dualpipev_order(rank, ranks, microbatches) for rank in range(ranks))


def _dualpipev_order(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    order = RankOrder((rank, 2 * ranks - 1 - rank))
    later, own = ranks - 1 - rank, rank + 1
    for _ in range(2 * later):
        order.add("F0")
    for _ in range(own):
        order.add("F0 F1")
    for _ in range(later):
        order.add("I1")
        order.add_weight()
        order.add("F1")
    for _ in range(microbatches - 2 * ranks + own):
        order.add("F0 B1 F1 B0")
    for _ in range(later):
        order.add("B1 F1 B0")
    half = own // 2
    for k in range(own):  # from the middle on, W is apart
        order.add("I1" if k > half or (k == half and rank % 2) else "B1")
        order.add("I0" if k >= half else "B0")
    for _ in range(later):
        order.add_weight()
        order.add("I0")
    for _ in range(own):
        order.add_weight()
    return tuple(order.actions)


class RankOrder:
    """The order of a rank in the making: `F1` appends the forward part of the next microbatch on
    the second of its stages."""

    def __init__(self, stages: tuple[int, int]):
        self.stages = stages
        self.actions: list[Action] = []
        self.count: Counter[str] = Counter()
        self.pending: deque[Action] = deque()
        """The weight gradients of the I that are not yet computed, by `add_weight`."""

    def add(self, names: str) -> None:
        for name in names.split():
            kind, chunk = name[0], name[1]
            counted = f"I{chunk}" if kind == "B" else name
            action = Action(self.stages[int(chunk)], kind, self.count[counted])
            self.actions.append(action)
            self.count[counted] += 1
            if kind == "I":
                self.pending.append(action._replace(kind="W"))

    def add_weight(self) -> None:
        """Append the oldest of the pending weight gradients, if there is one."""
        if self.pending:
            self.actions.append(self.pending.popleft())
