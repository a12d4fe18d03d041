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
    """Splits over sub-axes of prime sizes, each with the number of the axis that it is a part of,
    among the `owners`: [split, place], -1 after the last."""

    primes: Indices
    owner: Indices
    prime_axes: Axes
    owners: Axes


class SplitArrays:
    """Some splits of a dimension: `numbers` has those of their axes, among `axes`: [split, place],
    -1 after the last."""

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
        found: Extents = sizes[self.numbers].prod(axis=1)
        return found

    @cached_property
    def reach(self) -> Indices:
        """The level over whose links the shards of each split communicate."""
        levels = np.array([*(self.mesh.level((a,)) for a in self.axes), 0])
        found: Indices = levels[self.numbers].max(axis=1, initial=0)
        return found

    def over(self, axes: Axes) -> Indices:
        """Return the numbers of the axes among others, of which they are some: [split, place]."""
        return renumbered(self.numbers, self.axes, axes)

    @cached_property
    def primes(self) -> PrimeSplits:
        """The splits over sub-axes of prime sizes of their axes."""
        return self._cut([(a,) for a in self.axes])

    @cached_property
    def primes_by_level(self) -> PrimeSplits:
        """The same of their axes cut at the units of levels."""
        return self._cut([self.mesh.cut((a,), self.mesh.level_sub_axes) for a in self.axes])

    def _cut(self, parts: Sequence[Axes]) -> PrimeSplits:
        """Return the splits over primes of the parts of each axis."""
        owners = tuple([piece for some in parts for piece in some])
        at = {a: i for i, a in enumerate(owners)}
        each = [sub_axes_of_primes(self.mesh, some) for some in parts]
        primes = tuple(dict.fromkeys(prime for some in each for prime, _ in some))
        numbers = {prime: i for i, prime in enumerate(primes)}
        width = max(map(len, each), default=0)
        table = np.full((len(parts) + 1, width, 2), -1)
        for i, some in enumerate(each):
            table[i, : len(some)] = [(numbers[prime], at[piece]) for prime, piece in some]
        found = table[self.numbers].reshape(len(self.numbers), self.numbers.shape[1] * width, 2)
        order = (found[..., 0] < 0).argsort(axis=1, kind="stable")  # those that are none last
        found = np.take_along_axis(found, order[..., None], axis=1)
        return PrimeSplits(found[..., 0], found[..., 1], primes, owners)


def renumbered(numbers: Indices, axes: Axes, others: Axes) -> Indices:
    """Return the numbers of axes among `others` in place of those among `axes`."""
    at = {a: i for i, a in enumerate(others)}
    found: Indices = np.array([*(at[a] for a in axes), -1])[numbers]
    return found


def common(*some: Axes) -> tuple[Axis, ...]:
    """Return the axes that occur in any of some."""
    return tuple(dict.fromkeys(a for axes in some for a in axes))


TableEntries = np.ndarray[Any, Any]


def exchange_costs(
    mesh: Mesh, old: Sequence[Axes], new: Sequence[Axes], source: Indices, target: Indices
) -> tuple[Table, Table]:
    """Return the latency of each exchange, and the seconds for each byte of the global tensor; NaN
    where there is no closed form (see `ManyExchanges`)."""
    return ManyExchanges(mesh, SplitArrays(mesh, old), SplitArrays(mesh, new)).costs(source, target)


class ManyExchanges:
    """Exchanges between layouts over splits of a dimension, before and after; their axes are equal
    or disjoint.

    `source` and `target` are the numbers of the splits of all dimensions, of the old and of the new
    ones: [exchange, dimension].
    """

    def __init__(self, mesh: Mesh, old: SplitArrays, new: SplitArrays):
        self.mesh, self.old, self.new = mesh, old, new
        self.axes = common(old.axes, new.axes)
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
        """The share of the new shard, along a dimension, that the device which receives for longest
        has on those of its unit of each level (first on itself), and whether these are known: [old,
        new]."""
        mesh, found = self.mesh, []
        fine = self.old.primes_by_level
        fetched = _Overlaps(fine, self.new.primes)
        for level in range(-1, len(self.levels) - 1):
            near = within(mesh, level, fine.owners)
            far = [i for i, piece in enumerate(fine.owners) if piece not in near]
            lacks = fetched.paired[far].any(axis=0)
            found.append(np.where(lacks, 0, 1 / fetched.parts[far].prod(axis=0)))
        return found, fetched.known

    def lowest(self, source: Indices, target: Indices) -> tuple[Table, Table]:
        """Return lower bounds of the costs: those without packing, which are found in less time."""
        tables, _ = self.shares
        ends = _ends(source, target, self.new)
        reached = [*(_product(table, ends) for table in tables), np.ones(1)]
        receiving = sum(
            (b - a) / level.bandwidth
            for (a, b), level in zip(pairwise(reached), self.levels, strict=True)
        )
        return self._latencies(ends), self.byte_factor * receiving / self._wanted(target)

    def latencies(self, source: Indices, target: Indices) -> Table:
        """Return the latency of each exchange, of shards of any sizes."""
        return self._latencies(_ends(source, target, self.new))

    def _latencies(self, ends: list[Indices]) -> Table:
        reach = np.maximum.reduce(_entries(self._reach, ends), initial=0)
        n = _product(self._devices, ends)
        messages = np.frexp(n - 1)[1]  # the bits of n - 1, as `rounds`
        each = np.array([level.latency for level in self.levels])
        found: Table = self.factor * (messages * each[reach]) + np.where(n > 1, self.call, 0.0)
        return found

    @cached_property
    def _devices(self) -> Table:
        """The devices along the axes of an old split that changes, else 1: [old, new]."""
        return np.where(self.changes, self.old.extents[:, None], 1.0)

    @cached_property
    def _reach(self) -> Indices:
        """The level over whose links these communicate: [old, new]."""
        return np.where(self.changes, self.old.reach[:, None], 0)

    def _wanted(self, target: Indices) -> Table:
        """Return the numbers of shards after the exchanges."""
        found: Table = self.new.extents[target].prod(axis=1)
        return found

    @cached_property
    def _axes_of(self) -> tuple[Flags, Flags]:
        """The axes of each old and new split: [split, axis]."""
        every = np.arange(len(self.axes))
        old, new = ((numbers[..., None] == every).any(axis=1) for numbers in self._numbers)
        return old, new

    @cached_property
    def _backward(self) -> "_Overlaps":
        return _Overlaps(self.new.primes, self.old.primes)

    @cached_property
    def _of_new(self) -> Indices:
        """The numbers of the new axes, the owners of `_backward`."""
        return np.array([self.axes.index(a) for a in self.new.axes], dtype=np.int64)

    def costs(self, source: Indices, target: Indices) -> tuple[Table, Table]:
        """Return the latency of each exchange, and the seconds for each byte of the global tensor;
        NaN where there is no closed form."""
        latency, rate = self.lowest(source, target)
        ends, changed = _ends(source, target, self.new), self.changes[source, target]
        n = _product(self._devices, ends)
        before = 1 / self.old.extents[source].prod(axis=1)

        # the maximum that a device sends: to all that want it, or less what it keeps
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
        rate += copying(1, self.mesh) * (2 * sent + lacking / self._wanted(target))
        known = forward[source, target].all(axis=1) & backward & self.closed
        return np.where(known, latency, np.nan), np.where(known, rate, np.nan)


@lru_cache(maxsize=16384)
def exchange_forms(mesh: Mesh, ends: tuple[tuple[Axes, Axes], ...]) -> Forms:
    """Return the forms of one exchange, from the old and the new split of each split dimension.
    They are equal for all tensors that both layouts split evenly."""
    shape = (*[2 * mesh.size] * len(ends), mesh.size**2)
    before, after = (Layout(mesh.name, (*dims, ())) for dims in zip(*ends, strict=True))
    step = CollectiveStep("exchange", exchange_axes(before, after), after)
    return step_forms(mesh, shape, before, step)


class _Overlaps:
    """For each old and new split: by each axis, the number of parts into which it divides what a
    device has of a new shard, and whether an index along it must be equal to one along another:
    [axis, old, new], of the owners of the old ones."""

    def __init__(self, old: PrimeSplits, new: PrimeSplits):
        every = common(old.prime_axes, new.prime_axes)
        sizes = np.array([*(prime.size for prime in every), 0], dtype=np.int64)
        before = renumbered(old.primes, old.prime_axes, every)
        after = renumbered(new.primes, new.prime_axes, every)
        self.parts = np.ones((len(old.owners), len(before), len(after)))
        self.paired = np.zeros(self.parts.shape, dtype=np.bool_)
        self.known = np.ones(self.parts.shape[1:], dtype=np.bool_)
        for place in range(before.shape[1]):
            rows = np.flatnonzero(before[:, place] >= 0)
            have, axis = before[rows, place], old.owner[rows, place]
            want = after[:, place] if place < after.shape[1] else np.full(len(after), -1)
            some = have[:, None]
            gone, differs = want < 0, (want >= 0) & (some != want)
            self.known[rows] &= ~differs | (sizes[some] == sizes[want])
            self.parts[axis, rows] *= np.where(gone, sizes[some], 1)
            self.paired[axis, rows] |= differs

    def of(self, ends: list[Indices]) -> tuple[Table, Flags, Flags]:
        """Return these of all dimensions together, [axis, exchange], and whether they are known."""
        paired = np.logical_or.reduce(_entries(self.paired, ends))
        known = np.logical_and.reduce(_entries(self.known, ends))
        return _product(self.parts, ends), paired, known


def _ends(source: Indices, target: Indices, new: SplitArrays) -> list[Indices]:
    """Return for each dimension the places of the exchanges in a table [old, new]."""
    count, rank = len(new.splits), max(source.shape[1], target.shape[1])
    return [source[:, d] * count + target[:, d] for d in range(rank)]


def _entries(table: TableEntries, ends: list[Indices]) -> list[TableEntries]:
    """Return for each dimension the entries of a table [..., old, new] for exchanges."""
    *first, old, new = table.shape
    flat = table.reshape(*first, old * new)
    return [flat.take(end, axis=-1) for end in ends]


def _product(table: Table, ends: list[Indices]) -> Table:
    """Return the products of these over all dimensions."""
    return reduce(mul, _entries(table, ends), np.ones(1))


def _differ(old: Indices, new: Indices) -> Flags:
    """Return whether splits have different axes: [old, new]."""
    width = max(old.shape[1], new.shape[1])
    old, new = (
        np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-1) for x in (old, new)
    )
    found: Flags = (old[:, None] != new).any(axis=2)
    return found
