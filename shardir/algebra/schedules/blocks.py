"""The orders of schedules that are made in units of time, in which F, I and W take one each: V-Half
and V-Min (Qi et al. 2024), which repeat a pattern, and ZB-H2 (Qi et al. 2023).
"""

from collections.abc import Sequence
from itertools import product

from shardir.algebra.schedules.actions import Action, Orders
from shardir.algebra.schedules.costs import PipelineCosts
from shardir.algebra.schedules.filling import Filling, split_orders
from shardir.algebra.schedules.looped import interleaved
from shardir.algebra.schedules.schedule import Schedule

PERIOD = 6
"""The time of a microbatch on a rank with two stages: F, I and W of each."""

Hops = tuple[int, int, int, int]
"""The time from a stage to the adjacent one: of F on the way to the last rank and back, of I on the
way to the last rank and back."""

Times = dict[tuple[str, int], int]
"""The times at which a rank computes F, I and W for its first and its second stage."""


def v_half(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Stages as a V, with half the microbatches in flight of 1F1B."""
    return _repeated(ranks, microbatches, (2, 1, 2, 1))


def v_min(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Stages as a V, with a third of the microbatches in flight of 1F1B: the minimum."""
    return _repeated(ranks, microbatches, (1, 1, 1, 1))


def zb_h2(ranks: int, microbatches: int, chunks: int) -> Orders:
    """As eager 1F1B, with W in what would be bubbles: no rank pauses between its first and its last
    action. Up to 2 p - 1 microbatches are in flight on each of the p ranks."""
    eager = Schedule.of(interleaved(ranks, microbatches, 1))
    return with_weights(split_orders(eager.orders), eager.placement, [2 * ranks - 1] * ranks)


def _repeated(ranks: int, microbatches: int, hops: Hops) -> Orders:
    """Return the orders in which the pattern of a microbatch starts every PERIOD units."""
    pattern = _pattern(ranks, hops)
    orders: list[list[Action]] = []
    limits: list[int] = []
    for rank in range(ranks):
        stages = (rank, 2 * ranks - 1 - rank)
        timed = sorted(
            (time + PERIOD * k, Action(stages[chunk], kind, k))
            for (kind, chunk), time in pattern[rank].items()
            for k in range(microbatches)
        )
        order = [a for _, a in timed]
        limits.append(peak(order))
        orders.append([a for a in order if a.kind != "W"])
    return with_weights(orders, (*range(ranks), *reversed(range(ranks))), limits)


def _pattern(ranks: int, hops: Hops) -> list[Times]:
    """Return on each rank the times of F, I and W of a microbatch on both stages.

    Microbatches follow each other at the PERIOD, and a rank does one thing at a time. Of the pauses
    from one way to the next for which that holds, those with the minimum in flight are taken.
    """
    found = [
        (_peak_of_pattern(times), sum(pauses), pauses, times)
        for pauses in product(range(1, PERIOD + 1), repeat=3)
        if (times := _times(ranks, hops, *pauses)) is not None
    ]
    return min(found, key=lambda each: each[:3])[-1]


def _times(ranks: int, hops: Hops, top: int, end: int, back: int) -> list[Times] | None:
    """Return the pattern with these pauses, or None if a rank would do two things at a time."""
    far = ranks - 1
    up = hops[0] * far + top + hops[1] * far
    down = up + end
    last = down + hops[2] * far + back + hops[3] * far
    found: list[Times] = []
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
        found.append(times)
    return found


def _peak_of_pattern(pattern: Sequence[Times]) -> int:
    """Return the largest number of microbatches of stages in flight on a rank, when many have
    started and not all have ended."""
    return max(
        sum(
            (now - times["F", chunk]) // PERIOD - (now - 1 - times["W", chunk]) // PERIOD
            for chunk in (0, 1)
        )
        for times in pattern for now in range(PERIOD)
    )  # fmt: skip


def peak(order: Sequence[Action]) -> int:
    """Return the largest number of microbatches of stages in flight: from F to B or W."""
    found = now = 0
    for a in order:
        now += {"F": 1, "I": 0}.get(a.kind, -1)
        found = max(found, now)
    return found


def with_weights(
    orders: Sequence[Sequence[Action]], placement: Sequence[int], limits: Sequence[int]
) -> Orders:
    """Insert W into orders of F and I: where a rank would wait, where no other microbatch may be in
    flight on it, and at the end. Each action takes a unit of time."""
    one = (1.0,) * len(placement)
    costs = PipelineCosts(one, one, one, (0.0,) * (len(placement) - 1), one)
    microbatches = sum(a.kind == "F" for o in orders for a in o) // len(placement)
    filled = Filling(placement, microbatches, costs, limits).fill(orders, [0.0] * len(orders))
    assert filled is not None, "a limit below what the orders hold"
    return filled.orders
