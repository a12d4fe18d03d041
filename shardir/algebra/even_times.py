"""Times of moves between layouts, for many of them at once: arrays of the numbers that the records
give one by one (`step_seconds`). Of exchanges of uneven shards they are estimates by the largest
shards, but for those that are counted.

    {c} gathered from [{a}, {b, c}]      the forms of {c} alone, by the share of a device
    an exchange                          by the places of the old and the new splits
"""

from functools import cached_property, reduce
from math import prod
from typing import Any

import numpy as np

from shardir.algebra.collectives import AxisState, CollectiveStep, between
from shardir.algebra.even_codes import Layouts, Spelling, union
from shardir.algebra.even_places import PrimePlaces, several
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import Table
from shardir.algebra.forms import copying, rounds
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.named_costs import NamedMove, named_transfer
from shardir.algebra.steps import step_seconds, with_transfer
from shardir.algebra.traffic import Flags, Indices

REPLICATED, SHARDED, PARTIAL, _ = AxisState

KINDS = (
    (REPLICATED, SHARDED), (REPLICATED, PARTIAL), (SHARDED, PARTIAL), (SHARDED, REPLICATED),
    (SHARDED, SHARDED), (PARTIAL, REPLICATED), (PARTIAL, SHARDED),
)  # fmt: skip
"""The changes of the states of some axes, by number; the number after these is an exchange."""

LOCAL, EXCHANGE = 3, len(KINDS)
"""The number of kinds, the first ones, without communication; and that of an exchange."""


class EvenTimes:
    """The times of moves of a tensor that the mesh's size divides in each dimension; all layouts
    are over the sub-axes of `spelling`."""

    def __init__(
        self, mesh: Mesh, shape: Shape, itemsize: int, spelling: Spelling, places: PrimePlaces
    ):
        self.mesh, self.spelling, self.places = mesh, spelling, places
        self.shape, self.itemsize, self.size = shape, itemsize, prod(shape) * itemsize
        base, levels = mesh.size + 1, range(len(mesh.cluster_or_default.levels))
        spans = sum(spelling.over_levels(lambda level, k=k: level == k) * base**k for k in levels)
        extents, sizes = spelling.extents, np.array(shape, dtype=np.int64)[:, None]
        self._shares = -(-sizes // extents) / sizes
        """The share of each dimension that the largest shard has, by the axes that split it."""
        self._divides = sizes % extents == 0
        self._sizes = sorted({0, *shape})
        self._span_numbers = np.unique(spans, return_inverse=True)[1]
        """A number for each set of axes: equal where groups have as many devices of each level."""
        self._of_span, self._of_extent = self._examples(self._span_numbers), self._examples(extents)
        self.counted: dict[tuple[int, int], float] = {}
        """The times of exchanges of uneven shards that are counted, by the keys of both layouts."""
        count = len(KINDS) * 16 * len(self._sizes) ** 2
        self._numbers = np.full(count * (int(self._span_numbers.max()) + 1), -1)
        """The number of the forms of each named collective, -1 where it was not asked for: by the
        span of its axes, its kind, its dimensions and their sizes if they are uneven."""
        self._forms = list[list[tuple[float, float]]]()
        self._costs = np.zeros((2, 1, 0))
        cluster, primes = self.mesh.cluster_or_default, self.places.primes
        self._byte_seconds = [1 / level.bandwidth for level in cluster.levels]
        self._factor, self._copying = cluster.times["exchange"], copying(1, self.mesh)
        self._call = cluster.call
        self._byte_factor = cluster.byte_times["exchange"]
        latencies = np.array([level.latency for level in cluster.levels])
        messages = np.array([rounds(n) for n in spelling.extents.tolist()])
        self._rounds = messages * latencies[spelling.reach]
        """The latency of an exchange over each set of axes."""
        self._far = [
            sum(1 << i for i, level in enumerate(primes.levels) if level > near)
            for near in range(-1, len(cluster.levels))
        ]

    def _examples(self, keys: Indices) -> list[Axes]:
        """Return for each set of axes those of the first set of an equal key, in their order."""
        _, first, at = np.unique(keys, return_index=True, return_inverse=True)
        examples = [self.spelling.of_bits(mask) for mask in first.tolist()]
        return [examples[i] for i in at.tolist()]

    def seconds(
        self, before: Layouts, after: Layouts, kinds: Indices, axes: Indices, dims: Indices
    ) -> Table:
        """Return the time of each move in its fastest form.

        Args:
            kinds: the numbers of KINDS, or EXCHANGE.
            axes: the codes of the axes whose state changes; of an exchange 0.
            dims: the dimension that is sliced, scattered or gathered, and the one that an
                all-to-all concatenates, or -1: [move, 2].
        """
        found = np.zeros(len(kinds))
        named = np.flatnonzero((kinds >= LOCAL) & (kinds < EXCHANGE))
        if len(named):
            found[named] = self._named(
                before[named], after[named], kinds[named], axes[named], dims[named]
            )
        exchanged = np.flatnonzero(kinds == EXCHANGE)
        if len(exchanged):
            found[exchanged] = self.exchanges(before[exchanged], after[exchanged])
        return found

    def _named(
        self, before: Layouts, after: Layouts, kinds: Indices, axes: Indices, dims: Indices
    ) -> Table:
        spelling, sets = self.spelling, self.spelling.masks(axes)
        # only the first dimension, by axes in the mesh's order, costs less to pack
        in_order = axes == spelling.of_sets(sets)
        first = np.where((dims == 0) & ~in_order[:, None], 1, dims.clip(max=1))
        first[:, 1] = np.where((first == 1).all(axis=1), 2, first[:, 1])
        keys = ((self._span_numbers[sets] * EXCHANGE + kinds) * 4 + first[:, 0] + 1) * 4
        keys += first[:, 1] + 1
        have, want = (spelling.masks(x.splits) for x in (before, after))
        padded = self._padded(have, want, dims)
        keys = (keys * len(self._sizes) + padded[:, 0]) * len(self._sizes) + padded[:, 1]
        if len(new := np.flatnonzero(self._numbers[keys] < 0)):
            distinct, at = np.unique(keys[new], return_index=True)
            self._numbers[distinct] = len(self._forms) + np.arange(len(distinct))
            for i in new[at].tolist():
                sizes = tuple([self._sizes[k] for k in padded[i].tolist()])
                self._forms.append(
                    self._forms_of(int(kinds[i]), int(sets[i]), first[i].tolist(), sizes)
                )
            count = max(map(len, self._forms))
            every = [each + each[-1:] * (count - len(each)) for each in self._forms]
            self._costs = np.array(every).transpose(2, 1, 0)
        share = np.maximum(self.share(have), self.share(want)).prod(axis=1)
        latency, rate = self._costs[..., self._numbers[keys]]
        found: Table = (latency + rate * (self.size * share)).min(axis=0)
        return found

    def share(self, masks: Indices) -> Table:
        """Return the share of each dimension that the largest shard has: [layout, dimension]."""
        found: Table = self._shares[np.arange(masks.shape[1]), masks]
        return found

    def _padded(self, have: Indices, want: Indices, dims: Indices) -> Indices:
        """Return the numbers of the sizes of the dimensions of moves that are not split evenly,
        before or after; of others, and of dimension -1, 0: [move, 2]."""
        each = np.arange(have.shape[1])
        even = self._divides[each, have] & self._divides[each, want]
        numbers = np.array([self._sizes.index(n) for n in self.shape], dtype=np.int64)
        uneven = np.pad(np.where(even, 0, numbers), ((0, 0), (0, 1)))
        found: Indices = np.take_along_axis(uneven, dims, 1)
        return found

    def _forms_of(
        self, kind: int, axes: int, dims: list[int], sizes: Shape
    ) -> list[tuple[float, float]]:
        """Return the latency and the rate of each form of a named collective over a set of axes,
        for a tensor that no other axes split, as `named_forms` does."""
        start, end = KINDS[kind]
        equal = self._of_span[axes]
        forms = between(start, end).forms_on(self.mesh, equal)
        if start is not end:  # no all-to-all
            equal = self._of_extent[axes]
        named = NamedMove(start, end, equal, *dims)
        transfer = named_transfer(self.mesh, named, sizes if any(sizes) else ())
        return [(f.latency, f.rate) for f in with_transfer(forms, transfer)]

    def exchanges(self, before: Layouts, after: Layouts) -> Table:
        """Return the times of exchanges (exchange_costs.py)."""
        found, known, _ = self._exchanges(before, after)
        for i in np.flatnonzero(~known).tolist():
            now, then = (self.spelling.layout(x[i]) for x in (before, after))
            step = CollectiveStep("exchange", exchange_axes(now, then), then)
            found[i] = step_seconds(self.mesh, self.shape, now, step, self.itemsize)
        return found

    def meetings(self, before: Layouts, after: Layouts) -> Table:
        """Return the times of exchanges, or slices, between the ends of paths; infinite where there
        is no closed form."""
        found, known, moving = self._exchanges(before, after)
        return np.where(moving == 0, 0.0, np.where(known, found, np.inf))

    def _exchanges(self, before: Layouts, after: Layouts) -> tuple[Table, Flags, Indices]:
        """Return the times of exchanges, whether they are known, and the axes of the old splits
        that change."""
        spelling, primes = self.spelling, self.places.primes
        old, new = spelling.masks(before.splits), spelling.masks(after.splits)
        had, has = union(old), union(new)
        moving = union(np.where(before.splits != after.splits, old, 0))
        extents = spelling.extents
        n = extents[moving]
        copies = n // extents[moving & has]
        places = self.places.compared(*(several(self.shape, x.splits) for x in (before, after)))
        empty = self._shares[np.arange(len(self.shape)), old] * extents[old] >= 2
        lost = union(np.where(empty, self.places.of_sets[old], 0))  # most devices have nothing
        paired, gone = places.paired | places.gone & lost, places.gone & ~lost
        paired |= self.places.of_sets[union(np.where(np.array(self.shape) == 1, old & ~new, 0))]
        within = [np.where(paired & far, 0, 1 / primes.extents[gone & far]) for far in self._far]
        receiving = sum(
            (within[k + 1] - within[k]) * seconds for k, seconds in enumerate(self._byte_seconds)
        )
        used = self.places.of_sets[had]
        wanted = primes.extents[places.gone_of_new & ~used]
        kept = np.where(places.paired_of_new & used, 0, 1 / primes.extents[places.gone_of_new])
        sent = np.maximum(copies / wanted - kept, 0) * self.share(old).prod(axis=1)
        latency = self._call + self._factor * self._rounds[moving]
        received = self._byte_factor * receiving + self._copying * (1 - within[0])
        rate = received * self.share(new).prod(axis=1) + self._copying * 2 * sent
        found: Table = latency + rate * self.size
        if self.counted:
            first, last = (spelling.keys(layouts) for layouts in (before, after))
            for ends, seconds in self.counted.items():
                found[(first == ends[0]) & (last == ends[1])] = seconds
        return found, places.known, moving

    def lowest(self, before: Layouts, after: Layouts) -> "LowestExchanges":
        """Return lower bounds of the times of exchanges from each layout to each of others."""
        return LowestExchanges(self, before, after)

    @cached_property
    def lowest_rates(self) -> Table:
        """The seconds for each byte of a shard that an exchange takes at least, without the packing
        of what is sent: [outermost level of the pairs + 1, set of primes that are gone]."""
        share = 1 / self.places.primes.extents
        found = np.zeros((len(self._byte_seconds) + 1, len(share)))
        more = self._byte_factor * np.diff(self._byte_seconds, prepend=0)
        more[0] += self._copying
        sets = np.arange(len(share))
        for k, each in enumerate(more.tolist()):
            found[: k + 1] += each * (1 - share[sets & self._far[k]])
            found[k + 1 :] += each
        return found

    @cached_property
    def latencies(self) -> Table:
        """The latency of an exchange over each set of axes, of none 0."""
        found: Table = np.where(self._rounds > 0, self._call + self._factor * self._rounds, 0)
        return found


class LowestExchanges:
    """Lower bounds of the times of exchanges from each layout `before` to each one `after`, from
    the places of all old and all new splits of each dimension as bits (even_places.py)."""

    def __init__(self, times: EvenTimes, before: Layouts, after: Layouts):
        self._times, places = times, times.places
        self._shares = times.size * times.share(times.spelling.masks(after.splits)).prod(axis=1)
        reach = places.primes.over_sets(0, lambda x, i: np.maximum(x, places.primes.levels[i] + 1))
        self._dims = list[tuple[np.ndarray[Any, Any], ...]]()
        """Of each dimension the numbers of the old and the new split of each layout; and by these
        the axes that move, the primes that are gone, and the level of the pairs: [old, new]."""
        for dim in range(len(times.shape)):
            old, i = np.unique(before.splits[:, dim], return_inverse=True)
            new, j = np.unique(after.splits[:, dim], return_inverse=True)
            gone, changed = np.zeros((2, len(old), len(new)), dtype=np.int16)
            have, want = places.bits(old), places.bits(new)
            if times.shape[dim] == 1:
                have.clear()  # not lacked, at least
            want += [np.zeros(len(new), dtype=np.int16)] * (len(have) - len(want))
            for a, b in zip(have, want, strict=False):
                changed |= a[:, None] & ~b
                gone |= a[:, None] * (b == 0)
            moving = times.spelling.masks(old)[:, None] * (old[:, None] != new)
            levels = reach.astype(np.int16)[changed & ~gone]
            self._dims.append((i, j, moving.astype(np.int16), gone, levels))

    def seconds(self, rows: slice, columns: slice) -> Table:
        """Return the bounds of some of them: [before, after]."""
        moving, gone, levels = (
            reduce(join, [x[k][x[0][rows]][:, x[1][columns]] for x in self._dims])
            for k, join in ((2, np.bitwise_or), (3, np.bitwise_or), (4, np.maximum))
        )
        rates = self._times.lowest_rates
        found: Table = rates.take(levels.astype(np.int64) * rates.shape[1] + gone)
        found *= self._shares[columns]
        found += self._times.latencies[moving]
        return found
