"""The times of many exchanges of one tensor, with shards of any sizes, by counting elements.

    5 rows over {a}, then over {b}, of 2 devices each: shards are the rows [0, 3) and [3, 5)
    the device at (0, 1) has [0, 3) and needs [3, 5): it fetches both rows from the device at (1, 1)

The numbers equal those of `Exchange` (collectives/all_devices.py). The count along a dimension
depends only on its size, its old and its new split, so each pair of splits is counted once, on all
devices; the count of a shard is the product over dimensions. Even shards have a closed form
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
"""Bounds the exchanges, times devices, that are counted at once, and so memory: 8 MB an array."""

Counted = tuple[Table, Indices]
"""For one size of a dimension: the elements of a shard that a device's holders have (see
`_DimensionShards`), [device, place]; and the range of each shard, [split, device, end]."""


class CountedExchanges:
    """Exchanges of tensors between layouts over `splits` of a dimension.

    Args:
        splits: the first one is (), the unsharded dimension.
        source, target: indices of the splits of all dimensions: [exchange, dimension].
    """

    def __init__(self, mesh: Mesh, splits: list[Axes], source: Indices, target: Indices):
        self.mesh, self._source, self._target = mesh, source, target
        arrays = SplitArrays(mesh, splits)
        self._many = ManyExchanges(mesh, arrays, arrays)
        self._latencies = self._many.latencies(source, target)
        self._sets = np.array([sum(1 << self._many.axes.index(a) for a in s) for s in splits])
        self._moving = np.where(source != target, self._sets[source], 0).sum(axis=1)
        """The axes along which each exchange moves, as bits: [exchange]."""
        self._crosses = mesh.clash(self._many.axes) is not None
        self._dimension = _DimensionShards(mesh, splits)
        levels = range(-1, len(mesh.cluster_or_default.levels) - 1)
        self._held = [self._held_near(level) for level in levels]
        anyone = self._dimension.holders(0, (), frozenset())
        self._sizes = self._dimension.places(np.full_like(target, anyone), target)
        if not self._crosses:
            self._fetched, self._replicas = self._fetches()
        self._counted = RetainedTables[Counted]()

    def seconds(self, shape: Shape, itemsize: int, numbers: Indices) -> Table:
        """Return the seconds of the exchanges `numbers` of a tensor of global `shape`.

        Args:
            itemsize: the bytes of an element.
        """
        latency, rate = self.costs(shape, numbers)
        return latency + itemsize * rate

    def costs(self, shape: Shape, numbers: Indices) -> tuple[Table, Table]:
        """Return the latencies of the exchanges `numbers` of a tensor of global `shape`, and their
        seconds for each byte of an element."""
        count = self._dimension.count
        counts = [self._counted.get(n, partial(count, n)) for n in shape]
        chunk = max(MAX_COUNTED // self.mesh.size ** (2 if self._crosses else 1), 1)
        parts = [numbers[i : i + chunk] for i in range(0, len(numbers), chunk)]
        rates = [self._rates(counts, part) for part in parts]
        return self._latencies[numbers], np.concatenate([*rates, ()])

    def _rates(self, counts: list[Counted], numbers: Indices) -> Table:
        """Return the seconds for each byte of an element, without latencies.

        Args:
            counts: of each dimension.
        """
        levels = self.mesh.cluster_or_default.levels
        reached = [_product(counts, places[numbers]) for places in (*self._held, self._sizes)]
        received = sum(
            (more - less) / level.bandwidth
            for (less, more), level in zip(pairwise(reached), levels, strict=True)
        )
        rates: Table = self._many.factor * np.max(received, axis=0)
        if byte := copying(1, self.mesh):
            lacking = (reached[-1] - reached[0]).max(axis=0)
            rates += byte * (2 * self._sent(counts, numbers, reached[0]) + lacking)
        return rates

    def _held_near(self, level: int) -> Indices:
        """Return the places of the elements of a new shard within the device's unit of a level, or,
        for level -1, on the device itself: [exchange, dimension]."""
        fine = [self.mesh.cut(axes, self.mesh.level_sub_axes) for axes in self._dimension.splits]
        near = [
            self._dimension.holders(i, axes, within(self.mesh, level, axes))
            for i, axes in enumerate(fine)
        ]
        return self._dimension.places(np.array(near)[self._source], self._target)

    def _fetches(self) -> tuple[Indices, Table]:
        """Return the places of the elements of a device's old shard that its group has afterwards,
        [exchange, dimension]; and the number of devices that fetch equal elements, [exchange]."""
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

    def _sent(self, counts: list[Counted], numbers: Indices, kept: Table) -> Table:
        """Return the maximum number of elements that a device sends, for each exchange: those of
        its old shard that its group has afterwards, times replicas, less those it keeps.

        Args:
            kept: elements that a device keeps: [device, exchange].
        """
        if self._crosses:
            return self._sent_where_axes_cross(counts, numbers, kept)
        fetched = _product(counts, self._fetched[numbers]) * self._replicas[numbers]
        sent: Table = (fetched - kept).max(axis=0)
        return sent

    def _sent_where_axes_cross(self, counts: list[Counted], numbers: Indices, kept: Table) -> Table:
        """Like `_sent`, for crossing sub-axes: overlap of each peer's new shard with this device's
        old one, summed over the group."""
        fetched: Table = self._groups(self._moving[numbers])
        ends = zip(counts, self._source[numbers].T, self._target[numbers].T, strict=True)
        for (_, shards), old, new in ends:
            before, after = shards[old][:, :, None], shards[new][:, None]
            start = np.maximum(before[..., 0], after[..., 0])
            fetched = fetched * (np.minimum(before[..., 1], after[..., 1]) - start).clip(min=0)
        sent: Table = (fetched.sum(axis=2).T - kept).max(axis=0)
        return sent

    def _groups(self, moving: Indices) -> Table:
        """Return 1 for two devices that differ only along the axes `moving` (bits), else 0:
        [exchange, device, device]."""
        sets, at = np.unique(moving, return_inverse=True)
        ranks, masks = np.arange(self.mesh.size), []
        for mask in sets.tolist():
            base = ranks.copy()
            for i, a in enumerate(self._many.axes):
                if mask >> i & 1:
                    stride = self.mesh.stride(a)
                    base -= stride * (ranks // stride % self.mesh.extent((a,)))
            masks.append(base[:, None] == base)
        return np.array(masks)[at.reshape(-1)].astype(np.float64)


class _DimensionShards:
    """The elements of devices along one dimension, for each pair of its `splits`.

    The holders of a device are the devices that differ from it along some axes of an old split
    only. The number of elements of its new shard that its holders have together stands at a place,
    a column of `count`, which is independent of the size of the dimension.
    """

    def __init__(self, mesh: Mesh, splits: list[Axes]):
        self.mesh, self.splits = mesh, splits
        ranks = np.arange(mesh.size)
        self._indices = [_index(mesh, ranks, axes) for axes in splits]
        self._units: list[dict[int, Indices]] = [{} for _ in splits]
        """By split and number of holders: the unit of each shard. The shards of a unit are those of
        the holders of one device."""
        self._numbers: dict[tuple[int, frozenset[Axis]], int] = {}

    def holders(self, split: int, axes: Axes, free: frozenset[Axis]) -> int:
        """Return the number of the holders that differ along the axes in `free` only.

        Args:
            split: the index of the old split.
            axes: the old split, cut so that its sub-axes are in `free` or not.
        """
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

    def places(self, holders: Indices, new: Indices) -> Indices:
        """Return the places of the elements that holders have of shards by the splits `new`."""
        places: Indices = holders * len(self.splits) + new
        return places

    def count(self, size: int) -> Counted:
        """Return the counts for a dimension of this size."""
        extents = [self.mesh.extent(axes) for axes in self.splits]
        edges = [
            np.array([self.mesh.bounds(size, axes, k) for k in range(n)])
            for axes, n in zip(self.splits, extents, strict=True)
        ]
        shards = np.array([e[at] for e, at in zip(edges, self._indices, strict=True)])
        start, stop = shards.transpose(2, 1, 0)[:, :, None]  # [device, 1, split]
        counts = np.empty((self.mesh.size, len(self._numbers), len(self.splits)))
        for e, at, units in zip(edges, self._indices, self._units, strict=True):
            first, last = e.T[:, :, None]  # [shard, 1]
            common = (np.minimum(last, stop) - np.maximum(first, start)).clip(min=0)
            unit = np.array([*units.values()])[:, None]  # [holders, 1, shard]
            is_holder = (unit == unit[:, 0, at, None]).swapaxes(0, 1)
            counts[:, [*units]] = is_holder.astype(np.float64) @ common  # [device, holders, split]
        return counts.reshape(self.mesh.size, -1), shards


def _index(mesh: Mesh, ranks: Indices, axes: Axes) -> Indices:
    """Return the index of each rank along axes."""
    index = np.zeros(len(ranks), dtype=np.int64)
    for a in axes:
        n = mesh.extent((a,))
        index = index * n + ranks // mesh.stride(a) % n
    return index


def _product(counts: list[Counted], places: Indices) -> Table:
    """Return the product over dimensions of the counts at `places`: [device, exchange]."""
    elements = np.ones(1)
    for (table, _), columns in zip(counts, places.T, strict=True):
        elements = elements * table.take(columns, axis=1)
    return elements
