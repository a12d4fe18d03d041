"""The split of ops into stages, against all splits."""

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from shardir.algebra.schedules import Schedule, schedule
from shardir.search.in_flight import in_flight
from shardir.search.stage_costs import Held, UnitCosts
from shardir.search.stages import SLACK, Segments, split


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
    chance = random.Random(0)
    s = schedule(name, ranks, 4, chunks)
    refused = kept = 0
    for _ in range(12):
        ops = chance.randint(s.stages, s.stages + 4)
        costs = random_costs(ops, chance)
        crossing = costs.crossing
        every = [(0, *inner, ops) for inner in combinations(range(1, ops), s.stages - 1)]
        needs = {c: need(costs, c, s) for c in every}
        limit = chance.choice(sorted(needs.values())[: 1 + len(every) // 2]) if limited else np.inf
        limit -= chance.choice([0, 0, 100]) if limited else 0
        found = split(Segments.of(costs, range(ops + 1)), s.placement, in_flight(s), limit)

        def slowest(cuts: Sequence[int], costs: UnitCosts = costs) -> float:
            return max(sum(costs.seconds[a:b]) for a, b in pairwise(cuts))

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
