"""The latencies and rates of many exchanges at once, between layouts that split a tensor evenly.

They equal those of `Exchange` (collectives/all_devices.py), by the closed form of traffic.py. The
old and the new split of a dimension determine a factor of what a device has of its new shard. The
factor is found once for each pair of splits; the rest is array arithmetic.

The device that receives for longest is one that has nothing of its new shard, if some device has
nothing: where indices along two sub-axes must be equal. This holds if no inner link is slower than
an outer one.

Splits of a dimension are rows of axis numbers, -1 after the last axis:

    {a, b}, {b}, {}        over the axes a, b: [[0, 1], [1, -1], [-1, -1]]
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from shardir.algebra.arrays import Flags, Indices, Table
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.forms import Forms, copying
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.steps import step_forms
from shardir.algebra.traffic import sub_axes_of_primes, within

Extents = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class PrimeSplits(NamedTuple):
    """Splits over sub-axes of prime sizes.

    Attributes:
        primes: indices into `prime_axes`: [split, place]; -1 after the last.
        owner: the index in `owners` of the axis that each prime is a part of: [split, place].
    """

    primes: Indices
    owner: Indices
    prime_axes: Axes
    owners: Axes


class SplitArrays:
    """Splits of a dimension as arrays.

    Attributes:
        axes: all axes of the splits.
        numbers: the axes of each split, as indices into `axes`: [split, place]; -1 after the last.
    """

    def __init__(self, mesh: Mesh, splits: Sequence[Axes]):
        self.mesh, self.splits = mesh, splits
        self.axes = tuple(dict.fromkeys(a for split in splits for a in split))
        at, width = {a: i for i, a in enumerate(self.axes)}, max(map(len, splits), default=0)
        rows = [[at[a] for a in split] + [-1] * (width - len(split)) for split in splits]
        self.numbers = np.array(rows, dtype=np.int64).reshape(len(splits), width)

    @cached_property
    def extents(self) -> Extents:
        """The number of shards of each split."""
        sizes = np.array([*(float(self.mesh.extent((a,))) for a in self.axes), 1.0])
        extents: Extents = sizes[self.numbers].prod(axis=1)
        return extents

    @cached_property
    def reach(self) -> Indices:
        """The outermost level that the shards of each split cross."""
        levels = np.array([*(self.mesh.level((a,)) for a in self.axes), 0])
        reach: Indices = levels[self.numbers].max(axis=1, initial=0)
        return reach

    def over(self, axes: Axes) -> Indices:
        """Return the axes of each split as indices into `axes`, a superset: [split, place]."""
        return renumber(self.numbers, self.axes, axes)

    @cached_property
    def primes(self) -> PrimeSplits:
        """The splits over sub-axes of prime sizes."""
        return self._cut([(a,) for a in self.axes])

    @cached_property
    def primes_by_level(self) -> PrimeSplits:
        """The splits over sub-axes of prime sizes, of axes cut at the units of levels."""
        return self._cut([self.mesh.cut((a,), self.mesh.level_sub_axes) for a in self.axes])

    def _cut(self, parts: Sequence[Axes]) -> PrimeSplits:
        """Return the splits over sub-axes of prime sizes, by the parts of each axis."""
        owners = tuple([piece for pieces in parts for piece in pieces])
        at = {a: i for i, a in enumerate(owners)}
        by_axis = [sub_axes_of_primes(self.mesh, pieces) for pieces in parts]
        primes = tuple(dict.fromkeys(prime for pairs in by_axis for prime, _ in pairs))
        numbers = {prime: i for i, prime in enumerate(primes)}
        width = max(map(len, by_axis), default=0)
        table = np.full((len(parts) + 1, width, 2), -1)
        for i, pairs in enumerate(by_axis):
            table[i, : len(pairs)] = [(numbers[prime], at[piece]) for prime, piece in pairs]
        rows = table[self.numbers].reshape(len(self.numbers), self.numbers.shape[1] * width, 2)
        order = (rows[..., 0] < 0).argsort(axis=1, kind="stable")  # -1 last
        rows = np.take_along_axis(rows, order[..., None], axis=1)
        return PrimeSplits(rows[..., 0], rows[..., 1], primes, owners)


def renumber(numbers: Indices, axes: Axes, others: Axes) -> Indices:
    """Return indices into `axes` as indices into `others`."""
    at = {a: i for i, a in enumerate(others)}
    indices: Indices = np.array([*(at[a] for a in axes), -1])[numbers]
    return indices


def unite(*groups: Axes) -> tuple[Axis, ...]:
    """Return the distinct axes of all groups, in order."""
    return tuple(dict.fromkeys(a for axes in groups for a in axes))


TableEntries = np.ndarray[Any, Any]


def exchange_costs(
    mesh: Mesh, old: Sequence[Axes], new: Sequence[Axes], source: Indices, target: Indices
) -> tuple[Table, Table]:
    """Return the latency and the seconds for each byte of the global tensor of each exchange; NaN
    where there is no closed form. Arguments are as in `ManyExchanges`."""
    return ManyExchanges(mesh, SplitArrays(mesh, old), SplitArrays(mesh, new)).costs(source, target)


class ManyExchanges:
    """Exchanges from layouts over `old` splits to layouts over `new` splits. The axes of the splits
    are equal or disjoint.

    Arguments `source` and `target` of methods are indices of old and new splits: [exchange,
    dimension]. A result for each exchange is [exchange]; a table for each pair is [old, new].
    """

    def __init__(self, mesh: Mesh, old: SplitArrays, new: SplitArrays):
        self.mesh, self.old, self.new = mesh, old, new
        self.axes = unite(old.axes, new.axes)
        self.levels = mesh.cluster_or_default.levels
        self.factor = mesh.cluster_or_default.times["exchange"]
        self.call = mesh.cluster_or_default.call
        self.byte_factor = mesh.cluster_or_default.byte_times["exchange"]
        self._numbers = old.over(self.axes), new.over(self.axes)
        self.changes = _differ(*self._numbers)
        speeds = [level.bandwidth for level in self.levels]
        self.closed = speeds == sorted(speeds, reverse=True)

    @cached_property
    def shares(self) -> tuple[list[Table], Flags]:
        """For the device that receives for longest: the share of its new shard, along a dimension,
        on itself, then on its unit of each level but the outermost, each [old, new]; and whether
        the closed form holds: [old, new]."""
        mesh, tables = self.mesh, []
        fine = self.old.primes_by_level
        fetched = _Overlaps(fine, self.new.primes)
        for level in range(-1, len(self.levels) - 1):
            near = within(mesh, level, fine.owners)
            far = [i for i, piece in enumerate(fine.owners) if piece not in near]
            lacks = fetched.paired[far].any(axis=0)
            tables.append(np.where(lacks, 0, 1 / fetched.parts[far].prod(axis=0)))
        return tables, fetched.known

    def lowest(self, source: Indices, target: Indices) -> tuple[Table, Table]:
        """Return lower bounds of the costs, which leave out packing and are cheap."""
        tables, _ = self.shares
        ends = _ends(source, target, self.new)
        reached = [*(_product(table, ends) for table in tables), np.ones(1)]
        receiving = sum(
            (b - a) / level.bandwidth
            for (a, b), level in zip(pairwise(reached), self.levels, strict=True)
        )
        return self._latencies(ends), self.byte_factor * receiving / self._shards_after(target)

    def latencies(self, source: Indices, target: Indices) -> Table:
        """Return the latency of each exchange; shards may be uneven."""
        return self._latencies(_ends(source, target, self.new))

    def _latencies(self, ends: list[Indices]) -> Table:
        reach = np.maximum.reduce(_entries(self._reach, ends), initial=0)
        n = _product(self._devices, ends)
        messages = np.frexp(n - 1)[1]  # the bits of n - 1, as `rounds`
        latencies = np.array([level.latency for level in self.levels])
        total: Table = self.factor * (messages * latencies[reach]) + np.where(n > 1, self.call, 0.0)
        return total

    @cached_property
    def _devices(self) -> Table:
        """The number of devices along the axes of an old split that changes, else 1."""
        return np.where(self.changes, self.old.extents[:, None], 1.0)

    @cached_property
    def _reach(self) -> Indices:
        """The outermost level that `_devices` cross."""
        return np.where(self.changes, self.old.reach[:, None], 0)

    def _shards_after(self, target: Indices) -> Table:
        """Return the number of shards after each exchange."""
        shards: Table = self.new.extents[target].prod(axis=1)
        return shards

    @cached_property
    def _axes_of(self) -> tuple[Flags, Flags]:
        """Masks of the axes of each old and each new split: [split, axis]."""
        axes = np.arange(len(self.axes))
        old, new = ((numbers[..., None] == axes).any(axis=1) for numbers in self._numbers)
        return old, new

    @cached_property
    def _backward(self) -> "_Overlaps":
        return _Overlaps(self.new.primes, self.old.primes)

    @cached_property
    def _of_new(self) -> Indices:
        """The indices of the new axes, the owners of `_backward`, in `axes`."""
        return np.array([self.axes.index(a) for a in self.new.axes], dtype=np.int64)

    def costs(self, source: Indices, target: Indices) -> tuple[Table, Table]:
        """Return the latency and the seconds for each byte of the global tensor of each exchange;
        NaN where there is no closed form."""
        latency, rate = self.lowest(source, target)
        ends, changed = _ends(source, target, self.new), self.changes[source, target]
        n = _product(self._devices, ends)
        before = 1 / self.old.extents[source].prod(axis=1)

        # The maximum that a device sends: its old shard to all that want it, less what it keeps.
        in_old, in_new = self._axes_of
        sizes = np.array([float(self.mesh.extent((a,))) for a in self.axes])
        has = in_new[target].any(axis=1)
        moving = (in_old[source] & changed[..., None]).any(axis=1)
        copies = n / np.where(moving & has, sizes, 1).prod(axis=1)
        parts, paired, backward = self._backward.of(_ends(target, source, self.old))
        used = in_old[:, self._of_new][source].any(axis=1).T
        wanted = before / np.where(used, 1, parts).prod(axis=0) * copies
        kept = np.where((paired & used).any(axis=0), 0, before / parts.prod(axis=0))
        sent = np.maximum(wanted - kept, 0)

        (stays, *_), forward = self.shares
        lacking = 1 - _product(stays, ends)
        rate += copying(1, self.mesh) * (2 * sent + lacking / self._shards_after(target))
        known = forward[source, target].all(axis=1) & backward & self.closed
        return np.where(known, latency, np.nan), np.where(known, rate, np.nan)


@lru_cache(maxsize=16384)
def exchange_forms(mesh: Mesh, ends: tuple[tuple[Axes, Axes], ...]) -> Forms:
    """Return the forms of one exchange, for any tensor that both layouts split evenly.

    Args:
        ends: the old and the new split of each dimension that either layout splits.
    """
    shape = (*[2 * mesh.size] * len(ends), mesh.size**2)
    before, after = (Layout(mesh.name, (*dims, ())) for dims in zip(*ends, strict=True))
    step = CollectiveStep("exchange", exchange_axes(before, after), after)
    return step_forms(mesh, shape, before, step)


class _Overlaps:
    """How much of a new shard a device has, for each old and new split of a dimension.

    Attributes:
        parts: the number of parts into which each owner of the old axes divides what a device has:
            [owner, old, new].
        paired: an index along the owner must be equal to an index along another axis: [owner, old,
            new].
        known: the closed form holds: [old, new].
    """

    def __init__(self, old: PrimeSplits, new: PrimeSplits):
        primes = unite(old.prime_axes, new.prime_axes)
        sizes = np.array([*(prime.size for prime in primes), 0], dtype=np.int64)
        before = renumber(old.primes, old.prime_axes, primes)
        after = renumber(new.primes, new.prime_axes, primes)
        self.parts = np.ones((len(old.owners), len(before), len(after)))
        self.paired = np.zeros(self.parts.shape, dtype=np.bool_)
        self.known = np.ones(self.parts.shape[1:], dtype=np.bool_)
        for place in range(before.shape[1]):
            rows = np.flatnonzero(before[:, place] >= 0)
            have, axis = before[rows, place], old.owner[rows, place]
            want = after[:, place] if place < after.shape[1] else np.full(len(after), -1)
            column = have[:, None]
            gone, differs = want < 0, (want >= 0) & (column != want)
            self.known[rows] &= ~differs | (sizes[column] == sizes[want])
            self.parts[axis, rows] *= np.where(gone, sizes[column], 1)
            self.paired[axis, rows] |= differs

    def of(self, ends: list[Indices]) -> tuple[Table, Flags, Flags]:
        """Return `parts` and `paired` of all dimensions together, [owner, exchange], and `known`,
        [exchange]."""
        paired = np.logical_or.reduce(_entries(self.paired, ends))
        known = np.logical_and.reduce(_entries(self.known, ends))
        return _product(self.parts, ends), paired, known


def _ends(source: Indices, target: Indices, new: SplitArrays) -> list[Indices]:
    """Return, for each dimension, the flat index of each exchange in a table [old, new]."""
    count, rank = len(new.splits), max(source.shape[1], target.shape[1])
    return [source[:, d] * count + target[:, d] for d in range(rank)]


def _entries(table: TableEntries, ends: list[Indices]) -> list[TableEntries]:
    """Return, for each dimension, the entries of a table [..., old, new] at flat indices."""
    *first, old, new = table.shape
    flat = table.reshape(*first, old * new)
    return [flat.take(end, axis=-1) for end in ends]


def _product(table: Table, ends: list[Indices]) -> Table:
    """Return the product over dimensions of the entries of a table: [..., exchange]."""
    return reduce(mul, _entries(table, ends), np.ones(1))


def _differ(old: Indices, new: Indices) -> Flags:
    """Return whether an old and a new split have different axes: [old, new]."""
    width = max(old.shape[1], new.shape[1])
    old, new = (
        np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-1) for x in (old, new)
    )
    differ: Flags = (old[:, None] != new).any(axis=2)
    return differ
