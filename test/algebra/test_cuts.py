"""The minimum cut, by all cuts of small graphs and by scipy's maximum flow."""

import random
from itertools import combinations
from math import inf

import numpy as np
from support.extent import extent

from shardir.algebra.cuts import minimum_cut

Edges = list[tuple[int, int, float]]


def _random_edges(chance: random.Random, nodes: int, count: int) -> Edges:
    ends = [chance.sample(range(nodes), 2) for _ in range(count)]
    return [(a, b, chance.choice((0, 1, 2, 3, 5, 8))) for a, b in ends]


def _capacity(edges: Edges, side: set[int]) -> float:
    return sum(c for a, b, c in edges if a in side and b not in side)


def test_it_is_the_smallest_of_all_cuts() -> None:
    """Also with edges that no cut may contain, and of equal cuts that with the fewest nodes."""
    chance = random.Random(0)
    for _ in range(extent(150, 3000)):
        edges = _random_edges(chance, 6, chance.randint(3, 14))
        edges += [(a, b, inf) for a, b, _ in _random_edges(chance, 6, 2) if (a, b) != (0, 5)]
        cuts = [{0, *some} for n in range(5) for some in combinations(range(1, 5), n)]
        best = min(cuts, key=lambda side: (_capacity(edges, side), len(side)))
        if _capacity(edges, best) < inf:
            assert minimum_cut(edges, 0, 5) == best


def test_it_is_as_large_as_the_maximum_flow() -> None:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    chance = random.Random(1)
    for _ in range(extent(3, 60)):
        edges = _random_edges(chance, 80, 400)
        matrix = np.zeros((80, 80), dtype=np.int32)
        for a, b, capacity in edges:
            matrix[a, b] += int(capacity)
        flow = maximum_flow(csr_matrix(matrix), 0, 79).flow_value
        assert _capacity(edges, minimum_cut(edges, 0, 79)) == flow
