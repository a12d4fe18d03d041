"""The split into stages for a schedule that is searched for, with several stages on each rank: also
those in which the first ones take less time than the others.

The last rank waits for the forward parts of all first stages but its own: (p - 1) F / v with p
ranks and v equal stages on each. If the first stages take half of the time of the others, v = 2, it
is (p - 1) F / 3, and a rank still has the same work. But gradients come back later, so that more
microbatches are in flight: which split is faster depends on the memory. The search decides, on each
split.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Schedule, search
from shardir.analysis.in_flight import in_flight
from shardir.diagnostics import ShardirError
from shardir.search.stages.stage_costs import UnitCosts, costs_of_stages
from shardir.search.stages.stages import Segments, StageSplit, split

FIRST = (1.0, 3 / 4, 2 / 3, 1 / 2)
"""The seconds of a first stage that are tried, as parts of those of an even one."""

BETTER = 0.995
"""An uneven split is taken for a time below this part of the even one's: it holds more."""

MAX_ACTIONS = 30_000
"""The actions of all orders that the local search for a split tries on a placement, about."""


def searched_split(
    costs: UnitCosts, mesh: Mesh, cuts: Sequence[int], schedule: Schedule, limit: float
) -> StageSplit:
    """Return the split with the fastest schedule that is found.

    Args:
        mesh: of a stage; its outermost links are those between stages.
        cuts: those between ops that are considered.
        schedule: with the fewest microbatches in flight: each split keeps to the limit with it.
        limit: the bytes of a device.
    """
    ranks, chunks = schedule.ranks, schedule.stages // schedule.ranks
    segments, counts = Segments.of(costs, cuts), in_flight(schedule)
    trials = 1 + MAX_ACTIONS // (3 * schedule.stages * schedule.microbatches)
    if chunks == 1:
        return split(segments, schedule.placement, counts, limit)
    best, fastest = None, np.inf
    for first in FIRST:
        shares = [first, *[(chunks - first) / (chunks - 1)] * (chunks - 1)]
        found = split(segments, schedule.placement, counts, limit, shares)
        if best is None or (best.cuts is None and found.cuts is not None):
            best = found
        if found.cuts is None:
            continue
        stages = list(pairwise(found.cuts))
        of = costs_of_stages(
            costs, mesh, [cuts[i] for i in found.cuts], [segments.saved[s] for s in stages]
        )
        left = _left(segments, stages, ranks, limit) if np.isfinite(limit) else None
        try:
            seconds = search(ranks, schedule.microbatches, of, left, trials).timeline.makespan
        except ShardirError:  # in no order that was tried within the memory
            continue
        if seconds < fastest * BETTER:
            fastest, best = seconds, found
    assert best is not None
    return best


def _left(
    segments: Segments, stages: Sequence[tuple[int, int]], ranks: int, limit: float
) -> Callable[[Sequence[int]], list[float]]:
    """Return the bytes that ranks have left for microbatches, for any placement of the stages."""

    def left(placement: Sequence[int]) -> list[float]:
        own = [[s for s, r in zip(stages, placement, strict=True) if r == k] for k in range(ranks)]
        return [
            limit - sum(segments.fixed[s] for s in each) - max(segments.extra[s] for s in each)
            for each in own
        ]

    return left
