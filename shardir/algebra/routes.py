"""Shortest paths between layouts over full axes that split a tensor of one size evenly.

The layouts are those of a table (route_tables.py), and the edges its single moves. Axes are cut
into sub-axes of primes where that gives few layouts: a path may split two dimensions over one axis,
or move a part of it. Where there are more, an axis that crosses the units of a level is cut there,
so that a collective within a unit and one across units can be of different kinds; and one whose
size is composite and no power of two into a power of two and odd primes: collectives over 2 and 3
devices, one after the other, wait for fewer messages than one over 6, a ring.

A path may go through uneven shards. Between layouts that split the tensor evenly the planner
(redistribution.py) takes these paths, and the search counts their seconds. Where the table has all
layouts over sub-axes (`is_complete`) the planner takes those from and to uneven shards too.
"""

from collections import Counter
from functools import lru_cache
from math import inf, prod

import numpy as np

from shardir.algebra.arrays import Flags, Table
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.retained import RetainedTables
from shardir.algebra.route_moves import count_of
from shardir.algebra.route_tables import (
    MAX_ORDERED_LAYOUTS,
    RouteTable,
)
from shardir.algebra.shortest_paths import Paths, all_paths, path_between, path_of
from shardir.algebra.traffic import sub_axes_of_primes

MAX_LAYOUTS = 400
"""The maximum number of layouts in a table."""

PAIR = 5
"""The layouts by way of which all paths are shortened in the time in which the path of one pair is
found. So the paths of all pairs are found once those asked for one by one took as long."""


def routes(mesh: Mesh, rank: int, reduction: str = "sum") -> "Routes | None":
    """Return the paths between the layouts of tensors of `rank` dimensions; None where there are
    too many layouts. Meshes whose devices differ in their memory alone have the same."""
    return _routes(mesh.without_memory, rank, reduction)


@lru_cache(maxsize=256)
def _routes(mesh: Mesh, rank: int, reduction: str) -> "Routes | None":
    if reduction == "any":
        return None
    cut = parts(mesh)
    primes = tuple([prime for prime, _ in sub_axes_of_primes(mesh, cut)])
    for axes in (mesh.cut(cut, primes), mesh.cut(cut, mesh.level_sub_axes)):
        if count_of(len(axes), rank) <= MAX_ORDERED_LAYOUTS:
            return Routes(mesh, rank, reduction, axes)
    for axes in (cut, full_axes(mesh)):
        if (rank + 2) ** len(axes) <= MAX_LAYOUTS:
            return Routes(mesh, rank, reduction, axes)
    return None


def full_axes(mesh: Mesh) -> Axes:
    """Return the axes of a mesh that have several devices."""
    return tuple([a for a in mesh.names if mesh.extent((a,)) > 1])


@lru_cache(maxsize=256)
def parts(mesh: Mesh) -> Axes:
    """Return the axes, those of a composite size cut into a power of two and odd primes; an only
    one in two: where the units of a level end, or near the middle."""
    full = full_axes(mesh)
    found = _in_primes(mesh, full)
    if len(found) != 1:
        return found
    n = mesh.extent(full)
    ends = [a.pre for a in mesh.level_sub_axes] or [k for k in range(2, n) if n % k == 0]
    end = min(ends, key=lambda k: max(k, n // k), default=1)
    return mesh.split(full[0], end) if end > 1 else found


def _in_primes(mesh: Mesh, axes: Axes) -> Axes:
    found: list[Axis] = []
    for axis in axes:
        n = mesh.extent((axis,))
        sizes, odd, k = [n & -n] if n % 2 == 0 else [], n // (n & -n), 3
        while odd > 1:
            while odd % k:
                k += 2
            sizes, odd = [*sizes, k], odd // k
        cuts = (Axis(axis.name, prod(sizes[:i]), size) for i, size in enumerate(sizes))
        found += cuts if len(sizes) > 1 else [axis]
    return tuple(found)


class Routes(RouteTable):
    """A table of layouts, with the shortest paths between them."""

    def __init__(self, mesh: Mesh, rank: int, reduction: str, axes: Axes):
        super().__init__(mesh, rank, reduction, axes)
        self._paths = RetainedTables[Paths]()
        self._asked = Counter[tuple[Shape, int]]()
        """How often a path of a shape was asked for."""
        self._each = RetainedTables[tuple[Table, Flags]]()

    def seconds(self, shape: Shape, itemsize: int) -> Table:
        """Return the estimated time of each path for a tensor of this shape: [from, to]; infinite
        from or to layouts that do not split it evenly."""
        even = self.even(shape)
        return np.where(even[:, None] & even, self.paths(shape, itemsize)[0], inf)

    def steps(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[CollectiveStep] | None:
        """Return the moves of the path from one layout to another; None where there is none, or
        where others may be faster: from or to uneven shards, unless the table is complete."""
        hops = self.hops(shape, itemsize, source, target)
        return None if hops is None else [self.step(shape, itemsize, *ends) for ends in hops]

    def hops(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[tuple[int, int]] | None:
        """Return the moves of the path from one layout to another, by the numbers of the layouts
        before and after each; None as `steps` does."""
        if source not in self.index or target not in self.index:
            return None
        even = source.even(self.mesh, shape) and target.even(self.mesh, shape)
        if not (even or self.is_complete):
            return None  # the paths need not be found
        i, j, key = self.index[source], self.index[target], (shape, itemsize)
        self._asked[key] += 1
        if key in self._paths or self._asked[key] * PAIR > len(self.layouts):
            lengths, via = self.paths(shape, itemsize)
            return path_of(via, i, j) if lengths[i, j] < inf else None
        return path_between(*self._moves_of(shape, itemsize), i, j)

    def paths(self, shape: Shape, itemsize: int) -> Paths:
        """Return the estimated time of all paths, and the first layout of each."""
        key = shape, itemsize
        return self._paths.get(key, lambda: all_paths(*self._moves_of(shape, itemsize)))

    def each(self, shape: Shape, itemsize: int) -> Table:
        """Return the seconds of each single move, as those of the table."""
        return self._moves_of(shape, itemsize)[0]

    def _moves_of(self, shape: Shape, itemsize: int) -> tuple[Table, Flags]:
        """Return the seconds of each single move, and whether it is an exchange."""
        return self._each.get((shape, itemsize), lambda: self.moves_of(shape, itemsize))

    def step(self, shape: Shape, itemsize: int, i: int, j: int) -> CollectiveStep:
        """Return the fastest move of a tensor of this shape between two layouts."""
        _, exchanged = self._moves_of(shape, itemsize)
        return self.move(i, j, bool(exchanged[i, j]))
