"""The times of many exchanges of one tensor, of any shards: what each device has is counted.

    5 rows over {a}, then over {b}, of 2 devices each: shards are the rows [0, 3) and [3, 5)
    the device at (0, 1) has [0, 3) and needs [3, 5): none of its own, both from the one at (1, 1)

The numbers are those of `Exchange` (collectives/all_devices.py). Those along one dimension depend
on its old and its new split alone: they are counted once for each two splits, on all devices. Those
of a shard are products. Where shards are even there is a closed form (exchange_costs.py).
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise

import numpy as np

from shardir.algebra.exchange_costs import ManyExchanges, Table
from shardir.algebra.forms import copying
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.split_arrays import SplitArrays
from shardir.algebra.traffic import Indices, within

MAX_COUNTED = 1_000_000
"""The maximum number of exchanges, times devices, that are counted at once: limits the memory."""


class CountedExchanges:
    """Exchanges of a tensor of global `shape` between layouts over `splits` of a dimension."""

    def __init__(self, mesh: Mesh, shape: Shape, splits: list[Axes]):
        self.mesh = mesh
        arrays = SplitArrays(mesh, splits)
        self._many = ManyExchanges(mesh, arrays, arrays)
        self._axes = self._many.axes
        self._sets = np.array([sum(1 << self._axes.index(a) for a in s) for s in splits])
        self._crosses = mesh.clash(self._axes) is not None
        counts = {n: _CountedDimension(mesh, n, splits) for n in shape}
        self._counts = [counts[n] for n in shape]

    def seconds(self, source: Indices, target: Indices, itemsize: int) -> Table:
        """Return the time of each exchange.

        Args:
            source, target: the numbers of the splits of all dimensions: [exchange, dimension].
            itemsize: the bytes of an element.
        """
        counted = self.mesh.size ** (2 if self._crosses else 1)
        chunk = max(MAX_COUNTED // counted, 1)
        parts = [slice(i, i + chunk) for i in range(0, len(source), chunk)]
        each = [self._without_latency(source[part], target[part]) for part in parts]
        return self._many.latencies(source, target) + itemsize * np.concatenate([*each, ()])

    def _without_latency(self, source: Indices, target: Indices) -> Table:
        """Return the seconds for each byte of an element, without latencies."""
        levels = self.mesh.cluster_or_default.levels
        ends = [*zip(self._counts, source.T, target.T, strict=True)]
        reached = [
            _product(counts.held[k][old, new] for counts, old, new in ends)
            for k in range(len(levels))
        ]
        reached.append(_product(counts.sizes[new] for counts, _, new in ends))
        received = sum(
            (more - less) / level.bandwidth
            for (less, more), level in zip(pairwise(reached), levels, strict=True)
        )
        found: Table = self._many.factor * np.max(received, axis=1)
        if each := copying(1, self.mesh):
            lacking = (reached[-1] - reached[0]).max(axis=1)
            found += each * (2 * self._sent(source, target, reached[0]) + lacking)
        return found

    def _sent(self, source: Indices, target: Indices, kept: Table) -> Table:
        """Return the maximum number of elements that a device sends: those of its old shard that
        devices of its group have then, each as often as there are devices that fetch the same, but
        for those that it keeps."""
        moving = np.where(source != target, self._sets[source], 0).sum(axis=1)
        if self._crosses:
            return self._sent_to_each(source, target, moving, kept)
        group = moving & self._sets[target].sum(axis=1)
        fetched = _product(
            counts.fetched(new, self._sets[new] & group, old)
            for counts, old, new in zip(self._counts, source.T, target.T, strict=True)
        )
        replicas = self._extents[moving & ~group]
        found: Table = (fetched * replicas[:, None] - kept).max(axis=1)
        return found

    def _sent_to_each(
        self, source: Indices, target: Indices, moving: Indices, kept: Table
    ) -> Table:
        """Return the same where axes cross, so that replicas are not those along some axes: by what
        each device sends to each of its group, that along the axes `moving`."""
        fetched: Table = self._groups(moving)
        for counts, old, new in zip(self._counts, source.T, target.T, strict=True):
            fetched = fetched * counts.shared(old, new)
        found: Table = (fetched.sum(axis=2) - kept).max(axis=1)
        return found

    def _groups(self, moving: Indices) -> Table:
        """Return 1 for each two devices that differ along a set of axes only, and 0 for others:
        [exchange, device, device]."""
        sets, at = np.unique(moving, return_inverse=True)
        ranks, found = np.arange(self.mesh.size), []
        for mask in sets.tolist():
            base = ranks.copy()
            for i, a in enumerate(self._axes):
                if mask >> i & 1:
                    stride = self.mesh.stride(a)
                    base -= stride * (ranks // stride % self.mesh.extent((a,)))
            found.append(base[:, None] == base)
        return np.array(found)[at.reshape(-1)].astype(np.float64)

    @cached_property
    def _extents(self) -> Table:
        """The extent of each set of axes."""
        found = [1.0]
        for a in self._axes:
            found += [n * self.mesh.extent((a,)) for n in found]
        return np.array(found)


class _CountedDimension:
    """The elements that devices have along one dimension of `size`, by each split."""

    def __init__(self, mesh: Mesh, size: int, splits: list[Axes]):
        self.mesh, self.splits = mesh, splits
        ranks = np.arange(mesh.size)
        self._indices = [_index(mesh, ranks, axes) for axes in splits]
        self._edges = [
            np.array([mesh.bounds(size, axes, k) for k in range(mesh.extent(axes))])
            for axes in splits
        ]
        shards = zip(self._edges, self._indices, strict=True)
        self._shards = np.array([edges[at] for edges, at in shards])
        self._fetched: dict[tuple[int, int], int] = {}
        self._rows: list[Indices] = []

    @property
    def sizes(self) -> Indices:
        """The size of each device's shard: [split, device]."""
        found: Indices = self._shards[..., 1] - self._shards[..., 0]
        return found

    @cached_property
    def held(self) -> list[Indices]:
        """The elements of new shards that devices find in their unit of each level (first on
        themselves alone): [old split, new split, device]."""
        fine = [self.mesh.cut(axes, self.mesh.level_sub_axes) for axes in self.splits]
        return [
            np.array([
                self._held(i, axes, within(self.mesh, level, axes)) for i, axes in enumerate(fine)
            ])
            for level in range(-1, len(self.mesh.cluster_or_default.levels) - 1)
        ]  # fmt: skip

    def fetched(self, holders: Indices, masks: Indices, of: Indices) -> Indices:
        """Return what devices of one group have, by the splits `holders`, of the shards by the
        splits `of`: [exchange, device].

        Args:
            masks: the axes of `holders` that are in the group, as bits of all axes.
        """
        both, at = np.unique(np.stack([holders, masks], axis=1), axis=0, return_inverse=True)
        axes = tuple(dict.fromkeys(a for split in self.splits for a in split))
        rows = []
        for i, mask in both.tolist():
            if (i, mask) not in self._fetched:
                group = frozenset(a for k, a in enumerate(axes) if mask >> k & 1)
                self._fetched[i, mask] = len(self._rows)
                self._rows.append(self._held(i, self.splits[i], group))
            rows.append(self._fetched[i, mask])
        return np.array(self._rows)[np.array(rows)[at.reshape(-1)], of]

    def shared(self, old: Indices, new: Indices) -> Indices:
        """Return the elements that are both in a device's old shard and in another's new one, for
        all pairs of devices: [exchange, device, device]."""
        before, after = self._shards[old][:, :, None], self._shards[new][:, None]
        rows = np.minimum(before[..., 1], after[..., 1]) - np.maximum(before[..., 0], after[..., 0])
        return rows.clip(min=0)

    def _held(self, split: int, axes: Axes, free: frozenset[Axis]) -> Indices:
        """Return what devices that differ along the axes in `free` only have together of each shard
        of a device, by the split of the holders, which is spelled by `axes`: [split, device]."""
        places, stride = np.zeros(len(self._edges[split]), dtype=np.int64), 1
        k, kept = np.arange(len(places)), 1
        for a in reversed(axes):
            n = self.mesh.extent((a,))
            if a not in free:
                places, kept = places + kept * (k // stride % n), kept * n
            stride *= n
        start, stop = (self._edges[split][:, i, None, None] for i in (0, 1))
        rows = np.minimum(stop, self._shards[..., 1]) - np.maximum(start, self._shards[..., 0])
        near = places[:, None] == places[self._indices[split]]
        return (rows.clip(min=0) * near[:, None]).sum(axis=0)


def _index(mesh: Mesh, ranks: Indices, axes: Axes) -> Indices:
    """Return the index of each rank along axes."""
    found = np.zeros(len(ranks), dtype=np.int64)
    for a in axes:
        n = mesh.extent((a,))
        found = found * n + ranks // mesh.stride(a) % n
    return found


def _product(counts: Iterable[Indices]) -> Table:
    """Return the elements of shards, from the counts along each dimension: [exchange, device]."""
    found = np.ones(1)
    for each in counts:
        found = found * each
    return found
