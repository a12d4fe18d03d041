"""Shortest paths over single moves: that of one pair of layouts is the one of the table of all."""

from heapq import heappop, heappush
from math import inf
from random import Random

import numpy as np
import pytest
from support.algebra.random_routes import random_cluster

from shardir.algebra.mesh import Mesh
from shardir.algebra.routes import Routes, routes
from shardir.algebra.shortest_paths import Paths, all_paths, find_path, path_of


def shortest(each: np.ndarray, start: int) -> list[float]:
    """The lengths of all paths from one node (Dijkstra)."""
    found, queue = [inf] * len(each), [(0.0, start)]
    while queue:
        length, now = heappop(queue)
        if length < found[now]:
            found[now] = length
            for after, seconds in enumerate(each[now].tolist()):
                if length + seconds < found[after]:
                    heappush(queue, (length + seconds, after))
    return found


def same_as_all(each: np.ndarray, exchanged: np.ndarray, paths: Paths, i: int, j: int) -> bool:
    """Whether the path of a pair is that of the table of all; True if there is one."""
    lengths, via = paths
    expected = None if lengths[i, j] == inf else path_of(via, i, j)
    assert find_path(each, exchanged, i, j) == expected
    return expected is not None


@pytest.mark.parametrize("zeros", [0, 1])
def test_a_path_of_any_moves_is_the_shortest_and_that_of_the_table(zeros: int) -> None:
    """Of moves that take few different times, so that many paths take the same."""
    random, n, found = Random(zeros), 9, 0
    for _ in range(12):
        times = [inf] * random.choice((3, 12)) + [0.0] * 2 * zeros + [1.0, 1.0, 2.0, 3.0]
        each = np.array([[random.choice(times) for _ in range(n)] for _ in range(n)])
        np.fill_diagonal(each, inf)
        exchanged = np.array([[random.random() < 0.3 for _ in range(n)] for _ in range(n)])
        paths = all_paths(each, exchanged)
        for i in range(n):
            lengths = shortest(each, i)
            assert paths[0][i].tolist() == lengths
            found += sum(same_as_all(each, exchanged, paths, i, j) for j in range(n))
    assert found > 300


CASES = [((2, 2, 2), (3, 4, 5)), ((4, 3), (6, 9)), ((6,), (7, 12)), ((2, 4), (0, 5)), ((8,), (64,))]


@pytest.mark.parametrize(("sizes", "shape"), CASES, ids=str)
def test_a_path_over_layouts_is_that_of_the_table(
    sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """On random clusters, perhaps without latencies."""
    mesh, random = Mesh("m", tuple(zip("abc", sizes, strict=False))), Random(f"{sizes} {shape}")
    mesh = Mesh("m", mesh.axes, random_cluster(mesh.size, random))
    known = routes(mesh, len(shape))
    assert known is not None
    each, exchanged = known._moves_of(shape, 4)
    paths = all_paths(each, exchanged)
    for _ in range(40):
        i, j = (random.randrange(len(each)) for _ in range(2))
        same_as_all(each, exchanged, paths, i, j)


def test_the_table_is_made_once_many_paths_are_asked_for() -> None:
    """Before and after the moves of a path are the same."""
    mesh, shape = Mesh("m", (("a", 2), ("b", 2), ("c", 2))), (3, 5)
    one, all_ = (Routes(mesh, 2, "sum", mesh.names) for _ in range(2))
    all_.paths(shape, 4)
    ends = list(one.index)[::2]
    for source, target in zip(ends, reversed(ends), strict=True):
        assert one.hops(shape, 4, source, target) == all_.hops(shape, 4, source, target)
    assert (shape, 4) in one._paths
