"""Shortest paths between layouts over full axes by way of layouts over a part of one axis.

    <a = 2, b = 8>: [{}, {}], partial sum {a} -> [{}, {}]
    all_reduce over {a}                                       by single moves over full axes
    all_slice over {b:(1)4}, all_reduce, all_gather           a quarter of the bytes reduced

A table over all parts of all axes has too many layouts for the search, which needs all paths of
each shape. So in each of the tables here one axis is cut in two, at a divisor of its size, or axes
are cut twice where these tables are few; they are joined at the layouts over full axes, and
exchanges start or end at one of those.

The time of a path is at least the lowest latency of all paths between its ends, and their lowest
rate times the bytes. Both are found once for all shapes. By them only those layouts are followed by
way of which a path may take less than the known one: 1 to 2 ms of 38 for 620 layouts.
"""

from collections.abc import Mapping
from functools import cached_property
from itertools import combinations
from math import inf, prod
from typing import NamedTuple

import numpy as np

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.exchange_costs import Table
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.route_moves import count_of
from shardir.algebra.route_tables import PREFERENCE, RouteTable
from shardir.algebra.traffic import Flags, Indices

MAX_CUT_LAYOUTS = 50_000
"""The maximum number of layouts of all tables with cut axes, times that of the layouts over full
axes at which exchanges start or end."""

MAX_CUT_ORDERED = 600
"""The maximum number of layouts of a table with cut axes in all orders."""


class CutMoveArrays(NamedTuple):
    """Moves, by the layouts before them: the numbers of both layouts, whether it is an exchange,
    the latencies and rates of its forms, [form, move], and the table that has it."""

    before: Indices
    after: Indices
    exchanged: Flags
    latency: Table
    rate: Table
    table: Indices


class Graph(NamedTuple):
    """Edges by the nodes before them, the number of the first from each node, and that of all."""

    after: Indices
    first: Indices

    @staticmethod
    def of(before: Indices, after: Indices, nodes: int) -> "Graph":
        return Graph(after, np.searchsorted(before, np.arange(nodes + 1)))

    def reached(self, weight: Table, lengths: Table, limit: Table | None) -> tuple[Table, Indices]:
        """Return the length of the shortest path from each start to each node, and its last edge,
        -1 where it is one of the known lengths (Bellman and Ford).

        Args:
            weight: of each edge.
            lengths: those known from each start to each of the first nodes.
            limit: the length that a path from each start to each node must be below.
        """
        nodes, (starts, some) = len(self.first) - 1, lengths.shape
        found, last = np.full((starts, nodes), inf), np.full(starts * nodes, -1)
        found[:, :some] = lengths
        flat, limits = found.reshape(-1), None if limit is None else limit.reshape(-1)
        pairs = np.flatnonzero(np.isfinite(flat) if limits is None else flat < limits)
        while len(pairs):
            start, now = np.divmod(pairs, nodes)
            counts = self.first[now + 1] - self.first[now]
            begin = self.first[now] - counts.cumsum() + counts
            edges = np.arange(counts.sum()) + np.repeat(begin, counts)
            to = np.repeat(start * nodes, counts) + self.after[edges]
            length = np.repeat(flat[pairs], counts) + weight[edges]
            better = length < flat[to] * (1 - 4 * PREFERENCE)
            if limits is not None:
                better &= length < limits[to]
            to, length, edges = to[better], length[better], edges[better]
            np.minimum.at(flat, to, length)
            shortest = length == flat[to]
            to = to[shortest]
            last[to[::-1]] = edges[shortest][::-1]
            changed = np.zeros(len(flat), dtype=np.bool_)
            changed[to] = True
            pairs = np.flatnonzero(changed)
        return found, last.reshape(found.shape)


class CutPath(NamedTuple):
    """A path: the numbers of its ends, its time, and the numbers of its moves."""

    source: int
    target: int
    seconds: float
    moves: tuple[int, ...]


def with_cuts(mesh: Mesh, axes: Axes, count: int) -> list[Axes]:
    """Return the axes after so many cuts in two, at divisors of their sizes: first where units of
    levels end."""
    ends = {(a.name, a.pre) for a in mesh.level_sub_axes}
    places = [
        mesh.split(axis, k)[1]
        for axis in axes for n in [mesh.extent((axis,))] for k in range(2, n) if n % k == 0
    ]  # fmt: skip
    places.sort(key=lambda a: (a.name, a.pre) not in ends)
    found = (tuple(mesh.cut(axes, some)) for some in combinations(places, count))
    return [cut for cut in found if len(cut) == len(axes) + count]


def layouts_over(axes: int, rank: int) -> int:
    """Return the number of layouts of a table of so many axes, some of them cut."""
    ordered = count_of(axes, rank)
    return ordered if ordered <= MAX_CUT_ORDERED else (rank + 2) ** axes


def _cut_axes(mesh: Mesh, rank: int, axes: Axes, limit: int) -> list[Axes]:
    """Return the axes of the tables: with two cuts if they have at most so many layouts, all in
    each order; else with as many of one cut as may be."""
    two, each = with_cuts(mesh, axes, 2), layouts_over(len(axes) + 2, rank)
    if each <= MAX_CUT_ORDERED and 0 < len(two) * each <= limit:
        return two
    return with_cuts(mesh, axes, 1)[: limit // layouts_over(len(axes) + 1, rank)]


class CutPaths:
    """The paths between the `ends`, numbers of layouts over full axes, by way of `layouts`, of
    which the ends are the first.

    Args:
        axes: not cut yet.
        index: the numbers of layouts.
    """

    def __init__(
        self, mesh: Mesh, rank: int, reduction: str, axes: Axes, index: Mapping[Layout, int]
    ):
        self._mesh, uncut = mesh, RouteTable(mesh, rank, reduction, axes)
        among = [l for l in uncut.index if l in index]
        self.ends = np.array([index[l] for l in among], dtype=np.int64)
        self._tables = [uncut]
        for cut in _cut_axes(mesh, rank, axes, MAX_CUT_LAYOUTS // len(among)):
            table = RouteTable(mesh, rank, reduction, cut, among, MAX_CUT_ORDERED)
            if not {*table.index} <= {*index}:
                self._tables.append(table)
        self._index = {l: i for i, l in enumerate(among)}
        for table in self._tables:
            for layout in table.index:
                self._index.setdefault(layout, len(self._index))
        self.layouts = [*self._index]
        self._numbers = [np.array([self._index[l] for l in t.index]) for t in self._tables]

    @cached_property
    def moves(self) -> CutMoveArrays:
        """All moves between the layouts."""
        found, n = list[CutMoveArrays](), len(self.ends)
        for k, (table, numbers) in enumerate(zip(self._tables, self._numbers, strict=True)):
            latency, rate = table.costs
            i, j = np.nonzero(np.isfinite(latency).any(axis=0))
            if k:  # all have the moves over full axes
                some = (numbers[i] >= n) | (numbers[j] >= n)
                i, j = i[some], j[some]
            costs = latency[:, i, j], rate[:, i, j]
            ends = numbers[i], numbers[j]
            found.append(CutMoveArrays(*ends, table.exchanged[i, j], *costs, np.full(len(i), k)))
        forms = max(len(some.latency) for some in found)
        every = [
            np.concatenate([x if x.ndim == 1 else _with_forms(x, forms) for x in same], axis=-1)
            for same in zip(*found, strict=True)
        ]
        order = np.argsort(every[0], kind="stable")
        return CutMoveArrays(*(x[..., order] for x in every))

    @cached_property
    def parts(self) -> Table:
        """The part of a tensor that a device has in each layout."""
        return np.array([1 / self._mesh.extent(l.complete.used) for l in self.layouts])

    @cached_property
    def _graph(self) -> "Graph":
        return Graph.of(self.moves.before, self.moves.after, len(self.layouts))

    @cached_property
    def _bounds(self) -> tuple[Table, Table]:
        """The lowest latency and the lowest rate of all paths from each layout to each end:
        [layout, end]. A path has at least these, so together they bound its time."""
        moves, n = self.moves, len(self.ends)
        order = np.argsort(moves.after, kind="stable")
        before, after = moves.after[order], moves.before[order]
        graph, found = Graph.of(before, after, len(self.layouts)), list[Table]()
        uncut = (before < n) & (after < n)
        for costs in (moves.latency, moves.rate):
            weight, known = costs.min(axis=0)[order], np.full((n, n), inf)
            known[before[uncut], after[uncut]] = weight[uncut]
            np.fill_diagonal(known, 0.0)
            for k in range(n):
                np.minimum(known, known[:, [k]] + known[k], out=known)
            found.append(graph.reached(weight, known, None)[0].T)
        latency, rate = found
        return latency, np.where(np.isfinite(rate), rate, 0)

    def shorter(self, shape: Shape, itemsize: int, lengths: Table) -> list[CutPath]:
        """Return the paths by way of layouts with a cut axis, where they take less than other paths
        of these seconds: [from, to], of ends."""
        if len(self._tables) == 1:
            return []  # the given ones are the fastest
        n, moves, size = len(self.ends), self.moves, prod(shape) * itemsize
        even = np.zeros(len(self.layouts), dtype=np.bool_)
        for table, numbers in zip(self._tables, self._numbers, strict=True):
            even[numbers] = table.even(shape)
        seconds = (moves.latency + moves.rate * size).min(axis=0)
        # of equal paths that of fewer collectives, then that without an exchange
        more = 3 * PREFERENCE * seconds[seconds > 0].min(initial=inf)
        weight = seconds * (1 + PREFERENCE * moves.exchanged) + np.where(seconds > 0, more, 0)
        weight[~(even[moves.before] & even[moves.after])] = inf
        latency, rate = self._bounds
        known, left = np.where(np.isfinite(lengths), lengths, -inf), latency + rate * size
        limit = np.full((n, len(self.layouts)), -inf)
        for end in range(n):
            np.maximum(limit, known[:, end, None] - left[:, end], out=limit)
        limit *= 1 - 4 * PREFERENCE
        last = self._graph.reached(weight, lengths, limit)[1]
        found, paths = set[tuple[int, ...]](), list[CutPath]()
        for start, end in np.argwhere(last[:, :n] >= 0).tolist():
            path, now = list[int](), end
            while (move := int(last[start, now])) >= 0:
                path.append(move)
                now = int(moves.before[move])
                if now < n:
                    found.add(tuple(path[::-1]))
                    path.clear()
        for path in sorted(found):
            if len(path) > 1:
                ends = int(moves.before[path[0]]), int(moves.after[path[-1]])
                paths.append(CutPath(*ends, float(seconds[[*path]].sum()), path))
        return paths

    def step(self, move: int) -> CollectiveStep:
        """Return a move by its number."""
        table = self._tables[self.moves.table[move]]
        ends = (self.layouts[x[move]] for x in (self.moves.before, self.moves.after))
        return table.move(*(table.index[layout] for layout in ends))


def _with_forms(costs: Table, count: int) -> Table:
    """Return the costs of so many forms, the last ones equal: [form, move]."""
    return costs[[*range(len(costs)), *[-1] * (count - len(costs))]]
