"""The layouts over some sub-axes, and the times of the single moves between them.

    <a = 2, b = 4>, two dimensions: a and b each split dimension 0 or 1, are partial, or do neither:
    18 layouts, for both may split a dimension in either order. The edges are the single moves.

By named collectives a dimension is split unevenly from being unsharded, and what moves is the
largest shard. Exchanges of uneven shards have no closed form, nor have some of even ones: they are
counted on each device (counted_exchanges.py), of at most MAX_DEVICES.

The forms of a move have a latency and a rate, which are equal for all shapes with even shards: they
are found once for a mesh and a number of dimensions (named_costs.py, exchange_costs.py).
"""

from collections.abc import Iterator
from functools import cached_property
from math import inf, prod

import numpy as np

from shardir.algebra.arrays import Flags, Indices, Table
from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.counted_exchanges import CountedExchanges
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import exchange_costs, exchange_forms
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.named_costs import NamedMove, named_costs
from shardir.algebra.route_moves import NumberedMoves, count_of, numbered_states, spelled
from shardir.algebra.traffic import sub_axes_of_primes

REPLICATED, _, PARTIAL, _ = AxisState

MAX_ORDERED_LAYOUTS = 180
"""The maximum number of layouts in a table with axes in all orders, for all paths between them."""

PREFERENCE = 1e-9
"""The relative time that breaks ties: a path of one regular collective may exceed an exchange by
it, and a path of several collectives must be faster than one of fewer by some of it."""

MAX_DEVICES = 64
"""The maximum number of devices on which exchanges are counted."""


class RouteTable:
    """The `layouts` over some sub-axes, spelled by these, the indices of their normal forms, and
    the single moves between them. Where there would be more than MAX_ORDERED_LAYOUTS, the axes of
    a dimension are in the mesh's order."""

    def __init__(self, mesh: Mesh, rank: int, reduction: str, axes: Axes):
        self.mesh, self.rank, self.reduction, self.axes = mesh, rank, reduction, axes
        self._is_cut = any(a.size for a in axes)
        in_order = count_of(len(axes), rank) > MAX_ORDERED_LAYOUTS
        self._numbered = len(axes), rank, in_order
        self.layouts = [
            Layout(mesh.name, tuple([spelled(d, axes) for d in dims]))
            .with_partial(spelled(partial, axes), reduction)
            for dims, partial in numbered_states(*self._numbered)
        ]  # fmt: skip
        self.index = {self.normal(l): i for i, l in enumerate(self.layouts)}
        self.is_complete = not in_order and mesh.size <= MAX_DEVICES and _is_finest(mesh, axes)
        """Whether it has all layouts over sub-axes, and all moves between them."""

    @cached_property
    def _moves(self) -> NumberedMoves:
        """The named moves, which paths alone need: most layouts over sub-axes are in no table."""
        count, rank, in_order = self._numbered
        return NumberedMoves.of(count, rank, self.reduction, in_order)

    def normal(self, layout: Layout) -> Layout:
        return layout.simplified(self.mesh) if self._is_cut else layout

    def even(self, shape: Shape) -> Flags:
        """Return which layouts split a tensor of this shape evenly."""
        _, divides = self._shares(shape)
        return np.logical_and.reduce(divides[np.arange(self.rank), self._splits[1]], axis=1)

    def moves_of(self, shape: Shape, itemsize: int) -> tuple[Table, Flags]:
        """Return the seconds of each single move of a tensor of this shape in its fastest form, and
        whether it is an exchange: between layouts that split it evenly; and between others by
        exchanges, and by named collectives where shards nest: [from, to]; infinite for others."""
        even, size = self.even(shape), prod(shape) * itemsize
        latency, rate = self.costs
        seconds = np.where(even[:, None] & even, (latency + rate * size).min(axis=0), inf)
        exchanged = self.exchanged.copy()
        if not even.all():
            ends, (latency, rate) = self._uneven_costs(shape, even)
            seconds[*ends.T] = (latency + rate * size).min(axis=0)
            if self.mesh.size <= MAX_DEVICES:
                ends, counted = self._counted(shape, itemsize, even)
                faster = counted < seconds[*ends.T] * (1 - PREFERENCE)
                seconds[*ends[faster].T] = counted[faster]
                exchanged[*ends[faster].T] = True
        return seconds, exchanged

    def _counted(self, shape: Shape, itemsize: int, even: Flags) -> tuple[Indices, Table]:
        """Return the indices of the layouts before and after each exchange from or to uneven
        shards, also where a named collective does the same, and its seconds."""
        ends, exchanges = self._every_exchange
        some = np.flatnonzero(~even[ends].all(axis=1))
        return ends[some], exchanges.seconds(shape, itemsize, some)

    @cached_property
    def _every_exchange(self) -> tuple[Indices, CountedExchanges]:
        """The indices of the layouts before and after each exchange, also where a named collective
        does the same; and these exchanges."""
        splits, dims = self._splits
        ends = np.argwhere(self._exchanged)
        return ends, CountedExchanges(self.mesh, splits, *(dims[some] for some in ends.T))

    def _uneven_costs(self, shape: Shape, even: Flags) -> tuple[Indices, tuple[Table, Table]]:
        """Return the indices of the layouts before and after each named move from or to one that
        does not split a tensor of this shape evenly, and the latencies and rates of these moves."""
        dims, d = self._splits[1], np.arange(self.rank)
        share, divides = self._shares(shape)
        ends = self._named_ends
        before, after = (dims[i] for i in ends.T)
        even_ends = divides[d, before] & divides[d, after]
        nest = (before == after) | (before == 0) | (after == 0) | even_ends
        some = np.flatnonzero((~even)[ends].any(axis=1) & nest.all(axis=1))
        padded = np.append(~even_ends[some], np.zeros((len(some), 1), np.bool_), axis=1)
        moved = self._moves.dims[some]
        moved = np.where(np.take_along_axis(padded, moved, axis=1), moved, -1)
        codes = np.concatenate([self._moves.kinds[some, None], moved], axis=1)
        distinct, at = np.unique(codes, axis=0, return_inverse=True)
        moves = [
            (self._distinct[kind], tuple([(*shape, 0)[e] for e in of]))
            for kind, *of in distinct.tolist()
        ]
        latency, rate = named_costs(self.mesh, moves)
        return ends[some], (latency[:, at], rate[:, at] * self._rest(share, before, after)[some])

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

    @property
    def _named_ends(self) -> Indices:
        """The indices of the layouts before and after each named move."""
        return self._moves.ends

    def _spelled(self, move: NamedMove) -> NamedMove:
        return move._replace(axes=spelled(move.axes, self.axes))

    @cached_property
    def _distinct(self) -> list[NamedMove]:
        return [self._spelled(move) for move in self._moves.distinct]

    @cached_property
    def costs(self) -> tuple[Table, Table]:
        """The latencies and rates of the forms of moves between layouts that split a tensor evenly:
        [form, from, to]."""
        splits, dims = self._splits
        share = np.tile([1 / self.mesh.extent(axes) for axes in splits], (self.rank, 1))
        before, after = (dims[i] for i in self._named_ends.T)
        named = named_costs(self.mesh, [(move, ()) for move in self._distinct])
        latencies, rates = (x[:, self._moves.kinds] for x in named)
        rates *= self._rest(share, before, after)
        n, count = len(self.index), len(latencies)
        latency, rate = np.full((count, n, n), inf), np.zeros((count, n, n))
        latency[:, *self._named_ends.T], rate[:, *self._named_ends.T] = latencies, rates
        if self._exchanges.size:
            latency[:, *self._exchanges.T], rate[:, *self._exchanges.T] = self._exchange_costs()
        return latency, rate

    def _exchange_costs(self) -> tuple[Table, Table]:
        """Return the latencies and rates of the exchanges."""
        splits, dims = self._splits
        source, target = (dims[ends] for ends in self._exchanges.T)
        latency, rate = exchange_costs(self.mesh, splits, splits, source, target)
        unknown = np.flatnonzero(np.isnan(rate))
        if self.mesh.size <= MAX_DEVICES:
            counted = CountedExchanges(self.mesh, splits, source[unknown], target[unknown])
            shape = (self.mesh.size,) * self.rank  # all layouts split it evenly
            latency[unknown], seconds = counted.costs(shape, np.arange(len(unknown)))
            rate[unknown] = seconds / prod(shape)
            return latency, rate
        for k in unknown.tolist():
            before, after = (self.layouts[i].dims for i in self._exchanges[k])
            ends = sorted(both for both in zip(before, after, strict=True) if any(both))
            ((_, latency[k], rate[k]),) = exchange_forms(self.mesh, tuple(ends))
        return latency, rate

    @property
    def named(self) -> Iterator[tuple[Indices, CollectiveStep]]:
        """The named moves that are equal but for their layouts: the indices of the layouts before
        and after each, and one of them."""
        for same in self._moves.equal:
            ends = self._moves.ends[same]
            yield ends, self.move(*ends[0].tolist())

    def move(self, i: int, j: int, exchanged: bool = False) -> CollectiveStep:
        """Return the move between two layouts: by a named collective if there is one that does it,
        and it is not an exchange (`exchanged`)."""
        before, after = self.layouts[i], self.layouts[j]
        number = None if exchanged else self._moves.index.get((i, j))
        found = None if number is None else self._spelled(self._moves.moves[number])
        if found is not None:
            kind, axes = found.record.name, found.axes
            added = found.start is REPLICATED and found.end is PARTIAL
            reduction = self.reduction if added else before.reduction
        else:
            kind, axes, reduction = "exchange", exchange_axes(before, after), "sum"
        axes = self.mesh.simplify(axes) if self._is_cut else axes
        dim, concat = (found.dim, found.concat) if found else (-1, -1)
        return CollectiveStep(kind, axes, self.normal(after), dim, concat, reduction)

    @cached_property
    def _splits(self) -> tuple[list[Axes], Indices]:
        """The axes that split a dimension, first none; for each layout the numbers of those that
        split its dimensions: [layout, dimension]."""
        numbers: dict[Axes, int] = {(): 0}
        dims = [[numbers.setdefault(d, len(numbers)) for d in l.dims] for l in self.layouts]
        return list(numbers), np.array(dims, dtype=np.int64).reshape(len(dims), self.rank)

    @cached_property
    def _exchanged(self) -> Flags:
        """For each two layouts, whether a dimension that the first splits changes: [from, to]."""
        _, dims = self._splits
        numbers: dict[Axes, int] = {}
        partial = np.array([numbers.setdefault(l.partial, len(numbers)) for l in self.layouts])
        found: Flags = partial[:, None] == partial
        found &= ((dims[:, None] != dims) & (dims[:, None] > 0)).any(axis=-1)
        return found

    @cached_property
    def _exchanges(self) -> Indices:
        """The exchanges, where no named collective does it: the indices of both layouts."""
        found = self._exchanged.copy()
        found[*self._named_ends.T] = False
        return np.argwhere(found)

    @cached_property
    def exchanged(self) -> Flags:
        """The moves that are exchanges: [from, to]."""
        found = np.zeros(self._exchanged.shape, dtype=np.bool_)
        found[*self._exchanges.T] = True
        return found


def _is_finest(mesh: Mesh, axes: Axes) -> bool:
    """Whether each sub-axis of the mesh is one of these, or several: they are of primes, those of
    an axis of one prime, and none crosses the units of a level."""
    primes = sub_axes_of_primes(mesh, axes)
    sizes = {(prime.name, prime.size) for prime, _ in primes}
    levels = mesh.cut(mesh.level_sub_axes, axes)
    return (
        len(primes) == len(axes)
        and len(sizes) == len({name for name, _ in sizes})
        and mesh.clash(tuple({*axes, *levels})) is None
    )
