"""The named schedules: the function that makes the orders of each, and its record.

    looped      stage s on rank s modulo the ranks
    V-shaped    stages s and 2 p - 1 - s on rank s of p: the last stage on the rank of the first
    patterns    made in units of time, of which F, I and W take one each: V-Half, V-Min, ZB-H2

A function returns the orders of `ranks` ranks with `chunks` stages each: those of
torch.distributed.pipelining, if it has the schedule.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from shardir.algebra.schedules.costs import PipelineCosts
from shardir.algebra.schedules.filling import Filling, split_orders
from shardir.algebra.schedules.schedule import Action, Orders, Schedule, peak
from shardir.diagnostics import ShardirError, did_you_mean, one_of


def breadth_first(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Each rank runs all microbatches through a stage before its next stage (Lamy-Poirier 2022),
    the last microbatch first in the backward part."""
    m = range(microbatches)
    return tuple(
        (
            *(Action(s, "F", k) for s in stages for k in m),
            *(Action(s, "B", k) for s in reversed(stages) for k in reversed(m)),
        )
        for stages in (range(rank, ranks * chunks, ranks) for rank in range(ranks))
    )


def gpipe(ranks: int, microbatches: int, chunks: int) -> Orders:
    """All forward parts, then all backward parts (Huang et al. 2018)."""
    return tuple(
        tuple(Action(rank, kind, k) for kind in "FB" for k in range(microbatches))
        for rank in range(ranks)
    )


def one_forward_one_backward(ranks: int, microbatches: int, chunks: int) -> Orders:
    """A rank at distance d from the last rank begins with d forward parts, and then alternates
    forward and backward parts (PipeDream-Flush, Narayanan et al. 2020)."""
    return _alternate(ranks, microbatches, chunks, ahead=1, split=False)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Orders:
    """1F1B in rounds of microbatches through all chunks, with 2 d forward parts at the begin
    (Narayanan et al. 2021). With one chunk it is the eager 1F1B of Zhuang et al. (2022)."""
    return _alternate(ranks, microbatches, chunks, ahead=2, split=False)


def zero_bubble(ranks: int, microbatches: int, chunks: int) -> Orders:
    """1F1B with W of rank r delayed by r microbatches, into the bubble (Qi et al. 2023). With one
    chunk it is ZB-H1."""
    return _alternate(ranks, microbatches, chunks, ahead=1, split=True)


def per_round(ranks: int, microbatches: int) -> tuple[int, int]:
    """Return the microbatches of a round of an interleaved schedule, and the rest: the schedule
    exists if the rest is 0."""
    return divmod(microbatches, max(1, microbatches // ranks))


def _alternate(ranks: int, microbatches: int, chunks: int, ahead: int, split: bool) -> Orders:
    """Return orders that alternate F and B; F, I and W if `split`.

    Args:
        ahead: forward parts at the begin, for each rank between a rank and the last one.
    """
    in_round = per_round(ranks, microbatches)[0]
    count = microbatches * chunks

    def nth(k: int, kind: str, rank: int) -> Action:
        """Return the k-th action of a kind on a rank."""
        chunk = k // in_round % chunks
        if kind != "F":
            chunk = chunks - 1 - chunk
        turn = k // (in_round * chunks) * in_round + k % in_round
        return Action(chunk * ranks + rank, kind, turn)

    def order(rank: int) -> tuple[Action, ...]:
        first = min(count, (chunks - 1) * in_round + ahead * (ranks - 1 - rank))
        delay = min(rank, count)
        actions = [nth(k, "F", rank) for k in range(first)]
        for k in range(count):
            if first + k < count:
                actions.append(nth(first + k, "F", rank))
            actions.append(nth(k, "I" if split else "B", rank))
            if split and k >= delay:
                actions.append(nth(k - delay, "W", rank))
        if split:
            actions += [nth(k, "W", rank) for k in range(count - delay, count)]
        return tuple(actions)

    return tuple(map(order, range(ranks)))


def zbv(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Two stages on each rank, with alternating I and W (Qi et al. 2023). If F, I and W take
    equally long, the steady state has no bubble."""
    count = max(2 * ranks - 1, microbatches)  # the pattern's minimum; the surplus is dropped below
    orders = (_zbv_order(rank, ranks, count) for rank in range(ranks))
    return tuple(tuple(a for a in o if (a.microbatch or 0) < microbatches) for o in orders)


def _zbv_order(rank: int, ranks: int, count: int) -> list[Action]:
    """Return the order of a rank of ZBV."""
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
    """Forward parts of one stage alternate with backward parts of the other, which a rank could run
    at the same time (DeepSeek 2024); I and W are separate at both ends."""
    return tuple(_dualpipev_order(rank, ranks, microbatches) for rank in range(ranks))


def _dualpipev_order(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Return the order of a rank of DualPipeV."""
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
    for k in range(own):  # I and W are separate from the middle on
        order.add("I1" if k > half or (k == half and rank % 2) else "B1")
        order.add("I0" if k >= half else "B0")
    for _ in range(later):
        order.add_weight()
        order.add("I0")
    for _ in range(own):
        order.add_weight()
    return tuple(order.actions)


class RankOrder:
    """A builder of the order of a rank with two stages."""

    def __init__(self, stages: tuple[int, int]):
        self.stages = stages
        self.actions: list[Action] = []
        self.count: Counter[str] = Counter()
        self.pending: deque[Action] = deque()
        """The W of the I so far, which `add_weight` appends."""

    def add(self, names: str) -> None:
        """Append actions: `F1` is the forward part of the next microbatch on the second stage."""
        for name in names.split():
            kind, chunk = name[0], name[1]
            counted = f"I{chunk}" if kind == "B" else name
            action = Action(self.stages[int(chunk)], kind, self.count[counted])
            self.actions.append(action)
            self.count[counted] += 1
            if kind == "I":
                self.pending.append(action._replace(kind="W"))

    def add_weight(self) -> None:
        """Append the oldest pending W, if there is one."""
        if self.pending:
            self.actions.append(self.pending.popleft())


PERIOD = 6
"""The units of a microbatch on a rank with two stages: F, I and W of each."""

Hops = tuple[int, int, int, int]
"""The units between adjacent stages: of F to the last rank and back, of I to the last rank and
back."""

Times = dict[tuple[str, int], int]
"""The units at which a rank computes F, I and W of its first and its second stage."""


def v_half(ranks: int, microbatches: int, chunks: int) -> Orders:
    """A V with half the microbatches in flight of 1F1B (Qi et al. 2024)."""
    return _repeat_pattern(ranks, microbatches, (2, 1, 2, 1))


def v_min(ranks: int, microbatches: int, chunks: int) -> Orders:
    """A V with a third of the microbatches in flight of 1F1B: the minimum (Qi et al. 2024)."""
    return _repeat_pattern(ranks, microbatches, (1, 1, 1, 1))


def zb_h2(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Eager 1F1B with W in the bubbles (Qi et al. 2023): no rank pauses between its first and its
    last action. Up to 2 p - 1 microbatches are in flight on each of the p ranks."""
    eager = Schedule.of(interleaved(ranks, microbatches, 1))
    return insert_weights(split_orders(eager.orders), eager.placement, [2 * ranks - 1] * ranks)


def _repeat_pattern(ranks: int, microbatches: int, hops: Hops) -> Orders:
    """Return the orders in which the pattern of a microbatch starts every PERIOD units."""
    pattern = _best_pattern(ranks, hops)
    orders: list[list[Action]] = []
    limits: list[float] = []
    for rank in range(ranks):
        stages = (rank, 2 * ranks - 1 - rank)
        timed = sorted(
            (time + PERIOD * k, Action(stages[chunk], kind, k))
            for (kind, chunk), time in pattern[rank].items()
            for k in range(microbatches)
        )
        order = [a for _, a in timed]
        limits.append(peak(order, [1.0] * (2 * ranks)))
        orders.append([a for a in order if a.kind != "W"])
    return insert_weights(orders, (*range(ranks), *reversed(range(ranks))), limits)


def _best_pattern(ranks: int, hops: Hops) -> list[Times]:
    """Return, for each rank, the times of a microbatch, with the fewest microbatches in flight.

    Microbatches start at intervals of PERIOD, and a rank runs one action at a time. The pauses
    between the four ways of a microbatch through the ranks are chosen by enumeration.
    """
    patterns = [
        (_pattern_peak(times), sum(pauses), pauses, times)
        for pauses in product(range(1, PERIOD + 1), repeat=3)
        if (times := _pattern(ranks, hops, *pauses)) is not None
    ]
    return min(patterns, key=lambda pattern: pattern[:3])[-1]


def _pattern(ranks: int, hops: Hops, top: int, end: int, back: int) -> list[Times] | None:
    """Return the pattern with these pauses; None if a rank would run two actions at a time."""
    far = ranks - 1
    up = hops[0] * far + top + hops[1] * far
    down = up + end
    last = down + hops[2] * far + back + hops[3] * far
    pattern: list[Times] = []
    for r in range(ranks):
        times = {
            ("F", 0): hops[0] * r,
            ("F", 1): up - hops[1] * r,
            ("I", 1): down + hops[2] * r,
            ("I", 0): last - hops[3] * r,
        }
        taken = {t % PERIOD for t in times.values()}
        if len(taken) < len(times):
            return None
        for chunk in (1, 0):
            after = times["I", chunk] + 1
            time = next(t for t in range(after, after + PERIOD) if t % PERIOD not in taken)
            times["W", chunk] = time
            taken.add(time % PERIOD)
        pattern.append(times)
    return pattern


def _pattern_peak(pattern: Sequence[Times]) -> int:
    """Return the maximum number of microbatches of stages in flight on a rank, in steady state."""
    return max(
        sum(
            (now - times["F", chunk]) // PERIOD - (now - 1 - times["W", chunk]) // PERIOD
            for chunk in (0, 1)
        )
        for times in pattern for now in range(PERIOD)
    )  # fmt: skip


def insert_weights(
    orders: Sequence[Sequence[Action]], placement: Sequence[int], limits: Sequence[float]
) -> Orders:
    """Insert W into orders of F and I: where a rank would wait, where it holds as many microbatches
    as its limit, and at the end. Each action takes a unit."""
    one = (1.0,) * len(placement)
    costs = PipelineCosts(one, one, one, (0.0,) * (len(placement) - 1), one)
    microbatches = sum(a.kind == "F" for o in orders for a in o) // len(placement)
    filled = Filling(placement, microbatches, costs, limits).fill(orders, [0.0] * len(orders))
    assert filled is not None, "a limit below what the orders hold"
    return filled.orders


@dataclass(frozen=True)
class NamedSchedule:
    """The record of a named schedule.

    Attributes:
        title: for lists.
        orders: (ranks, microbatches, chunks) -> orders.
        chunks: the number of stages on each rank; None for any.
        in_rounds: microbatches are in rounds of equal size (`per_round`).
        fills: there are at least as many microbatches as stages.
    """

    title: str
    orders: Callable[[int, int, int], Orders]
    chunks: int | None = 1
    in_rounds: bool = False
    fills: bool = False


NAMES = {
    "gpipe": NamedSchedule("all forward parts, then all backward parts", gpipe),
    "1f1b": NamedSchedule("forward and backward parts in turns", one_forward_one_backward),
    "eager-1f1b": NamedSchedule("1F1B with twice the forward parts before the turns", interleaved),
    "interleaved": NamedSchedule(
        "1F1B with several stages on each rank, in rounds", interleaved, None, in_rounds=True
    ),
    "looped-bfs": NamedSchedule("GPipe with several stages on each rank", breadth_first, None),
    "zb-h1": NamedSchedule("1F1B with the gradients of weights delayed", zero_bubble),
    "zb-h2": NamedSchedule("no pause on any rank, with twice the memory of 1F1B", zb_h2),
    "interleaved-zb": NamedSchedule(
        "interleaved, with the gradients of weights delayed", zero_bubble, None, in_rounds=True
    ),
    "zbv": NamedSchedule("stages as a V, with the gradients of weights apart", zbv, 2),
    "v-half": NamedSchedule("stages as a V, with half the memory of 1F1B", v_half, 2),
    "v-min": NamedSchedule("stages as a V, with a third of the memory of 1F1B", v_min, 2),
    "dualpipev": NamedSchedule(
        "stages as a V, forward and backward parts in turns", dualpipev, 2, fills=True
    ),
}
"""The named schedules, by name."""


def schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a named schedule of a pipeline with `chunks` stages on each of the ranks.

    Raises:
        ShardirError: no schedule has this name, or the schedule does not exist with these numbers.
    """
    named = NAMES.get(name)
    if named is None:
        hint = did_you_mean(name, NAMES)
        raise ShardirError(f"expected the name of a schedule: {one_of(NAMES)}, got {name!r}{hint}")
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ShardirError(f"{name}: expected {what} = 1 or more, got {number}; use 1 or more")
    if named.chunks is not None and chunks != named.chunks:
        raise ShardirError(
            f"{name}: expected chunks = {named.chunks}, the number of stages on each rank, got "
            f"{chunks}; use {named.chunks}"
        )
    size, rest = per_round(ranks, microbatches)
    if named.in_rounds and rest:
        raise ShardirError(
            f"{name}: expected microbatches in {microbatches // ranks} rounds of equal size on "
            f"{ranks} ranks, got {microbatches}; use {microbatches - rest} or "
            f"{(size + 1) * (microbatches // ranks)}"
        )
    if named.fills and microbatches < ranks * chunks:
        raise ShardirError(
            f"{name}: expected at least {ranks * chunks} microbatches, as many as stages, got "
            f"{microbatches}; use {ranks * chunks} or more"
        )
    return Schedule.of(named.orders(ranks, microbatches, chunks))
