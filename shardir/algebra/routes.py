"""Tables of layouts over sub-axes, of single moves between them, and of their shortest paths.

    <a = 2, b = 4>, two dimensions: a and b each split dimension 0 or 1, are partial, or do neither:
    18 layouts, for both may split a dimension in either order. The edges are the single moves.

The axes of a table are sub-axes of prime sizes if that gives few layouts: a path may split two
dimensions over one axis, or move a part of it. Otherwise axes are cut at the units of a level, so
that a collective within units and one across them can be of different kinds; and a composite size
into a power of two and odd primes: collectives over 2 and then 3 devices wait for fewer messages
than a ring over 6.

Between layouts that split the tensor evenly the planner takes these paths, which may pass through
uneven shards, and the search counts their seconds. Of a complete table (`is_complete`) the planner
takes the paths from and to uneven shards too.

A named collective splits a dimension unevenly only from being unsharded, and moves the largest
shard. Exchanges of uneven shards have no closed form, nor have some of even shards: on at most
MAX_COUNTED_DEVICES their elements are counted (counted_exchanges.py).

The latency and rate of a move are equal for all shapes with even shards, so they are found once for
a mesh and a number of dimensions (named_moves.py, exchange_costs.py).
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property, lru_cache
from math import inf, prod

import numpy as np

from shardir.algebra.arrays import Flags, Indices, Table
from shardir.algebra.bound import MAX_COUNTED_DEVICES
from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.counted_exchanges import CountedExchanges
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import exchange_costs, exchange_forms
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.named_moves import (
    NamedMove,
    NumberedMoves,
    count_of,
    named_costs,
    numbered_states,
    select_axes,
)
from shardir.algebra.retained import RetainedTables
from shardir.algebra.shortest_paths import PREFERENCE, Paths, all_paths, find_path, path_of
from shardir.algebra.traffic import sub_axes_of_primes

REPLICATED, _, PARTIAL, _ = AxisState

MAX_ORDERED_LAYOUTS = 180
"""Bounds the layouts of a table with the axes of a dimension in all orders. All paths take a time
in the cube of the layouts: three sub-axes of tensors of up to three dimensions stay within it."""

MAX_LAYOUTS = 400
"""Bounds the layouts of any table; four axes of tensors of two dimensions stay within it."""

PAIR = 5
"""The cost of one single-pair query, in relaxation rounds of Floyd-Warshall, measured. So the paths
of all pairs are found once single queries have taken as long."""


class RouteTable:
    """The layouts over some sub-axes, and the single moves between them.

    With more than MAX_ORDERED_LAYOUTS layouts the axes of a dimension are only in the mesh's order.

    Attributes:
        layouts: over `axes`, by number.
        index: the number of each layout, by its normal form.
        is_complete: the table has all layouts over sub-axes, and all moves between them.
    """

    def __init__(self, mesh: Mesh, rank: int, reduction: str, axes: Axes):
        self.mesh, self.rank, self.reduction, self.axes = mesh, rank, reduction, axes
        self._is_cut = any(a.size for a in axes)
        in_order = count_of(len(axes), rank) > MAX_ORDERED_LAYOUTS
        self._numbered = len(axes), rank, in_order
        self.layouts = [
            Layout(mesh.name, tuple([select_axes(d, axes) for d in dims]))
            .with_partial(select_axes(partial, axes), reduction)
            for dims, partial in numbered_states(*self._numbered)
        ]  # fmt: skip
        self.index = {self.normal(l): i for i, l in enumerate(self.layouts)}
        counts = mesh.size <= MAX_COUNTED_DEVICES
        self.is_complete = not in_order and counts and _is_finest(mesh, axes)

    @cached_property
    def _moves(self) -> NumberedMoves:
        """The named moves; made late, since only paths need them."""
        count, rank, in_order = self._numbered
        return NumberedMoves.of(count, rank, self.reduction, in_order)

    def normal(self, layout: Layout) -> Layout:
        """Return the normal form of a layout over the table's axes."""
        return layout.simplified(self.mesh) if self._is_cut else layout

    def even(self, shape: Shape) -> Flags:
        """Return the mask of the layouts that split a tensor of this shape evenly."""
        _, divides = self._shares(shape)
        return np.logical_and.reduce(divides[np.arange(self.rank), self._splits[1]], axis=1)

    def moves_of(self, shape: Shape, itemsize: int) -> tuple[Table, Flags]:
        """Return the seconds of each single move in its fastest form, and whether it is an
        exchange: two arrays [from, to].

        Between layouts with uneven shards a move is an exchange, or a named collective if shards
        nest. The seconds of a missing move are infinite.
        """
        even, size = self.even(shape), prod(shape) * itemsize
        latency, rate = self.costs
        seconds = np.where(even[:, None] & even, (latency + rate * size).min(axis=0), inf)
        exchanged = self.exchanged.copy()
        if not even.all():
            ends, (latency, rate) = self._uneven_costs(shape, even)
            seconds[*ends.T] = (latency + rate * size).min(axis=0)
            if self.mesh.size <= MAX_COUNTED_DEVICES:
                ends, counted = self._counted(shape, itemsize, even)
                faster = counted < seconds[*ends.T] * (1 - PREFERENCE)
                seconds[*ends[faster].T] = counted[faster]
                exchanged[*ends[faster].T] = True
        return seconds, exchanged

    def _counted(self, shape: Shape, itemsize: int, even: Flags) -> tuple[Indices, Table]:
        """Return the exchanges from or to uneven shards, whether or not a named collective does the
        same: their layouts [exchange, 2] and seconds."""
        ends, exchanges = self._all_exchanges
        uneven = np.flatnonzero(~even[ends].all(axis=1))
        return ends[uneven], exchanges.seconds(shape, itemsize, uneven)

    @cached_property
    def _all_exchanges(self) -> tuple[Indices, CountedExchanges]:
        """All exchanges, whether or not a named collective does the same, and their layouts
        [exchange, 2]."""
        splits, dims = self._splits
        ends = np.argwhere(self._exchanged)
        return ends, CountedExchanges(self.mesh, splits, *(dims[layouts] for layouts in ends.T))

    def _uneven_costs(self, shape: Shape, even: Flags) -> tuple[Indices, tuple[Table, Table]]:
        """Return the named moves from or to uneven shards: their layouts [move, 2], and their
        latencies and rates [form, move]."""
        dims, d = self._splits[1], np.arange(self.rank)
        share, divides = self._shares(shape)
        ends = self._named_ends
        before, after = (dims[i] for i in ends.T)
        even_ends = divides[d, before] & divides[d, after]
        nest = (before == after) | (before == 0) | (after == 0) | even_ends
        valid = np.flatnonzero((~even)[ends].any(axis=1) & nest.all(axis=1))
        padded = np.append(~even_ends[valid], np.zeros((len(valid), 1), np.bool_), axis=1)
        moved = self._moves.dims[valid]
        moved = np.where(np.take_along_axis(padded, moved, axis=1), moved, -1)
        codes = np.concatenate([self._moves.kinds[valid, None], moved], axis=1)
        distinct, at = np.unique(codes, axis=0, return_inverse=True)
        moves = [
            (self._distinct[kind], tuple([(*shape, 0)[d] for d in dims_moved]))
            for kind, *dims_moved in distinct.tolist()
        ]
        latency, rate = named_costs(self.mesh, moves)
        rest = self._unmoved_share(share, before, after)[valid]
        return ends[valid], (latency[:, at], rate[:, at] * rest)

    def _shares(self, shape: Shape) -> tuple[Table, Flags]:
        """Return, for each dimension and split, the share of the largest shard, and whether shards
        are even: two arrays [dimension, split]."""
        sizes = np.array([max(n, 1) for n in shape], dtype=np.int64)[:, None]
        extents = np.array([self.mesh.extent(axes) for axes in self._splits[0]])
        zero = np.array(shape, dtype=np.int64)[:, None] == 0
        return -(-sizes // extents) / sizes, zero | (sizes % extents == 0)

    def _unmoved_share(self, share: Table, before: Indices, after: Indices) -> Table:
        """Return, for each move, the share of a tensor that a device has along the axes that split
        a dimension before and after the move."""
        d = np.arange(self.rank)
        return np.maximum(share[d, before], share[d, after]).prod(axis=1)

    @property
    def _named_ends(self) -> Indices:
        """The layouts before and after each named move: [move, 2]."""
        return self._moves.ends

    def _over_axes(self, move: NamedMove) -> NamedMove:
        """Return a move over numbered axes as one over the table's axes."""
        return move._replace(axes=select_axes(move.axes, self.axes))

    @cached_property
    def _distinct(self) -> list[NamedMove]:
        return [self._over_axes(move) for move in self._moves.distinct]

    @cached_property
    def costs(self) -> tuple[Table, Table]:
        """The latencies and rates of moves between even shards: two arrays [form, from, to]."""
        splits, dims = self._splits
        share = np.tile([1 / self.mesh.extent(axes) for axes in splits], (self.rank, 1))
        before, after = (dims[i] for i in self._named_ends.T)
        named = named_costs(self.mesh, [(move, ()) for move in self._distinct])
        latencies, rates = (x[:, self._moves.kinds] for x in named)
        rates *= self._unmoved_share(share, before, after)
        n, count = len(self.index), len(latencies)
        latency, rate = np.full((count, n, n), inf), np.zeros((count, n, n))
        latency[:, *self._named_ends.T], rate[:, *self._named_ends.T] = latencies, rates
        if self._exchanges.size:
            latency[:, *self._exchanges.T], rate[:, *self._exchanges.T] = self._exchange_costs()
        return latency, rate

    def _exchange_costs(self) -> tuple[Table, Table]:
        """Return the latencies and rates of `_exchanges` between even shards."""
        splits, dims = self._splits
        source, target = (dims[ends] for ends in self._exchanges.T)
        latency, rate = exchange_costs(self.mesh, splits, splits, source, target)
        unknown = np.flatnonzero(np.isnan(rate))
        if self.mesh.size <= MAX_COUNTED_DEVICES:
            counted = CountedExchanges(self.mesh, splits, source[unknown], target[unknown])
            shape = (self.mesh.size,) * self.rank  # all layouts split it evenly
            latency[unknown], seconds = counted.costs(shape, np.arange(len(unknown)))
            rate[unknown] = seconds / prod(shape)
            return latency, rate
        for k in unknown.tolist():
            before, after = (self.layouts[i].dims for i in self._exchanges[k])
            ends = sorted(pair for pair in zip(before, after, strict=True) if any(pair))
            ((_, latency[k], rate[k]),) = exchange_forms(self.mesh, tuple(ends))
        return latency, rate

    @property
    def named(self) -> Iterator[tuple[Indices, CollectiveStep]]:
        """Groups of named moves that are equal but for their layouts: the layouts [move, 2] of a
        group, and its first move."""
        for group in self._moves.equal:
            ends = self._moves.ends[group]
            yield ends, self.move(*ends[0].tolist())

    def move(self, i: int, j: int, exchanged: bool = False) -> CollectiveStep:
        """Return the move between two layouts: a named collective if one does it and the move is
        not `exchanged`, else an exchange."""
        before, after = self.layouts[i], self.layouts[j]
        number = None if exchanged else self._moves.index.get((i, j))
        named = None if number is None else self._over_axes(self._moves.moves[number])
        if named is not None:
            kind, axes = named.record.name, named.axes
            added = named.start is REPLICATED and named.end is PARTIAL
            reduction = self.reduction if added else before.reduction
        else:
            kind, axes, reduction = "exchange", exchange_axes(before, after), "sum"
        axes = self.mesh.simplify(axes) if self._is_cut else axes
        dim, concat = (named.dim, named.concat) if named else (-1, -1)
        return CollectiveStep(kind, axes, self.normal(after), dim, concat, reduction)

    @cached_property
    def _splits(self) -> tuple[list[Axes], Indices]:
        """The distinct splits of a dimension, the unsharded one first; and the number of the split
        of each dimension of each layout: [layout, dimension]."""
        numbers: dict[Axes, int] = {(): 0}
        dims = [[numbers.setdefault(d, len(numbers)) for d in l.dims] for l in self.layouts]
        return list(numbers), np.array(dims, dtype=np.int64).reshape(len(dims), self.rank)

    @cached_property
    def _exchanged(self) -> Flags:
        """Whether two layouts have equal partial axes and differ in a dimension that the first one
        splits: [from, to]."""
        _, dims = self._splits
        numbers: dict[Axes, int] = {}
        partial = np.array([numbers.setdefault(l.partial, len(numbers)) for l in self.layouts])
        mask: Flags = partial[:, None] == partial
        mask &= ((dims[:, None] != dims) & (dims[:, None] > 0)).any(axis=-1)
        return mask

    @cached_property
    def _exchanges(self) -> Indices:
        """The layouts of each exchange that no named collective does: [exchange, 2]."""
        mask = self._exchanged.copy()
        mask[*self._named_ends.T] = False
        return np.argwhere(mask)

    @cached_property
    def exchanged(self) -> Flags:
        """The mask of the moves that are exchanges: [from, to]."""
        mask = np.zeros(self._exchanged.shape, dtype=np.bool_)
        mask[*self._exchanges.T] = True
        return mask


def _is_finest(mesh: Mesh, axes: Axes) -> bool:
    """Whether every sub-axis of the mesh is a product of these: their sizes are primes, one prime
    for each mesh axis, and none crosses the units of a level."""
    primes = sub_axes_of_primes(mesh, axes)
    sizes = {(prime.name, prime.size) for prime, _ in primes}
    levels = mesh.cut(mesh.level_sub_axes, axes)
    return (
        len(primes) == len(axes)
        and len(sizes) == len({name for name, _ in sizes})
        and mesh.clash(tuple({*axes, *levels})) is None
    )


def routes(mesh: Mesh, rank: int, reduction: str = "sum") -> "Routes | None":
    """Return the paths between layouts of tensors of `rank` dimensions; None if there would be more
    than MAX_LAYOUTS layouts, or for the reduction `any`."""
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
    """Return the mesh axes of at least two devices."""
    return tuple([a for a in mesh.names if mesh.extent((a,)) > 1])


@lru_cache(maxsize=256)
def parts(mesh: Mesh) -> Axes:
    """Return the sub-axes into which layouts are cut.

    A composite size is cut into a power of two and odd primes. A single power of two or prime is
    cut in two: at the units of a level, or near the middle.
    """
    full = full_axes(mesh)
    sub_axes = _cut_at_odd_primes(mesh, full)
    if len(sub_axes) != 1:
        return sub_axes
    n = mesh.extent(full)
    ends = [a.pre for a in mesh.level_sub_axes] or [k for k in range(2, n) if n % k == 0]
    end = min(ends, key=lambda k: max(k, n // k), default=1)
    return mesh.split(full[0], end) if end > 1 else sub_axes


def _cut_at_odd_primes(mesh: Mesh, axes: Axes) -> Axes:
    """Return the axes, each cut into a power of two and odd primes."""
    sub_axes: list[Axis] = []
    for axis in axes:
        n = mesh.extent((axis,))
        sizes, odd, k = [n & -n] if n % 2 == 0 else [], n // (n & -n), 3
        while odd > 1:
            while odd % k:
                k += 2
            sizes, odd = [*sizes, k], odd // k
        cuts = (Axis(axis.name, prod(sizes[:i]), size) for i, size in enumerate(sizes))
        sub_axes += cuts if len(sizes) > 1 else [axis]
    return tuple(sub_axes)


class Routes(RouteTable):
    """A table of layouts, with the shortest paths between them."""

    def __init__(self, mesh: Mesh, rank: int, reduction: str, axes: Axes):
        super().__init__(mesh, rank, reduction, axes)
        self._paths = RetainedTables[Paths]()
        self._queries = Counter[tuple[Shape, int]]()
        """The number of single-pair queries, by shape and itemsize."""
        self._single_moves = RetainedTables[tuple[Table, Flags]]()

    def seconds(self, shape: Shape, itemsize: int) -> Table:
        """Return the seconds of the shortest paths: [from, to]; infinite from or to uneven
        shards."""
        even = self.even(shape)
        return np.where(even[:, None] & even, self.paths(shape, itemsize)[0], inf)

    def steps(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[CollectiveStep] | None:
        """Return the steps of the shortest path.

        None if the table has no path, or if a path outside of the table may be faster: from or to
        uneven shards, unless the table is complete.
        """
        hops = self.hops(shape, itemsize, source, target)
        return None if hops is None else [self.step(shape, itemsize, *ends) for ends in hops]

    def hops(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[tuple[int, int]] | None:
        """Return the moves of the shortest path, each as the numbers of two layouts; None as in
        `steps`."""
        if source not in self.index or target not in self.index:
            return None
        even = source.even(self.mesh, shape) and target.even(self.mesh, shape)
        if not (even or self.is_complete):
            return None  # no need to find paths
        i, j, key = self.index[source], self.index[target], (shape, itemsize)
        self._queries[key] += 1
        if key in self._paths or self._queries[key] * PAIR > len(self.layouts):
            lengths, via = self.paths(shape, itemsize)
            return path_of(via, i, j) if lengths[i, j] < inf else None
        return find_path(*self._moves_of(shape, itemsize), i, j)

    def paths(self, shape: Shape, itemsize: int) -> Paths:
        """Return the seconds of all shortest paths, and the next layout of each: [from, to]."""
        key = shape, itemsize
        return self._paths.get(key, lambda: all_paths(*self._moves_of(shape, itemsize)))

    def single_move_seconds(self, shape: Shape, itemsize: int) -> Table:
        """Return the seconds of single moves: [from, to]; infinite where there is none."""
        return self._moves_of(shape, itemsize)[0]

    def _moves_of(self, shape: Shape, itemsize: int) -> tuple[Table, Flags]:
        """Return `moves_of` a shape, retained."""
        return self._single_moves.get((shape, itemsize), lambda: self.moves_of(shape, itemsize))

    def step(self, shape: Shape, itemsize: int, i: int, j: int) -> CollectiveStep:
        """Return the fastest single move of a tensor of this shape between two layouts."""
        _, exchanged = self._moves_of(shape, itemsize)
        return self.move(i, j, bool(exchanged[i, j]))
