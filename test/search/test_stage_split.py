"""The split of ops into stages, against all splits."""

import random
from itertools import combinations, pairwise

import numpy as np

from shardir.search.stages import SLACK, best_cuts


def test_no_split_is_better() -> None:
    chance = random.Random(0)
    for _ in range(200):
        ops, stages = chance.randint(4, 9), chance.randint(1, 4)
        seconds = [chance.choice([0.0, 1.0, chance.random()]) for _ in range(ops)]
        crossing = [chance.randint(0, 5) for _ in range(ops + 1)]
        spent = np.cumsum([0.0, *seconds])

        def slowest(cuts: tuple[int, ...], spent: np.ndarray = spent) -> float:
            return max(float(spent[j] - spent[i]) for i, j in pairwise(cuts))

        every = [(0, *inner, ops) for inner in combinations(range(1, ops), stages - 1)]
        limit = min(map(slowest, every)) * (1 + SLACK)
        fewest = min(sum(crossing[i] for i in c[1:-1]) for c in every if slowest(c) <= limit)
        found = tuple(best_cuts(spent, np.array(crossing), stages))
        assert found in every
        assert slowest(found) <= limit
        assert sum(crossing[i] for i in found[1:-1]) == fewest
