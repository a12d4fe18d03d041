"""The groups of activations to repeat in a step with stages, so that each rank keeps to a limit.

A rank holds what its stages keep of all microbatches that are in flight there, by the schedule; so
the memory of a set of groups is that of the step in stages (`cost/stages.py`). A rank repeats the
groups of its own stages alone, those first that take the shortest time for their bytes, and only
as many as it needs: a number for each rank, found for all ranks at once by bisection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardir.dialects.train import stage_of
from shardir.search.recompute.repetitions import Simulator

MeasureRanks = Callable[[frozenset[int]], Sequence[int]]
"""Returns the bytes that each rank needs if some groups are repeated."""


@dataclass(frozen=True)
class RankRepetitions:
    """The groups that are repeated, their seconds for a microbatch on all ranks together, and the
    bytes that each rank needs then: more than the limit if nothing was found."""

    groups: frozenset[int]
    seconds: float
    peaks: tuple[int, ...]


def choose_on_ranks(
    simulator: Simulator,
    goal: frozenset[int],
    limit: int,
    placement: Sequence[int],
    measure: MeasureRanks,
) -> RankRepetitions:
    """Return the groups that ranks repeat.

    Args:
        goal: the groups that may be repeated; if a rank is over the limit with all of them, that is
            returned.
        placement: the rank of each stage.
    """
    ways = _ways(simulator, goal, placement)

    def found(numbers: Sequence[int]) -> RankRepetitions:
        groups = frozenset(n for way, k in zip(ways, numbers, strict=True) for n in way[:k])
        seconds = sum(simulator.groups[n].seconds for n in groups)
        return RankRepetitions(groups, seconds, tuple(measure(groups)))

    def fits(r: RankRepetitions) -> bool:
        return max(r.peaks) <= limit

    nothing, most = found([0] * len(ways)), found([*map(len, ways)])
    if fits(nothing) or not fits(most):
        return nothing if fits(nothing) else most
    low = [0] * len(ways)
    high = [0 if peak <= limit else len(way) for way, peak in zip(ways, nothing.peaks, strict=True)]
    while any(h - l > 1 for l, h in zip(low, high, strict=True)):
        middle = [(l + h) // 2 if h - l > 1 else h for l, h in zip(low, high, strict=True)]
        for rank, peak in enumerate(found(middle).peaks):
            if peak <= limit:
                high[rank] = middle[rank]
            else:
                low[rank] = middle[rank]
    best = found(high)
    return best if fits(best) else most


def _ways(simulator: Simulator, goal: frozenset[int], placement: Sequence[int]) -> list[list[int]]:
    """Return the groups of each rank, those of the shortest time for their bytes first."""
    ways: list[list[int]] = [[] for _ in range(1 + max(placement))]
    for n in goal:
        stages = [s for op in simulator.groups[n].ops if (s := stage_of(op)) is not None]
        if stages:
            ways[placement[stages[0]]].append(n)

    def cost(n: int) -> float:
        g = simulator.groups[n]
        return g.seconds / max(1, sum(a.bytes for a in g.activations))

    return [sorted(way, key=lambda n: (cost(n), n)) for way in ways]
