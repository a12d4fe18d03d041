"""Meshes and their axes: the numbers of ranks, and the groups of ranks along axes.

A mesh has named axes, major to minor, and a rank is the row-major index of its coordinates. A
sub-axis `d:(pre)size` is a part of its axis: with `n` the size of `d`, the coordinate along `d`
is written in the mixed radix `[pre, size, n / (pre * size)]`, major to minor, and the sub-axis is
its middle place. `d` alone is the full axis.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

from shardir.algebra.cluster import Cluster, default
from shardir.diagnostics import ShardirError, coded


class Axis(NamedTuple):
    """An axis, or its sub-axis `pre`, `size`; size 0 stands for the full axis."""

    name: str
    pre: int = 1
    size: int = 0

    def __str__(self) -> str:
        return f"{self.name}:({self.pre}){self.size}" if self.size else self.name


Axes = tuple[Axis, ...]


class SizedAxes(Axes):
    """Axes that split a dimension into shards of explicit sizes, as MindSpore's `manual_split`.

    A slice or concatenation of them is a plain tuple of axes, without sizes.

    Attributes:
        sizes: of the shards, in their order.
    """

    sizes: tuple[int, ...]

    def __new__(cls, axes: Axes, sizes: tuple[int, ...]) -> "SizedAxes":
        new = super().__new__(cls, axes)
        new.sizes = sizes
        return new

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SizedAxes) and tuple.__eq__(self, other) and self.sizes == other.sizes
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.sizes))

    def __getnewargs__(self) -> tuple[Axes, tuple[int, ...]]:
        return tuple(self), self.sizes


def sizes_of(axes: Axes) -> tuple[int, ...]:
    """Return the explicit sizes of shards; empty if they follow from the number of shards."""
    return axes.sizes if isinstance(axes, SizedAxes) else ()


def axes_text(axes: Axes) -> str:
    """Return the text of axes in a layout: `{dp, tp:(1)2}`."""
    sizes = f" sizes [{', '.join(map(str, axes.sizes))}]" if isinstance(axes, SizedAxes) else ""
    return "{" + ", ".join(map(str, axes)) + "}" + sizes


def shard_bounds(size: int, parts: int, k: int) -> tuple[int, int]:
    """Return the half-open range of shard `k` of a dimension of `size` cut into `parts`."""
    c = -(-size // parts)
    return min(k * c, size), min((k + 1) * c, size)


@dataclass(frozen=True)
class Mesh:
    """`@name <a = 2, b = 4>`: axis names and sizes, major to minor, and the cluster of the devices,
    if the mesh declares one."""

    name: str
    axes: tuple[tuple[str, int], ...]
    cluster: Cluster | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.axes, self.cluster))

    def __str__(self) -> str:
        return f"@{self.name} <{', '.join(f'{n} = {s}' for n, s in self.axes)}>"

    @cached_property
    def size(self) -> int:
        """The number of devices."""
        return prod(s for _, s in self.axes)

    @cached_property
    def cluster_or_default(self) -> Cluster:
        """The cluster that prices communication: the mesh's, or one level of default devices."""
        return self.cluster or default(self.size)

    @cached_property
    def without_memory(self) -> "Mesh":
        """The mesh with devices of unknown memory: no price depends on it."""
        if self.cluster is None or self.cluster.memory is None:
            return self
        return replace(self, cluster=replace(self.cluster, memory=None))

    @cached_property
    def level_sub_axes(self) -> Axes:
        """The minor sub-axes of each axis between the units of one level and the next one within,
        or the end of the axis. They do not overlap."""
        sub_axes, inner = list[Axis](), dict[str, int]()
        for unit in self.cluster_or_default.units:
            for name, size in self.axes:
                minor, rest = divmod(unit, self.stride(Axis(name)))
                if 1 < minor < size and not rest:
                    sub_axes.append(Axis(name, size // minor, minor // inner.get(name, 1)))
                    inner[name] = minor
        return tuple(sub_axes)

    def level(self, axes: Axes) -> int:
        """Return the level, counted from the innermost, over whose links a group over `axes`
        communicates: the first one of which a unit contains the group."""
        reach = 1
        for a in axes:
            size = self.extent((a,))
            if size > 1:
                reach = max(reach, size * self.stride(a))
        return next(i for i, unit in enumerate(self.cluster_or_default.units) if reach <= unit)

    def stride(self, axis: Axis) -> int:
        """Return the distance in ranks between neighbours along an axis or a sub-axis."""
        below = 1
        for n, s in reversed(self.axes):
            if n == axis.name:
                return below * (s // (axis.pre * (axis.size or s)))
            below *= s
        raise ShardirError(self._no_axis(axis.name))

    def check_cluster(self) -> None:
        """Raise ShardirError unless the cluster has as many devices as the mesh, and each unit
        consists of minor axes and a minor sub-axis of the next one (M5)."""
        if self.cluster is None:
            return
        units = self.cluster.units
        if units[-1] != self.size:
            message = (
                f"expected a cluster of {self.size} devices for mesh @{self.name}, got {units[-1]}"
            )
            fix = "change the size of an axis or the count of the outermost level"
            raise ShardirError(coded("M5", message, use=fix))
        for level, unit in zip(self.cluster.levels, units, strict=True):
            below = 1
            for _, s in reversed(self.axes):
                if unit % below == 0 and s % (unit // below) == 0:
                    break
                below *= s
            else:
                message = (
                    f"expected the minor axes of the mesh to fill a {level.name} of {unit} "
                    f"devices, got mesh {self}"
                )
                fix = "use axis sizes that divide it, minor axes first"
                raise ShardirError(coded("M5", message, use=fix))

    @cached_property
    def names(self) -> Axes:
        """All axes, major to minor."""
        return tuple(Axis(n) for n, _ in self.axes)

    def full(self, name: str) -> int:
        """Return the size of the axis `name`.

        Raises:
            ShardirError: the mesh has no such axis.
        """
        if (size := self._sizes.get(name)) is None:
            raise ShardirError(self._no_axis(name))
        return size

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def _no_axis(self, name: str) -> str:
        names = ", ".join(n for n, _ in self.axes)
        return f"expected an axis of mesh @{self.name} ({names}), got {name}"

    def extent(self, axes: Axes) -> int:
        """Return the number of positions along `axes`."""
        n = 1
        for a in axes:
            n *= a.size or self.full(a.name)
        return n

    def bounds(self, size: int, axes: Axes, k: int) -> tuple[int, int]:
        """Return the half-open range of shard `k` of a dimension of `size` split over `axes`."""
        if isinstance(axes, SizedAxes):
            start = sum(axes.sizes[:k])
            return start, start + axes.sizes[k]
        return shard_bounds(size, self.extent(axes), k)

    def largest(self, size: int, axes: Axes) -> int:
        """Return the size of the largest shard of a dimension of `size` split over `axes`."""
        if isinstance(axes, SizedAxes):
            return max(axes.sizes)
        return -(-size // self.extent(axes)) if axes else size

    def even(self, size: int, axes: Axes) -> bool:
        """Whether all shards of a dimension of `size` have equal sizes."""
        return len(set(sizes_of(axes))) <= 1 and size % self.extent(axes) == 0

    def span(self, axis: Axis) -> tuple[int, int]:
        """Return the range [pre, pre * size) of a sub-axis within its axis."""
        return axis.pre, axis.pre * (axis.size or self.full(axis.name))

    def overlap(self, a: Axis, b: Axis) -> bool:
        """Whether two sub-axes overlap: they are of one axis, and neither lies entirely before the
        other. So `d:(1)2` and `d:(3)2` overlap if `d` is 6."""
        if a.name != b.name:
            return False
        (a0, a1), (b0, b1) = self.span(a), self.span(b)
        return b0 % a1 != 0 and a0 % b1 != 0

    def clash(self, axes: Axes) -> tuple[Axis, Axis] | None:
        """Return the first two axes that overlap; None if there are none."""
        for i, a in enumerate(axes):
            for b in axes[:i]:
                if self.overlap(a, b):
                    return b, a
        return None

    def check_axis(self, axis: Axis) -> None:
        """Raise ShardirError unless the axis or sub-axis exists."""
        full = self.full(axis.name)
        if axis.size and (axis.pre < 1 or axis.size < 1 or full % (axis.pre * axis.size)):
            raise ShardirError(
                f"sub-axis {axis}: expected numbers whose product divides {full}, the size of axis "
                f"{axis.name}, got {axis.pre} * {axis.size}"
            )

    def order(self, axis: Axis) -> tuple[int, int]:
        """Return a sort key: the mesh's order, then major sub-axes first."""
        return [n for n, _ in self.axes].index(axis.name), axis.pre

    def simplify(self, axes: Axes) -> Axes:
        """Return the normal form: adjacent sub-axes are merged, a full axis has no `pre` and
        `size`, and sub-axes of size 1 and default sizes of shards are dropped."""
        out: list[Axis] = []
        for a in axes:
            pre, end = self.span(a)
            if end == pre:
                continue
            if out and out[-1].name == a.name and self.span(out[-1])[1] == pre:
                pre = out.pop().pre
            is_full = pre == 1 and end == self.full(a.name)
            out.append(Axis(a.name) if is_full else Axis(a.name, pre, end // pre))
        if isinstance(axes, SizedAxes):
            total, n = sum(axes.sizes), len(axes.sizes)
            default_bounds = [shard_bounds(total, n, k) for k in range(n)]
            if [stop - start for start, stop in default_bounds] != list(axes.sizes):
                return SizedAxes(tuple(out), axes.sizes)
        return tuple(out)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return the coordinate of `rank` along `axis`."""
        return rank // self.stride(axis) % (axis.size or self.full(axis.name))

    def index(self, rank: int, axes: Axes) -> int:
        """Return the row-major index of `rank` along `axes`, in their order."""
        i = 0
        for a in axes:
            i = i * self.extent((a,)) + self.coordinate(rank, a)
        return i

    def moved(self, rank: int, axes: Axes, index: int) -> int:
        """Return the rank at `index` along `axes`, with the other coordinates of `rank`."""
        for a in reversed(axes):
            size = self.extent((a,))
            rank += (index % size - self.coordinate(rank, a)) * self.stride(a)
            index //= size
        return rank

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ along `axes` only, each in row-major order."""
        return _groups(self, axes)

    def split(self, axis: Axis, first: int) -> tuple[Axis, Axis]:
        """Return an axis as two sub-axes, the major one of size `first`, which divides the axis."""
        pre, end = self.span(axis)
        size = end // pre
        return Axis(axis.name, pre, first), Axis(axis.name, pre * first, size // first)

    def without_minor(self, axes: Axes, minor: Axes) -> Axes | None:
        """Return `axes` without `minor` at the minor end, cutting an axis if necessary; None unless
        `axes` ends with `minor`."""
        rest, removed = list(self.simplify(axes)), list(self.simplify(minor))
        while removed:
            if not rest or rest[-1].name != removed[-1].name:
                return None
            (a0, a1), (b0, b1) = self.span(rest[-1]), self.span(removed[-1])
            if a1 != b1:
                return None
            name = rest[-1].name
            if b0 >= a0:
                removed.pop()
            else:
                removed[-1] = Axis(name, b0, a0 // b0)
            rest.pop()
            if b0 > a0:
                if b0 % a0:
                    return None
                rest.append(Axis(name, a0, b0 // a0))
        return self.simplify(tuple(rest))

    def without(self, axes: Axes, removed: Axes) -> Axes | None:
        """Return the set `axes` without `removed`, in mesh order; None unless it is a subset."""
        axes = self.simplify(tuple(sorted(axes, key=self.order)))
        removed = self.simplify(removed)
        rest = list(self.cut(axes, removed))
        for a in self.cut(removed, axes):
            if a not in rest:
                return None
            rest.remove(a)
        return self.simplify(tuple(sorted(rest, key=self.order)))

    def union(self, axes: Axes, others: Axes) -> Axes:
        """Return the axes of both sets, in mesh order; an axis in full where sub-axes cross."""
        both = {*self.cut(axes, others), *self.cut(others, axes)}
        while (crossing := self.clash(tuple(both))) is not None:
            name = crossing[0].name
            both = {*(a for a in both if a.name != name), Axis(name)}
        return self.simplify(tuple(sorted(both, key=self.order)))

    def cut(self, axes: Axes, others: Axes) -> Axes:
        """Return `axes` cut where `others` begin and end. An axis stays whole if sub-axes would
        cross, as 2 x 3 and 3 x 2 of an axis of 6."""
        return _cut(self, axes, others)

    def take(self, counts: tuple[int, ...]) -> tuple[Axes, ...] | None:
        """Return axes for each number of slices, dealing out the mesh's devices major first.

        This is MindSpore's device matrix: devices left over at the minor end compute redundantly.

        Returns:
            None if the axes cannot be cut so.
        """
        rest = list(self.names)
        taken: list[Axes] = []
        for count in counts:
            own: list[Axis] = []
            while count > 1:
                if not rest:
                    return None
                size = self.extent((rest[0],))
                part = gcd(size, count)
                if part == size:
                    own.append(rest.pop(0))
                elif part == count:
                    major, rest[0] = self.split(rest[0], part)
                    own.append(major)
                else:
                    return None
                count //= part
            taken.append(self.simplify(tuple(own)))
        return tuple(taken)


@lru_cache(maxsize=16384)
def _cut(mesh: Mesh, axes: Axes, others: Axes) -> Axes:
    out: list[Axis] = []
    for a in axes:
        start, end = mesh.span(a)
        inner = {c for b in others if b.name == a.name for c in mesh.span(b)}
        at = [start, *sorted(c for c in inner if start < c < end), end]
        if len(at) == 2 or any(hi % lo for lo, hi in pairwise(at)):
            out.append(a)
        else:
            out += [Axis(a.name, lo, hi // lo) for lo, hi in pairwise(at)]
    return tuple(out)


@lru_cache(maxsize=4096)
def _groups(mesh: Mesh, axes: Axes) -> tuple[tuple[int, ...], ...]:
    members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for rank in range(mesh.size):
        key = []
        for n, s in mesh.axes:
            along = mesh.coordinate(rank, Axis(n))
            for a in axes:
                if a.name == n:
                    unit = s // (a.pre * (a.size or s))
                    along -= mesh.coordinate(rank, a) * unit
            key.append(along)
        members.setdefault(tuple(key), []).append((mesh.index(rank, axes), rank))
    return tuple(tuple(r for _, r in sorted(m)) for m in members.values())
