"""Shortest paths between all layouts over full axes that split a tensor of one size evenly.

    <a = 2, b = 4>, two dimensions: a and b each split dimension 0 or 1, are partial, or do neither:
    18 layouts, for both may split a dimension in either order. The edges are the single moves.

Axes are cut into sub-axes of primes where that gives few layouts: a path may split two dimensions
over one axis, or move a part of it. Where there are more, an axis that crosses the units of a level
is cut there, so that a collective within a unit and one across units can be of different kinds; and
one whose size is composite and no power of two into a power of two and odd primes: collectives over
2 and 3 devices, one after the other, wait for fewer messages than one over 6, a ring.

A path may go through uneven shards, by named collectives: a dimension is split unevenly from being
unsharded, and what moves is the largest shard. Exchanges of uneven shards have no closed form.

The forms of a move have a latency and a rate, which are equal for all shapes with even shards: they
are found once for a mesh and a number of dimensions (named_costs.py, exchange_costs.py). Between
these layouts the planner (redistribution.py) takes these paths, and the search counts their
seconds.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import combinations, permutations, product
from math import comb, inf, prod

import numpy as np

from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import Table, exchange_costs, exchange_forms
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.named_costs import NamedMove, named_costs
from shardir.algebra.traffic import Flags, Indices, sub_axes_of_primes

REPLICATED, SHARDED, PARTIAL, _ = AxisState


Solved = tuple[Table, Indices]
"""The lengths of the shortest paths, and the first layout of each: [from, to]."""

MAX_LAYOUTS, MAX_ORDERED_LAYOUTS = 400, 180
"""The maximum number of layouts in a table; and that with axes in all orders: where there would be
more, the axes of a dimension are in the mesh's order."""

PREFERENCE = 1e-9
"""The relative time that breaks ties: a path of one regular collective may exceed an exchange by
it, and a path of several collectives must be faster than one of fewer by some of it."""

MAX_ROUNDING = 1e-12
"""The largest relative rounding error of a path's time. Less than PREFERENCE, so that of paths of
equal time the preferred one is taken."""


@lru_cache(maxsize=256)
def routes(mesh: Mesh, rank: int, reduction: str = "sum") -> "Routes | None":
    """Return the paths between the layouts of tensors of `rank` dimensions; None where there are
    too many layouts."""
    if reduction == "any":
        return None
    cut = parts(mesh)
    by_level = mesh.cut(cut, mesh.level_sub_axes)
    primes = tuple([prime for prime, _ in sub_axes_of_primes(mesh, cut)])
    for axes in (mesh.cut(cut, primes), by_level):
        if _count(rank, len(axes)) <= MAX_ORDERED_LAYOUTS:
            return Routes(mesh, rank, reduction, axes)
    for axes in (cut, full_axes(mesh)):
        if (rank + 2) ** len(axes) <= MAX_LAYOUTS:
            return Routes(mesh, rank, reduction, axes)
    return None


def _count(rank: int, axes: int) -> int:
    """Return the number of layouts over some axes in all orders."""
    return sum(
        comb(axes, n) * 2 ** (axes - n) * prod(range(rank, rank + n)) for n in range(axes + 1)
    )


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


class Routes:
    """The `layouts`, spelled by their `axes`, the indices of their normal forms, and the single
    moves between them."""

    def __init__(self, mesh: Mesh, rank: int, reduction: str, axes: Axes):
        self.mesh, self.rank, self.reduction, self.axes = mesh, rank, reduction, axes
        self._is_cut = any(a.size for a in axes)
        every = [
            Layout(mesh.name, dims).with_partial(partial, reduction)
            for n in range(len(axes) + 1)
            for partial in combinations(axes, n)
            for dims in _dims(tuple(a for a in axes if a not in partial), ((),) * rank)
        ]
        self._in_order = len(every) > MAX_ORDERED_LAYOUTS
        if self._in_order:
            every = [l for l in every if all(d == tuple(a for a in axes if a in d) for d in l.dims)]
        self.layouts = every
        self.index = {self._normal(l): i for i, l in enumerate(every)}
        self._solved: dict[tuple[Shape, int], Solved] = {}
        self._each: dict[tuple[Shape, int], Table] = {}

    def _normal(self, layout: Layout) -> Layout:
        return layout.simplified(self.mesh) if self._is_cut else layout

    def seconds(self, shape: Shape, itemsize: int) -> Table:
        """Return the estimated time of each path for a tensor of this shape: [from, to]; infinite
        from or to layouts that do not split it evenly."""
        return self.paths(shape, itemsize)[0]

    def steps(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[CollectiveStep] | None:
        """Return the moves of the path from one layout to another; None where there is none."""
        if source not in self.index or target not in self.index:
            return None
        if not (source.even(self.mesh, shape) and target.even(self.mesh, shape)):
            return None  # the table need not be made
        seconds, via = self.paths(shape, itemsize)
        i, j = self.index[source], self.index[target]
        if seconds[i, j] == inf:
            return None
        found = []
        while i != j:
            k = int(via[i, j])
            found.append(self.move(i, k))
            i = k
        return found

    def paths(self, shape: Shape, itemsize: int) -> Solved:
        """Return the estimated time of all paths, and the first layout of each."""
        if (shape, itemsize) not in self._solved:
            self._solved[shape, itemsize] = self._solve(shape, itemsize)
        return self._solved[shape, itemsize]

    def _solve(self, shape: Shape, itemsize: int) -> Solved:
        """Find the shortest paths (Floyd and Warshall). Of equal ones that of fewer collectives is
        preferred, then that without an exchange, which is an irregular all-to-all in libraries."""
        n, even = len(self.layouts), self.even(shape)
        seconds: Table = self.each(shape, itemsize).copy()
        np.fill_diagonal(seconds, 0.0)
        via = np.tile(np.arange(n), (n, 1))
        weight = seconds.copy()
        weight[tuple(self._exchanges.T)] *= 1 + PREFERENCE
        for k in np.flatnonzero(np.isfinite(seconds).sum(axis=0) > 1):
            first, then = weight[:, k], weight[k]
            path = np.add.outer(first, then) * (1 + 3 * PREFERENCE)
            path[first == 0] = then  # one move: the other part communicates nothing
            path[:, then == 0] = first[:, None]
            better = np.flatnonzero(path < weight * (1 - MAX_ROUNDING))
            i, j = np.divmod(better, n)
            weight.flat[better] = path.flat[better]
            seconds.flat[better] = seconds[i, k] + seconds[k, j]
            via.flat[better] = via[i, k]
        seconds[~(even[:, None] & even)] = inf
        return seconds, via

    def even(self, shape: Shape) -> Flags:
        """Return which layouts split a tensor of this shape evenly."""
        _, divides = self._shares(shape)
        return np.logical_and.reduce(divides[np.arange(self.rank), self._splits[1]], axis=1)

    def each(self, shape: Shape, itemsize: int) -> Table:
        """Return the seconds of each single move of a tensor of this shape in its fastest form:
        between layouts that split it evenly, and by named collectives between others whose shards
        nest: [from, to]; infinite for all others."""
        if (shape, itemsize) not in self._each:
            even, size = self.even(shape), prod(shape) * itemsize
            latency, rate = self.costs
            found = np.where(even[:, None] & even, (latency + rate * size).min(axis=0), inf)
            if not even.all():
                ends, (latency, rate) = self._uneven_costs(shape, even)
                found[tuple(ends.T)] = (latency + rate * size).min(axis=0)
            self._each[shape, itemsize] = found
        return self._each[shape, itemsize]

    def _uneven_costs(self, shape: Shape, even: Flags) -> tuple[Indices, tuple[Table, Table]]:
        """Return the indices of the layouts before and after each named move from or to one that
        does not split a tensor of this shape evenly, and the latencies and rates of these moves."""
        dims, d = self._splits[1], np.arange(self.rank)
        share, divides = self._shares(shape)
        smaller = ((dims == 0) | (share[d, dims] < 1)).all(axis=1)
        ends, among = self._named_ends, smaller & ~even
        before, after = (dims[i] for i in ends.T)
        nest = (before == after) | (before == 0) | (after == 0)
        nest |= divides[d, before] & divides[d, after]
        usable = smaller[ends].all(axis=1) & among[ends].any(axis=1) & nest.all(axis=1)
        padded = ~(divides[d, before] & divides[d, after])
        some, named = np.flatnonzero(usable).tolist(), list(self._named.values())
        moves = [
            (named[k], tuple([shape[e] if e >= 0 and padded[k, e] else 0 for e in named[k][3:]]))
            for k in some
        ]
        return ends[some], named_costs(self.mesh, moves, self._rest(share, before, after)[some])

    def _shares(self, shape: Shape) -> tuple[Table, Flags]:
        """Return the share of each dimension that the largest shard has by each split, and whether
        it is split evenly: [dimension, split]."""
        sizes = np.array([max(n, 1) for n in shape], dtype=np.int64)[:, None]
        extents = np.array([self.mesh.extent(axes) for axes in self._splits[0]])
        zero = np.array(shape, dtype=np.int64)[:, None] == 0
        return -(-sizes // extents) / sizes, zero | (sizes % extents == 0)

    def _rest(self, share: Table, before: Indices, after: Indices) -> Table:
        """Return the share of a tensor that a device has by the axes that split each dimension both
        before and after a move."""
        d = np.arange(self.rank)
        return np.maximum(share[d, before], share[d, after]).prod(axis=1)

    @cached_property
    def _named_ends(self) -> Indices:
        """The indices of the layouts before and after each named move."""
        return np.array([*self._named], dtype=np.int64).reshape(-1, 2)

    @cached_property
    def costs(self) -> tuple[Table, Table]:
        """The latencies and rates of the forms of moves between layouts that split a tensor evenly:
        [form, from, to]."""
        splits, dims = self._splits
        share = np.tile([1 / self.mesh.extent(axes) for axes in splits], (self.rank, 1))
        before, after = (dims[i] for i in self._named_ends.T)
        moves = [(move, ()) for move in self._named.values()]
        named = named_costs(self.mesh, moves, self._rest(share, before, after))
        n, count = len(self.index), len(named[0])
        latency, rate = np.full((count, n, n), inf), np.zeros((count, n, n))
        latency[:, *self._named_ends.T], rate[:, *self._named_ends.T] = named
        if self._exchanges.size:
            latency[:, *self._exchanges.T], rate[:, *self._exchanges.T] = self._exchange_costs()
        return latency, rate

    def _exchange_costs(self) -> tuple[Table, Table]:
        """Return the latencies and rates of the exchanges."""
        splits, dims = self._splits
        source, target = (dims[ends] for ends in self._exchanges.T)
        latency, rate = exchange_costs(self.mesh, splits, splits, source, target)
        for k in np.flatnonzero(np.isnan(rate)).tolist():
            before, after = (self.layouts[i].dims for i in self._exchanges[k])
            ends = sorted(both for both in zip(before, after, strict=True) if any(both))
            ((_, latency[k], rate[k]),) = exchange_forms(self.mesh, tuple(ends))
        return latency, rate

    @cached_property
    def moves(self) -> dict[tuple[int, int], CollectiveStep]:
        """The move from one layout to another, where there is one: by both indices."""
        exchanges = ((int(i), int(j)) for i, j in self._exchanges)
        return {ends: self.move(*ends) for ends in (*self._named, *exchanges)}

    def move(self, i: int, j: int) -> CollectiveStep:
        """Return the move between two layouts."""
        before, after = self.layouts[i], self.layouts[j]
        if (found := self._named.get((i, j))) is not None:
            kind, axes = found.record.name, found.axes
            added = found.start is REPLICATED and found.end is PARTIAL
            reduction = self.reduction if added else before.reduction
        else:
            kind, axes, reduction = "exchange", exchange_axes(before, after), "sum"
        axes = self.mesh.simplify(axes) if self._is_cut else axes
        dim, concat = (found.dim, found.concat) if found else (-1, -1)
        return CollectiveStep(kind, axes, self._normal(after), dim, concat, reduction)

    @cached_property
    def _splits(self) -> tuple[list[Axes], Indices]:
        """The axes that split a dimension, first none; for each layout the numbers of those that
        split its dimensions: [layout, dimension]."""
        numbers: dict[Axes, int] = {(): 0}
        dims = [[numbers.setdefault(d, len(numbers)) for d in l.dims] for l in self.layouts]
        return list(numbers), np.array(dims, dtype=np.int64).reshape(len(dims), self.rank)

    @cached_property
    def _exchanges(self) -> Indices:
        """The exchanges, where no named collective does it: the indices of both layouts."""
        _, dims = self._splits
        numbers: dict[Axes, int] = {}
        partial = np.array([numbers.setdefault(l.partial, len(numbers)) for l in self.layouts])
        found = partial[:, None] == partial
        found &= ((dims[:, None] != dims) & (dims[:, None] > 0)).any(axis=-1)  # over some axes
        found[tuple(self._named_ends.T)] = False
        return np.argwhere(found)

    @cached_property
    def _named(self) -> dict[tuple[int, int], NamedMove]:
        """The moves by named collectives."""
        index = {(l.dims, l.partial): i for i, l in enumerate(self.layouts)}
        found: dict[tuple[int, int], NamedMove] = {}
        for i, layout in enumerate(self.layouts):
            for dims, partial, named in self._named_from(layout):
                j = index.get((dims, partial))
                if j is not None:
                    found.setdefault((i, j), named)
        return found

    def _named_from(self, now: Layout) -> Iterator[tuple[tuple[Axes, ...], Axes, NamedMove]]:
        """Yield the moves from a layout, each with the split and the partial axes after it."""
        dims, partial = now.dims, now.partial
        for a in self.axes:
            if a in now.used:
                continue
            for dim in range(self.rank):
                yield _added(dims, dim, (a,)), partial, NamedMove(REPLICATED, SHARDED, (a,), dim)
            yield dims, self._ordered((*partial, a)), NamedMove(REPLICATED, PARTIAL, (a,))
        unused = [a for a in self.axes if a not in now.used]
        for n, dim in product(range(2, len(unused) + 1), range(self.rank)):
            if not dims[dim]:  # perhaps into uneven shards that are not within those over fewer
                for axes in self._orders(combinations(unused, n)):
                    named = NamedMove(REPLICATED, SHARDED, axes, dim)
                    yield _added(dims, dim, axes), partial, named
        for n in range(1, len(partial) + 1):
            for axes in combinations(partial, n):
                rest = tuple([a for a in partial if a not in axes])
                yield dims, rest, NamedMove(PARTIAL, REPLICATED, axes)
                for dim in range(self.rank):
                    for order in self._orders([axes]):
                        yield (
                            _added(dims, dim, order),
                            rest,
                            NamedMove(PARTIAL, SHARDED, order, dim),
                        )
        for dim, have in enumerate(dims):
            for n in range(1, len(have) + 1):
                axes, gathered = have[-n:], (*dims[:dim], have[:-n], *dims[dim + 1 :])
                yield gathered, partial, NamedMove(SHARDED, REPLICATED, axes, dim)
                if self.reduction == "sum":
                    among = self._ordered(partial + axes)
                    yield gathered, among, NamedMove(SHARDED, PARTIAL, axes, dim)
                for other in range(self.rank):
                    if other != dim:
                        named = NamedMove(SHARDED, SHARDED, axes, other, dim)
                        yield _added(gathered, other, axes), partial, named

    def _orders(self, some: Iterable[Axes]) -> Iterator[Axes]:
        """Yield some axes in the orders in which they split a dimension."""
        for axes in some:
            yield from (axes,) if self._in_order else permutations(axes)

    def _ordered(self, axes: Axes) -> Axes:
        return tuple([a for a in self.axes if a in axes])


def _added(dims: tuple[Axes, ...], dim: int, axes: Axes) -> tuple[Axes, ...]:
    """Return the split of the dimensions, one split over these axes too."""
    return (*dims[:dim], dims[dim] + axes, *dims[dim + 1 :])


def _dims(axes: Axes, dims: tuple[Axes, ...]) -> Iterator[tuple[Axes, ...]]:
    """Yield the dimensions split over some of the axes too, in all orders."""
    if not axes:
        yield dims
        return
    yield from _dims(axes[1:], dims)
    for d, have in enumerate(dims):
        for i in range(len(have) + 1):
            split = (*have[:i], axes[0], *have[i:])
            yield from _dims(axes[1:], (*dims[:d], split, *dims[d + 1 :]))
