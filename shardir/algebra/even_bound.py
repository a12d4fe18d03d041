"""The bound of the time of redistributions of even shards, for many of them at once.

    [{a, b}, {}] -> [{b}, {a}]      dimension 0: of what a device needs, it has all or nothing,
                                    by whether its indices along a and b are equal
                                    dimension 1: it has all that it needs

The numbers are those of `seconds_bound` (bound.py): the places of the old and the new splits are
compared (even_places.py), and the rest are products over sets of axes.
"""

from math import prod

import numpy as np

from shardir.algebra.bound import minimum_factors, minimum_latency, outward, seconds_bound
from shardir.algebra.even_codes import Layouts, Spelling, union
from shardir.algebra.even_places import PrimePlaces, SplitPlaces, several
from shardir.algebra.exchange_costs import Table
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.traffic import Indices


class EvenBound:
    """The bounds of a tensor that the mesh's size divides in each dimension, between layouts over
    the sub-axes of `spelling`; all reductions are of one kind."""

    def __init__(
        self, mesh: Mesh, shape: Shape, itemsize: int, spelling: Spelling, places: PrimePlaces
    ):
        self.mesh, self.shape, self.itemsize = mesh, shape, itemsize
        self.spelling, self.places = spelling, places
        self.elements, self.factors = prod(shape), minimum_factors(mesh)
        levels, seconds = outward(mesh)
        self._byte_seconds = [itemsize * each for each in seconds]
        units = mesh.cluster_or_default.units
        self._units = [units[level] if level >= 0 else 1 for level in levels]
        self._extents = spelling.extents
        self._outside = [
            spelling.over_levels(lambda level, near=near: level > near) for near in levels
        ]
        """For each level the units that differ along the axes of each set."""
        self._far = [
            sum(1 << i for i, level in enumerate(places.primes.levels) if level > near)
            for near in levels
        ]
        self._latencies = spelling.over_sets(
            0.0, lambda x, i: x + minimum_latency(mesh, spelling.axes[i])
        )

    def seconds(self, sources: Layouts, targets: Layouts) -> Table:
        """Return a lower bound of the time of any plan from each layout to the one of the same
        number, or to the only one: [layout]."""
        partial, ends = sources.partial, targets.partial
        new = union(self.spelling.masks(targets.splits))
        shard = self.elements // self._extents[new]
        places = self.places.compared(*(several(self.shape, x.splits) for x in (sources, targets)))
        cycles, stays = self._cycles(places), ~self.places.of_sets[ends]
        gone = partial & ~ends
        mean, within = np.zeros(len(places.gone)), list[tuple[Table, Indices]]()
        for k, (outside, unit) in enumerate(zip(self._outside, self._units, strict=True)):
            lost, stay = outside[partial], outside[partial & ends]
            groups = np.maximum(self.mesh.size // unit // outside[new] // outside[ends], 1)
            reduced = self.elements * (lost - stay + groups - 1) / self.mesh.size
            far = self._far[k] & stays
            has = shard / self.places.primes.extents[places.gone & far]
            within.append((has, self._one_in(places.paired & far, cycles)))
            equal = unit * outside[ends] // (self._extents[new] // outside[new])
            moved = (shard - has / within[k][1]) / equal
            mean += np.where(lost > stay, reduced, moved) * self._byte_seconds[k]
        has, one_in = within[0]  # on a device itself
        lacking = shard - np.where((gone == 0) & (one_in == 1), np.rint(has), 0)
        one = np.ceil(lacking / self._extents[ends]) * self._byte_seconds[0]
        factors = self.factors
        mean *= np.where((partial | ends) == 0, factors.complete, factors.received)
        latency = self._latency(sources, targets, gone, new)
        result: Table = np.maximum(mean, factors.received * one) + latency
        for i in np.flatnonzero(~places.known).tolist():
            source, target = (self.spelling.layout(x[i % len(x)]) for x in (sources, targets))
            result[i] = seconds_bound(self.mesh, self.shape, source, target, self.itemsize)
        return result

    def _latency(self, sources: Layouts, targets: Layouts, gone: Indices, new: Indices) -> Table:
        """Return the latencies of the partial axes that must be reduced (`gone`), and of the
        sub-axes that split dimensions and must be in collectives."""
        factors, sums = self.factors, self._latencies
        rest = self.spelling.after_common(sources.splits, targets.splits)
        ended = min(factors.reduced, factors.scattered + factors.ended)
        return (
            sums[gone & new] * min(factors.reduced, factors.scattered)
            + sums[gone & ~new] * ended
            + sums[rest & new] * factors.moved
            + sums[rest & ~new & ~targets.partial] * factors.ended
        )

    def _cycles(self, places: SplitPlaces) -> tuple[Indices, Indices]:
        """Return the numbers of the layouts with pairs that close a cycle, a, b; b, c; c, a: the
        last follows from the others. And the sets of the sub-axes of each cycle, by its first:
        [layout, sub-axis]."""
        rows = np.flatnonzero(places.paired & places.paired_of_new)
        codes, at = np.unique(places.pairs[rows], return_inverse=True)
        cycles = self._cycles_of(codes)
        some = cycles.sum(axis=1)[at] > 0
        return rows[some], cycles[at[some]]

    def _cycles_of(self, codes: Indices) -> Indices:
        """Return the same of pairs as numbers: [pairs, sub-axis]."""
        primes = self.places.primes
        every, none = np.arange(primes.count), primes.count
        # the place of the other of each pair, of none the last
        to = np.full((len(codes), none + 1), none)
        others = codes[:, None] >> primes.width * every & primes.last
        to[:, :-1] = np.where(others, others - 1, none)
        first, done = np.broadcast_to(np.arange(none + 1), to.shape), 1
        while done <= none:  # after each the first of twice as many on the way
            first = np.minimum(first, np.take_along_axis(first, to, 1))
            to, done = np.take_along_axis(to, to, 1), 2 * done
        found = np.zeros((len(codes), none), dtype=np.int64)
        for i in every.tolist():
            rows = np.flatnonzero(to[:, i] < none)
            found[rows, first[rows, i]] |= 1 << i
        return found

    def _one_in(self, paired: Indices, cycles: tuple[Indices, Indices]) -> Indices:
        """Return n for each: one in n devices has equal indices along the sub-axes of each pair."""
        primes = self.places.primes
        found, (rows, sets) = primes.extents[paired], cycles
        if len(rows):
            implied = (sets > 0) & (sets & ~paired[rows][:, None] == 0)
            found[rows] //= np.where(implied, primes.sizes, 1).prod(axis=1)
        return found
