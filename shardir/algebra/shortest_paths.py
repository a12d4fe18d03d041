"""Shortest paths over single moves: between all layouts, or from one layout to another.

Of paths of equal time the one of fewer collectives is preferred, then one without an exchange,
which libraries implement as an irregular all-to-all.

A single-pair query first finds the layouts on any shortest path, by distances from both ends. They
are few. `all_paths` between these layouts then prefers the path that it prefers in the whole table.
"""

from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from shardir.algebra.arrays import Flags, Table

SmallIndices = np.ndarray[Any, np.dtype[np.int16]]
"""Indices of layouts in two bytes, since there is one for each path."""

Paths = tuple[Table, SmallIndices]
"""The seconds of the shortest paths, and the next layout of each: [from, to]."""

PREFERENCE = 1e-9
"""The relative time that breaks ties: a path of one regular collective may exceed an exchange by
it, and each further collective must save a few times as much. Far below the error of the model."""

MAX_ROUNDING = 1e-12
"""Bounds the relative rounding error of a path's time. Below PREFERENCE, so that rounding does not
decide between paths of equal time."""

MARGIN = 1e-6
"""Bounds the relative time by which a preferred path exceeds the shortest one: a few PREFERENCE for
each of its moves."""


def all_paths(moves: Table, exchanged: Flags) -> Paths:
    """Return the shortest paths between all layouts (Floyd and Warshall).

    Args:
        moves: the seconds of single moves, infinite where there is none: [from, to].
        exchanged: the mask of the moves that are exchanges: [from, to].
    """
    n, seconds = len(moves), moves.copy()
    np.fill_diagonal(seconds, 0.0)
    via = np.tile(np.arange(n, dtype=np.int16), (n, 1))
    weight = np.where(exchanged, seconds * (1 + PREFERENCE), seconds)
    limit, path = weight * (1 - MAX_ROUNDING), np.empty((n, n))
    for k in np.flatnonzero(np.isfinite(seconds).sum(axis=0) > 1):
        head, tail = weight[:, k], weight[k]
        np.add.outer(head * (1 + 3 * PREFERENCE), tail * (1 + 3 * PREFERENCE), out=path)
        path[head == 0] = tail  # one collective only: the head is local
        path[:, tail == 0] = head[:, None]
        better = np.flatnonzero(path < limit)
        i, j = np.divmod(better, n)
        weight.flat[better] = path.flat[better]
        limit.flat[better] = weight.flat[better] * (1 - MAX_ROUNDING)
        seconds.flat[better] = seconds[i, k] + seconds[k, j]
        via.flat[better] = via[i, k]
    return seconds, via


def path_of(via: SmallIndices, i: int, j: int) -> list[tuple[int, int]]:
    """Return the moves of the path from i to j, each as the numbers of two layouts."""
    path = [i]
    while path[-1] != j:
        path.append(int(via[path[-1], j]))
    return [*pairwise(path)]


def find_path(moves: Table, exchanged: Flags, i: int, j: int) -> list[tuple[int, int]] | None:
    """Return the moves of the path of `all_paths` from i to j; None if there is no path."""
    after, before = _distances(moves, i, j), _distances(moves.T, j, i)
    if after[j] == inf:
        return None
    near = np.flatnonzero(after + before <= after[j] * (1 + MARGIN))
    square = np.ix_(near, near)
    _, via = all_paths(moves[square], exchanged[square])
    path = path_of(via, *np.searchsorted(near, (i, j)).tolist())
    return [(int(near[k]), int(near[l])) for k, l in path]


def _distances(moves: Table, start: int, end: int) -> Table:
    """Return the distances from `start` (Bellman and Ford): exact up to MARGIN beyond the distance
    of `end`, upper bounds further away."""
    distances = moves[start].copy()
    distances[start] = 0.0
    changed = distances < inf
    while (changed := np.flatnonzero(changed & (distances <= distances[end] * (1 + MARGIN)))).size:
        before = distances.copy()
        relaxed = (distances[changed, None] + moves[changed]).min(axis=0)
        np.minimum(distances, relaxed, out=distances)
        changed = distances < before
    return distances
