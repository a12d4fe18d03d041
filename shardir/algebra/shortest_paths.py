"""Shortest paths over single moves: all of them, or that from one layout to another.

Of equal ones that of fewer collectives is preferred, then that without an exchange, which is an
irregular all-to-all in libraries.

Of one path all layouts that are on such paths are found first, from both ends: few of the many in a
table. The paths between these alone are found as all are, so that the same one is preferred.
"""

from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from shardir.algebra.arrays import Flags, Table
from shardir.algebra.route_tables import PREFERENCE

SmallIndices = np.ndarray[Any, np.dtype[np.int16]]
"""The indices of layouts, or of tables, in few bytes: there is one for each path."""

Paths = tuple[Table, SmallIndices]
"""The lengths of the shortest paths, and the first layout of each: [from, to]."""

MAX_ROUNDING = 1e-12
"""The largest relative rounding error of a path's time. Less than PREFERENCE, so that of paths of
equal time the preferred one is taken."""

MARGIN = 1e-6
"""The relative time by which a preferred path exceeds the shortest one, at most: PREFERENCE for
each of its moves, some times."""


def all_paths(each: Table, exchanged: Flags) -> Paths:
    """Return the shortest paths between all layouts (Floyd and Warshall).

    Args:
        each: the seconds of the single moves, infinite where there is none: [from, to].
        exchanged: which of them are exchanges.
    """
    n, seconds = len(each), each.copy()
    np.fill_diagonal(seconds, 0.0)
    via = np.tile(np.arange(n, dtype=np.int16), (n, 1))
    weight = np.where(exchanged, seconds * (1 + PREFERENCE), seconds)
    limit, path = weight * (1 - MAX_ROUNDING), np.empty((n, n))
    for k in np.flatnonzero(np.isfinite(seconds).sum(axis=0) > 1):
        first, then = weight[:, k], weight[k]
        np.add.outer(first * (1 + 3 * PREFERENCE), then * (1 + 3 * PREFERENCE), out=path)
        path[first == 0] = then  # one move: the other part communicates nothing
        path[:, then == 0] = first[:, None]
        better = np.flatnonzero(path < limit)
        i, j = np.divmod(better, n)
        weight.flat[better] = path.flat[better]
        limit.flat[better] = weight.flat[better] * (1 - MAX_ROUNDING)
        seconds.flat[better] = seconds[i, k] + seconds[k, j]
        via.flat[better] = via[i, k]
    return seconds, via


def path_of(via: SmallIndices, i: int, j: int) -> list[tuple[int, int]]:
    """Return the moves of a path: the layouts before and after each."""
    path = [i]
    while path[-1] != j:
        path.append(int(via[path[-1], j]))
    return [*pairwise(path)]


def path_between(each: Table, exchanged: Flags, i: int, j: int) -> list[tuple[int, int]] | None:
    """Return the moves of the path of `all_paths` from one layout to another; None if there is
    none."""
    after, before = _lengths(each, i, j), _lengths(each.T, j, i)
    if after[j] == inf:
        return None
    some = np.flatnonzero(after + before <= after[j] * (1 + MARGIN))
    among = np.ix_(some, some)
    _, via = all_paths(each[among], exchanged[among])
    moves = path_of(via, *np.searchsorted(some, (i, j)).tolist())
    return [(int(some[k]), int(some[l])) for k, l in moves]


def _lengths(each: Table, start: int, end: int) -> Table:
    """Return the lengths of the shortest paths from one layout to those that are hardly further
    than the end; to others at least these (Bellman and Ford)."""
    found = each[start].copy()
    found[start] = 0.0
    changed = found < inf
    while (changed := np.flatnonzero(changed & (found <= found[end] * (1 + MARGIN)))).size:
        before = found.copy()
        np.minimum(found, (found[changed, None] + each[changed]).min(axis=0), out=found)
        changed = found < before
    return found
