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
from shardir.algebra.even_places import PrimePlaces, SplitPlaces
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
        places = self.places.compared(sources.splits, targets.splits)
        stays = ~self.places.of_sets[ends]
        gone = partial & ~ends
        mean, within = np.zeros(len(places.gone)), list[tuple[Table, Indices]]()
        for k, (outside, unit) in enumerate(zip(self._outside, self._units, strict=True)):
            lost, stay = outside[partial], outside[partial & ends]
            groups = np.maximum(self.mesh.size // unit // outside[new] // outside[ends], 1)
            reduced = self.elements * (lost - stay + groups - 1) / self.mesh.size
            far = self._far[k] & stays
            has = shard / self.places.primes.extents[places.gone & far]
            within.append((has, self._one_in(places, far)))
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

    def _one_in(self, places: SplitPlaces, far: Indices) -> Indices:
        """Return n for each: one in n devices has equal indices along the sub-axes of each of the
        pairs whose old one is among some."""
        primes = self.places.primes
        some = places.paired & far
        found = primes.extents[some]
        # pairs that close a cycle follow from the others
        if len(rows := np.flatnonzero(some & places.paired_of_new)):
            pairs = places.pairs[rows] & primes.numbers_of[some[rows]]
            codes, at = np.unique(pairs, return_inverse=True)
            found[rows] //= self._implied(codes)[at]
        return found

    def _implied(self, codes: Indices) -> Indices:
        """Return the product of the sizes of one pair of each cycle: of a, b; b, c; c, a."""
        primes = self.places.primes
        sizes, every = np.array(primes.sizes), np.arange(primes.count)
        # the place of the other of each pair, of none the last
        none = primes.count
        to = np.full((len(codes), none + 1), none)
        others = codes[:, None] >> primes.width * every & primes.last
        to[:, :-1] = np.where(others, others - 1, none)
        first, done = np.broadcast_to(np.arange(none + 1), to.shape), 1
        while done <= none:  # after each the first of twice as many on the way
            first = np.minimum(first, np.take_along_axis(first, to, 1))
            to, done = np.take_along_axis(to, to, 1), 2 * done
        cycles = (to[:, :-1] < none) & (first[:, :-1] == every)
        found: Indices = np.where(cycles, sizes, 1).prod(axis=1)
        return found
