"""Shortest paths between layouts over full axes that split a tensor of one size evenly.

The layouts are those of a table (route_tables.py), and the edges its single moves. Axes are cut
into sub-axes of primes where that gives few layouts: a path may split two dimensions over one axis,
or move a part of it. Where there are more, an axis that crosses the units of a level is cut there,
so that a collective within a unit and one across units can be of different kinds; and one whose
size is composite and no power of two into a power of two and odd primes: collectives over 2 and 3
devices, one after the other, wait for fewer messages than one over 6, a ring. There is a table for
each order of the primes, 2 x 3 of 6 and 3 x 2: paths are over the layouts of all of them, and go
from one table to another by exchanges, which are counted (counted_exchanges.py).

A path may go through uneven shards. Between layouts that split the tensor evenly the planner
(redistribution.py) takes these paths, and the search counts their seconds. Where sub-axes of primes
are in all orders (`is_complete`) the planner takes those from and to uneven shards too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, product
from math import inf, prod

import numpy as np

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.counted_exchanges import CountedExchanges
from shardir.algebra.cut_paths import CutPath, CutPaths
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import Table
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.retained import RetainedTables
from shardir.algebra.route_moves import count_of
from shardir.algebra.route_tables import (
    MAX_DEVICES,
    MAX_ORDERED_LAYOUTS,
    PREFERENCE,
    RouteTable,
)
from shardir.algebra.shortest_paths import Paths, SmallIndices, all_paths, path_between, path_of
from shardir.algebra.traffic import Flags, Indices, sub_axes_of_primes

Solved = tuple[Table, SmallIndices, Indices, Indices]
"""The same, with the number of a path by way of a cut axis where it is shorter than a single move,
else -1: [from, to]; and the moves of these paths, -1 after the last: [path, place]."""

MoveTables = tuple[Table, Flags, SmallIndices]
"""The lengths of single moves, whether each is an exchange, and the table that has it."""

MAX_LAYOUTS = 400
"""The maximum number of layouts in a table."""

MAX_SPELLED_LAYOUTS = 200
"""The maximum number of layouts of all tables with the primes of axes in other orders."""

MAX_CUT_RANK = 3
"""The dimensions of a tensor, at most, of which paths go by way of layouts with a cut axis."""

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
    cuts = cut if reduction == "sum" and rank <= MAX_CUT_RANK else ()
    by_level = mesh.cut(cut, mesh.level_sub_axes)
    primes = tuple([prime for prime, _ in sub_axes_of_primes(mesh, cut)])
    for axes in (mesh.cut(cut, primes), by_level):
        count = count_of(len(axes), rank)
        if count <= MAX_ORDERED_LAYOUTS:
            every = spellings(mesh, axes)
            counted = count * len(every) <= MAX_SPELLED_LAYOUTS and mesh.size <= MAX_DEVICES
            some = every if counted else every[:1]
            return Routes(mesh, rank, reduction, *some, cuts=cuts)
    for axes in (cut, full_axes(mesh)):
        if (rank + 2) ** len(axes) <= MAX_LAYOUTS:
            return Routes(mesh, rank, reduction, axes, cuts=axes if cuts else ())
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


def spellings(mesh: Mesh, axes: Axes) -> list[Axes]:
    """Return sub-axes with the sizes of those of each axis in all orders, first as they are; as
    they are alone, where some cross the units of levels."""
    each = [[*_orders(some)] for _, some in groupby(axes, key=lambda a: a.name)]
    found = [tuple([a for some in one for a in some]) for one in product(*each)]
    return found[:1] if any(_crosses_levels(mesh, one) for one in found) else found


def _orders(axes: Iterator[Axis]) -> Iterator[Axes]:
    """Yield the sub-axes of one axis with their sizes in each order."""
    some = tuple(axes)
    for sizes in _arranged([a.size for a in some]):
        pre = [some[0].pre * prod(sizes[:i]) for i in range(len(sizes))]
        yield tuple([Axis(some[0].name, p, n) for p, n in zip(pre, sizes, strict=True)])


def _arranged(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the different orders of sizes, some of which may be equal: of 16 twos there is one."""
    if not sizes:
        yield ()
    for size in dict.fromkeys(sizes):
        rest = [*sizes]
        rest.remove(size)
        yield from ((size, *others) for others in _arranged(rest))


def _crosses_levels(mesh: Mesh, axes: Axes) -> bool:
    levels = mesh.cut(mesh.level_sub_axes, axes)
    return mesh.clash(tuple({*axes, *levels})) is not None


class Routes:
    """The `layouts` of the tables of some spellings, the indices of their normal forms, and the
    single moves between them.

    Args:
        every: the axes of each table.
        cuts: if a table is not complete, paths go by way of layouts with one of these axes cut too.
    """

    def __init__(self, mesh: Mesh, rank: int, reduction: str, *every: Axes, cuts: Axes = ()):
        self.mesh, self.rank, self.axes = mesh, rank, every[0]
        self.tables = [RouteTable(mesh, rank, reduction, axes) for axes in every]
        self.layouts: list[Layout] = []
        self.index: dict[Layout, int] = {}
        for table in self.tables:
            for normal, i in table.index.items():
                if normal not in self.index:
                    self.index[normal] = len(self.layouts)
                    self.layouts.append(table.layouts[i])
        self.is_complete = all(t.is_complete for t in self.tables) and not any(
            _crosses_levels(mesh, t.axes) for t in self.tables
        )
        self._cuts = () if self.is_complete else cuts
        self._numbers = [np.array([self.index[n] for n in t.index]) for t in self.tables]
        """The index of each layout of each table."""
        self._solved = RetainedTables[Solved]()
        self._asked = Counter[tuple[Shape, int]]()
        """How often a path of a shape was asked for."""
        self._each = RetainedTables[MoveTables]()

    def seconds(self, shape: Shape, itemsize: int) -> Table:
        """Return the estimated time of each path for a tensor of this shape: [from, to]; infinite
        from or to layouts that do not split it evenly."""
        even = self.even(shape)
        return np.where(even[:, None] & even, self.paths(shape, itemsize)[0], inf)

    def steps(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[CollectiveStep] | None:
        """Return the moves of the path from one layout to another; None where there is none, or
        where others may be faster: from or to uneven shards, unless the tables are complete."""
        hops = self.hops(shape, itemsize, source, target)
        if hops is None:
            return None
        return [step for ends in hops for step in self.steps_of(shape, itemsize, *ends)]

    def hops(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[tuple[int, int]] | None:
        """Return the path from one layout to another by the numbers of each two layouts that
        `steps_of` connects; None as `steps` does."""
        if source not in self.index or target not in self.index:
            return None
        even = source.even(self.mesh, shape) and target.even(self.mesh, shape)
        if not (even or self.is_complete):
            return None  # the paths need not be found
        i, j, key = self.index[source], self.index[target], (shape, itemsize)
        self._asked[key] += 1
        if self._cuts or key in self._solved or self._asked[key] * PAIR > len(self.layouts):
            lengths, via = self.paths(shape, itemsize)
            return path_of(via, i, j) if lengths[i, j] < inf else None
        return path_between(*self._moves_of(shape, itemsize)[:2], i, j)

    def paths(self, shape: Shape, itemsize: int) -> Paths:
        """Return the estimated time of all paths, and the first layout of each of this object."""
        return self._solution(shape, itemsize)[:2]

    def _solution(self, shape: Shape, itemsize: int) -> Solved:
        return self._solved.get((shape, itemsize), lambda: self._solve(shape, itemsize))

    def cut_paths(self, shape: Shape, itemsize: int) -> tuple[Indices, Indices]:
        """Return the layouts from the first of which a path leads to the second by way of layouts
        that are not of this object, in less time than a single move: [path, end]; and its moves,
        which are those of `cut`, -1 after the last: [path, place]."""
        *_, numbers, moves = self._solution(shape, itemsize)
        ends = np.argwhere(numbers >= 0)
        return ends, moves[numbers[*ends.T]]

    def steps_of(self, shape: Shape, itemsize: int, i: int, j: int) -> list[CollectiveStep]:
        """Return the moves from a layout to the next one on a path: one, or those of a path by way
        of a cut axis."""
        if not self._cuts:
            return [self.step(shape, itemsize, i, j)]
        *_, numbers, moves = self._solution(shape, itemsize)
        if (number := int(numbers[i, j])) < 0:
            return [self.step(shape, itemsize, i, j)]
        return [self.cut.step(k) for k in moves[number].tolist() if k >= 0]

    @cached_property
    def cut(self) -> CutPaths:
        """The paths by way of layouts with a cut axis."""
        return CutPaths(self.mesh, self.rank, self.tables[0].reduction, self._cuts, self.index)

    def _solve(self, shape: Shape, itemsize: int) -> Solved:
        seconds, via = all_paths(*self._moves_of(shape, itemsize)[:2])
        return seconds, via, *self._with_cuts(shape, itemsize, seconds, via)

    def _with_cuts(
        self, shape: Shape, itemsize: int, seconds: Table, via: SmallIndices
    ) -> tuple[Indices, Indices]:
        """Insert the shorter paths by way of a cut axis; return the number of each, and its moves.
        With all paths before it, an inserted edge shortens those that go over it once."""
        numbers, ends = np.full(via.shape, -1), np.array([], dtype=np.int64)
        found = list[CutPath]()
        if self._cuts:
            ends = self.cut.ends
            found = self.cut.shorter(shape, itemsize, seconds[np.ix_(ends, ends)])
        for number, path in enumerate(found):
            i, j = (int(ends[end]) for end in path[:2])
            length = np.add.outer(seconds[:, i] + path.seconds, seconds[j])
            before, after = np.nonzero(length < seconds * (1 - 4 * PREFERENCE))
            if len(before):
                numbers[i, j] = number
                seconds[before, after] = length[before, after]
                via[before, after] = np.where(before == i, j, via[before, i])
        width = max([len(path.moves) for path in found], default=0)
        rows = [[*path.moves, *[-1] * (width - len(path.moves))] for path in found]
        return numbers, np.array(rows, dtype=np.int64).reshape(len(found), width)

    def even(self, shape: Shape) -> Flags:
        """Return which layouts split a tensor of this shape evenly."""
        found = np.zeros(len(self.layouts), dtype=np.bool_)
        for table, numbers in zip(self.tables, self._numbers, strict=True):
            found[numbers] = table.even(shape)
        return found

    def each(self, shape: Shape, itemsize: int) -> Table:
        """Return the seconds of each single move, as those of the tables."""
        return self._moves_of(shape, itemsize)[0]

    def _moves_of(self, shape: Shape, itemsize: int) -> MoveTables:
        """Return the seconds of each single move, whether it is an exchange, and the number of the
        table that has it, if it is not from one to another."""
        return self._each.get((shape, itemsize), lambda: self._made(shape, itemsize))

    def _made(self, shape: Shape, itemsize: int) -> MoveTables:
        n = len(self.layouts)
        seconds, exchanged = np.full((n, n), inf), np.zeros((n, n), dtype=np.bool_)
        by = np.zeros((n, n), dtype=np.int16)
        for k, (table, numbers) in enumerate(zip(self.tables, self._numbers, strict=True)):
            ends = np.ix_(numbers, numbers)
            each, is_exchange = table.moves_of(shape, itemsize)
            better = each < seconds[ends] * (1 - PREFERENCE)
            seconds[ends] = np.where(better, each, seconds[ends])
            exchanged[ends] = np.where(better, is_exchange, exchanged[ends])
            by[ends] = np.where(better, k, by[ends])
        if len(self._crossing):
            every = np.arange(len(self._crossing))
            seconds[*self._crossing.T] = self._counted.seconds(shape, itemsize, every)
            exchanged[*self._crossing.T] = True
        return seconds, exchanged, by

    @cached_property
    def costs(self) -> tuple[Table, Table]:
        """The latencies and rates of the forms of moves between layouts that split a tensor evenly:
        [form, from, to]."""
        each, n = [table.costs for table in self.tables], len(self.layouts)
        count = max(len(latency) for latency, _ in each)
        found = np.full((2, count, n, n), inf)
        found[1] = 0.0
        for costs, numbers in zip(each[::-1], self._numbers[::-1], strict=True):
            ends = np.ix_(np.arange(count), numbers, numbers)
            latency, rate = (x[[*range(len(x)), *[-1] * (count - len(x))]] for x in costs)
            some = np.isfinite(latency)
            found[0][ends] = np.where(some, latency, found[0][ends])
            found[1][ends] = np.where(some, rate, found[1][ends])
        return found[0], found[1]

    @property
    def named(self) -> Iterator[tuple[Indices, CollectiveStep]]:
        """The moves by named collectives that are equal but for their layouts: the indices of the
        layouts before and after each, and one of them."""
        for table, numbers in zip(self.tables, self._numbers, strict=True):
            yield from ((numbers[ends], step) for ends, step in table.named)

    def step(self, shape: Shape, itemsize: int, i: int, j: int) -> CollectiveStep:
        """Return the fastest move of a tensor of this shape between two layouts."""
        _, exchanged, by = self._moves_of(shape, itemsize)
        k = int(by[i, j])
        if i in self._places[k] and j in self._places[k]:
            ends = self._places[k][i], self._places[k][j]
            return self.tables[k].move(*ends, bool(exchanged[i, j]))
        before, after = (self.layouts[end].simplified(self.mesh) for end in (i, j))
        return CollectiveStep("exchange", exchange_axes(before, after), after)

    @cached_property
    def _places(self) -> list[dict[int, int]]:
        """The place in each table of the layouts that are in it."""
        return [{int(i): k for k, i in enumerate(numbers)} for numbers in self._numbers]

    @cached_property
    def _crossing(self) -> Indices:
        """The indices of the layouts before and after each exchange from one table to another."""
        n = len(self.layouts)
        found = np.ones((n, n), dtype=np.bool_)
        for numbers in self._numbers:
            found[np.ix_(numbers, numbers)] = False
        every = list(self.index)
        some = [
            (i, j) for i, j in np.argwhere(found).tolist()
            if every[i].partial == every[j].partial and exchange_axes(every[i], every[j])
        ]  # fmt: skip
        return np.array(some, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def _counted(self) -> CountedExchanges:
        """The exchanges from one table to another."""
        numbers: dict[Axes, int] = {(): 0}
        dims = np.array(
            [[numbers.setdefault(axes, len(numbers)) for axes in l.dims] for l in self.layouts]
        )
        source, target = (dims[ends] for ends in self._crossing.T)
        return CountedExchanges(self.mesh, [*numbers], source, target)
