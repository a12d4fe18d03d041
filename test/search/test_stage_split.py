"""The split of ops into stages, against all splits."""

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from support.extent import LONG, extent

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import (
    PipelineCosts,
    Schedule,
    lower_bound,
    placements,
    schedule,
    search,
)
from shardir.analysis.in_flight import in_flight
from shardir.search.stages.chunk_shares import searched_split
from shardir.search.stages.stage_costs import Held, UnitCosts, costs_of_stages
from shardir.search.stages.stages import SLACK, Segments, split


def random_costs(ops: int, chance: random.Random) -> UnitCosts:
    def held() -> list[Held]:
        return [
            Held(
                chance.randint(1, 5), frozenset(chance.choices(range(ops), k=chance.randint(1, 3)))
            )
            for _ in range(ops)
        ]

    seconds = [chance.choice([0.0, 1.0, chance.random()]) for _ in range(ops)]
    extra = [chance.randint(0, 3) for _ in range(ops)]
    crossing = [0, *(chance.randint(0, 5) for _ in range(ops - 1)), 0]
    return UnitCosts(seconds, held(), held(), extra, crossing)


def need(costs: UnitCosts, cuts: Sequence[int], s: Schedule) -> float:
    """The bytes of the rank that needs most, by the definition: at each moment of its order."""
    stages = [set(range(a, b)) for a, b in pairwise(cuts)]

    def held(items: Sequence[Held], stage: int) -> int:
        return sum(n for n, readers in items if readers & stages[stage])

    found = 0.0
    for rank, order in enumerate(s.orders):
        own = [stage for stage, r in enumerate(s.placement) if r == rank]
        now = dict.fromkeys(own, 0)
        fixed = sum(held(costs.fixed, stage) for stage in own)
        extra = max(
            max(costs.extra[i] for i in stages[stage])
            + 2 * costs.crossing[cuts[stage]] + costs.crossing[cuts[stage + 1]]
            for stage in own
        )  # fmt: skip
        for a in order:
            now[a.stage] += {"F": 1, "I": 0}.get(a.kind, -1)
            saved = sum(
                k * (held(costs.saved, stage) + costs.crossing[cuts[stage + 1]])
                for stage, k in now.items()
            )
            found = max(found, fixed + saved + extra)
    return found


CASES = [
    ("1f1b", 3, 1), ("gpipe", 2, 1), ("1f1b", 1, 1), ("zb-h1", 4, 1), ("interleaved", 2, 2),
    ("zbv", 2, 2), ("v-min", 3, 2), ("looped-bfs", 2, 3),
]  # fmt: skip


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("name", "ranks", "chunks"), CASES)
def test_no_split_is_better(name: str, ranks: int, chunks: int, limited: bool) -> None:
    """Of the slowest stage, by its share of a rank's time, and then of the bytes transferred."""
    chance = random.Random(0)
    s = schedule(name, ranks, 4, chunks)
    refused = kept = 0
    for _ in range(extent(8, 12)):
        ops = chance.randint(s.stages, s.stages + 4)
        costs = random_costs(ops, chance)
        crossing = costs.crossing
        every = [(0, *inner, ops) for inner in combinations(range(1, ops), s.stages - 1)]
        needs = {c: need(costs, c, s) for c in every}
        limit = chance.choice(sorted(needs.values())[: 1 + len(every) // 2]) if limited else np.inf
        limit -= chance.choice([0, 0, 100]) if limited else 0
        shares = [chance.choice([0.5, 1.0, 1.5]) for _ in range(chunks)]
        segments = Segments.of(costs, range(ops + 1))
        found = split(segments, s.placement, in_flight(s), limit, shares)
        parts = [shares[s.placement[:i].count(r)] for i, r in enumerate(s.placement)]

        def slowest(
            cuts: Sequence[int], costs: UnitCosts = costs, parts: Sequence[float] = parts
        ) -> float:
            stages = zip(pairwise(cuts), parts, strict=True)
            return max(sum(costs.seconds[a:b]) / part for (a, b), part in stages)

        fitting = [c for c in every if needs[c] <= limit]
        if not fitting:
            refused += 1
            assert found.cuts is None
            assert found.need >= min(needs.values()) > limit
            if chunks == 1:
                assert found.need == min(needs.values())
            continue
        kept += 1
        assert found.cuts is not None
        cuts = tuple(found.cuts)
        assert cuts in every
        assert found.need == needs[cuts] or not limited
        assert needs[cuts] <= limit
        minimum = min(map(slowest, fitting))
        assert slowest(cuts) <= minimum * (1 + SLACK) + 1e-9
        close = [c for c in fitting if slowest(c) <= minimum * (1 + SLACK) - 1e-9]
        fewest = min((sum(crossing[i] for i in c[1:-1]) for c in close), default=np.inf)
        assert sum(crossing[i] for i in cuts[1:-1]) <= fewest
    assert kept
    assert refused or not limited


LAYERS = 24
ONE = Mesh("m", (("d", 1),), Cluster((Level("device", 1, 1e9, 0.0),)))
"""Transfers take no time."""


def layers() -> UnitCosts:
    """Equal layers, whose F, I and W take half a second each, and hold a byte."""
    each, half = [Held(1, frozenset([i])) for i in range(LAYERS)], [0.5] * LAYERS
    return UnitCosts([1.5] * LAYERS, [], each, [0] * LAYERS, [0] * (LAYERS + 1), half, half)


@cache
def split_of_layers(limit: float = np.inf) -> list[int]:
    found = searched_split(layers(), ONE, range(LAYERS + 1), schedule("v-min", 4, 8, 2), limit)
    assert found.cuts is not None
    return found.cuts


def test_first_stages_are_shorter_where_that_is_faster() -> None:
    """No schedule of any even split is as fast, by the lower bound."""
    costs, cuts = layers(), split_of_layers()
    assert cuts == [0, 2, 4, 6, 8, 12, 16, 20, 24]
    seconds = search(4, 8, costs_of_stages(costs, ONE, cuts)).timeline.makespan
    even = PipelineCosts.equal(4, 2, (3.0, 3.0, 3.0))
    assert seconds < min(lower_bound(p, 8, even) for p in placements(4, 2))


def test_stages_are_even_where_memory_is_small() -> None:
    """A rank has 6 layers, and memory for 8 or for 4 microbatches of each."""
    if LONG:
        assert split_of_layers(6 * 8) == split_of_layers()
    assert split_of_layers(6 * 4) == [*range(0, LAYERS + 1, 3)]
