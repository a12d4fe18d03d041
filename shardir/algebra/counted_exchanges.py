"""The times of many exchanges of one tensor, of any shards: what each device has is counted.

    5 rows over {a}, then over {b}, of 2 devices each: shards are the rows [0, 3) and [3, 5)
    the device at (0, 1) has [0, 3) and needs [3, 5): none of its own, both from the one at (1, 1)

The numbers are those of `Exchange` (collectives/all_devices.py). Those along one dimension depend
on its size, and its old and its new split alone: they are counted once for each two splits, on all
devices. Those of a shard are products. Where shards are even there is a closed form
(exchange_costs.py).
"""

from functools import partial
from itertools import pairwise

import numpy as np

from shardir.algebra.arrays import Indices, Table
from shardir.algebra.exchange_costs import ManyExchanges, SplitArrays
from shardir.algebra.forms import copying
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.retained import RetainedTables
from shardir.algebra.traffic import within

MAX_COUNTED = 1_000_000
"""The maximum number of exchanges, times devices, that are counted at once: limits the memory."""

Counted = tuple[Table, Indices]
"""For one size of a dimension: the elements that each device has, or finds on others, of a shard,
[device, place], and the range of each device's shard, [split, device, end]."""


class CountedExchanges:
    """Exchanges of tensors between layouts over `splits` of a dimension, the first one none.

    Args:
        source, target: the numbers of the splits of all dimensions: [exchange, dimension].
    """

    def __init__(self, mesh: Mesh, splits: list[Axes], source: Indices, target: Indices):
        self.mesh, self._source, self._target = mesh, source, target
        arrays = SplitArrays(mesh, splits)
        self._many = ManyExchanges(mesh, arrays, arrays)
        self._latencies = self._many.latencies(source, target)
        self._sets = np.array([sum(1 << self._many.axes.index(a) for a in s) for s in splits])
        self._moving = np.where(source != target, self._sets[source], 0).sum(axis=1)
        """The axes along which each exchange moves, as bits."""
        self._crosses = mesh.clash(self._many.axes) is not None
        self._dimension = _DimensionShards(mesh, splits)
        levels = range(-1, len(mesh.cluster_or_default.levels) - 1)
        self._held = [self._held_near(level) for level in levels]
        every = self._dimension.holders(0, (), frozenset())
        self._sizes = self._dimension.places(np.full_like(target, every), target)
        if not self._crosses:
            self._fetched, self._replicas = self._fetches()
        self._counted = RetainedTables[Counted]()

    def seconds(self, shape: Shape, itemsize: int, some: Indices) -> Table:
        """Return the times of some exchanges of a tensor of global `shape`, by their numbers;
        `itemsize` is the bytes of an element."""
        latency, each = self.costs(shape, some)
        return latency + itemsize * each

    def costs(self, shape: Shape, some: Indices) -> tuple[Table, Table]:
        """Return the latencies of some exchanges of a tensor of global `shape`, by their numbers,
        and their seconds for each byte of an element."""
        counted = self._dimension.counted
        each = [self._counted.get(n, partial(counted, n)) for n in shape]
        chunk = max(MAX_COUNTED // self.mesh.size ** (2 if self._crosses else 1), 1)
        parts = [some[i : i + chunk] for i in range(0, len(some), chunk)]
        found = [self._without_latency(each, part) for part in parts]
        return self._latencies[some], np.concatenate([*found, ()])

    def _without_latency(self, each: list[Counted], some: Indices) -> Table:
        """Return the seconds for each byte of an element, without latencies."""
        levels = self.mesh.cluster_or_default.levels
        reached = [_product(each, places[some]) for places in (*self._held, self._sizes)]
        received = sum(
            (more - less) / level.bandwidth
            for (less, more), level in zip(pairwise(reached), levels, strict=True)
        )
        found: Table = self._many.factor * np.max(received, axis=0)
        if byte := copying(1, self.mesh):
            lacking = (reached[-1] - reached[0]).max(axis=0)
            found += byte * (2 * self._sent(each, some, reached[0]) + lacking)
        return found

    def _held_near(self, level: int) -> Indices:
        """Return the places of what devices find of their new shards in their unit of a level, of
        level -1 on themselves alone: [exchange, dimension]."""
        fine = [self.mesh.cut(axes, self.mesh.level_sub_axes) for axes in self._dimension.splits]
        near = [
            self._dimension.holders(i, axes, within(self.mesh, level, axes))
            for i, axes in enumerate(fine)
        ]
        return self._dimension.places(np.array(near)[self._source], self._target)

    def _fetches(self) -> tuple[Indices, Table]:
        """Return the places of what devices of a device's group have then of its old shard:
        [exchange, dimension]; and the number of devices that fetch the same: [exchange]."""
        axes, target = self._many.axes, self._target
        group = self._moving & self._sets[target].sum(axis=1)
        codes = (target << len(axes)) | (self._sets[target] & group[:, None])
        distinct, at = np.unique(codes, return_inverse=True)
        numbers = []
        for code in distinct.tolist():
            split, mask = divmod(code, 1 << len(axes))
            free = frozenset(a for k, a in enumerate(axes) if mask >> k & 1)
            numbers.append(self._dimension.holders(split, self._dimension.splits[split], free))
        holders = np.array(numbers, dtype=np.int64)[at.reshape(target.shape)]
        extents = [1.0]
        for a in axes:
            extents += [n * self.mesh.extent((a,)) for n in extents]
        replicas = np.array(extents)[self._moving & ~group]
        return self._dimension.places(holders, self._source), replicas

    def _sent(self, each: list[Counted], some: Indices, kept: Table) -> Table:
        """Return the maximum number of elements that a device sends: those of its old shard that
        devices of its group have then, each as often as there are devices that fetch the same, but
        for those that it keeps."""
        if self._crosses:
            return self._sent_to_each(each, some, kept)
        fetched = _product(each, self._fetched[some]) * self._replicas[some]
        found: Table = (fetched - kept).max(axis=0)
        return found

    def _sent_to_each(self, each: list[Counted], some: Indices, kept: Table) -> Table:
        """Return the same where axes cross, so that replicas are not those along some axes: by what
        each device sends to each of its group, that along the axes on which it moves."""
        fetched: Table = self._groups(self._moving[some])
        ends = zip(each, self._source[some].T, self._target[some].T, strict=True)
        for (_, shards), old, new in ends:
            before, after = shards[old][:, :, None], shards[new][:, None]
            start = np.maximum(before[..., 0], after[..., 0])
            fetched = fetched * (np.minimum(before[..., 1], after[..., 1]) - start).clip(min=0)
        found: Table = (fetched.sum(axis=2).T - kept).max(axis=0)
        return found

    def _groups(self, moving: Indices) -> Table:
        """Return 1 for each two devices that differ along a set of axes only, and 0 for others:
        [exchange, device, device]."""
        sets, at = np.unique(moving, return_inverse=True)
        ranks, found = np.arange(self.mesh.size), []
        for mask in sets.tolist():
            base = ranks.copy()
            for i, a in enumerate(self._many.axes):
                if mask >> i & 1:
                    stride = self.mesh.stride(a)
                    base -= stride * (ranks // stride % self.mesh.extent((a,)))
            found.append(base[:, None] == base)
        return np.array(found)[at.reshape(-1)].astype(np.float64)


class _DimensionShards:
    """The elements of devices along one dimension of any size, by each of its `splits`.

    Holders are the devices that differ from one along some axes only, by a split. What they have
    together of its shard by another split is at a place, which does not depend on the size.
    """

    def __init__(self, mesh: Mesh, splits: list[Axes]):
        self.mesh, self.splits = mesh, splits
        ranks = np.arange(mesh.size)
        self._indices = [_index(mesh, ranks, axes) for axes in splits]
        self._units: list[dict[int, Indices]] = [{} for _ in splits]
        """Of each split and its holders, by number: the unit of each shard. Holders together have
        all shards of a unit."""
        self._numbers: dict[tuple[int, frozenset[Axis]], int] = {}

    def holders(self, split: int, axes: Axes, free: frozenset[Axis]) -> int:
        """Return the number of the holders that differ along the axes in `free` only, by a split,
        which is spelled by `axes`."""
        if (number := self._numbers.get((split, free))) is None:
            number = self._numbers[split, free] = len(self._numbers)
            k, stride, kept = np.arange(self.mesh.extent(axes)), 1, 1
            units = np.zeros(len(k), dtype=np.int64)
            for a in reversed(axes):
                n = self.mesh.extent((a,))
                if a not in free:
                    units, kept = units + kept * (k // stride % n), kept * n
                stride *= n
            self._units[split][number] = units
        return number

    def places(self, holders: Indices, of: Indices) -> Indices:
        """Return the places of what holders have of shards by the splits `of`."""
        found: Indices = holders * len(self.splits) + of
        return found

    def counted(self, size: int) -> Counted:
        """Return what is counted for a dimension of this size."""
        extents = [self.mesh.extent(axes) for axes in self.splits]
        edges = [
            np.array([self.mesh.bounds(size, axes, k) for k in range(n)])
            for axes, n in zip(self.splits, extents, strict=True)
        ]
        shards = np.array([e[at] for e, at in zip(edges, self._indices, strict=True)])
        start, stop = shards.transpose(2, 1, 0)[:, :, None]  # [device, 1, split]
        found = np.empty((self.mesh.size, len(self._numbers), len(self.splits)))
        for e, at, units in zip(edges, self._indices, self._units, strict=True):
            first, last = e.T[:, :, None]  # [shard, 1]
            common = (np.minimum(last, stop) - np.maximum(first, start)).clip(min=0)
            unit = np.array([*units.values()])[:, None]  # [holders, 1, shard]
            together = (unit == unit[:, 0, at, None]).swapaxes(0, 1)
            found[:, [*units]] = together.astype(np.float64) @ common  # [device, holders, split]
        return found.reshape(self.mesh.size, -1), shards


def _index(mesh: Mesh, ranks: Indices, axes: Axes) -> Indices:
    """Return the index of each rank along axes."""
    found = np.zeros(len(ranks), dtype=np.int64)
    for a in axes:
        n = mesh.extent((a,))
        found = found * n + ranks // mesh.stride(a) % n
    return found


def _product(each: list[Counted], places: Indices) -> Table:
    """Return the elements at a place of each dimension together: [device, exchange]."""
    found = np.ones(1)
    for (counted, _), of_one in zip(each, places.T, strict=True):
        found = found * counted.take(of_one, axis=1)
    return found
