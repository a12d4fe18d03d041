"""Meshes and their axes: how ranks are numbered, and which of them form a group.

A mesh has named axes, major to minor, and a rank is the row-major index of its coordinates. A
sub-axis `d:(pre)size` is one digit of its axis: with `n` the size of `d`, the coordinate along `d`
is read as three digits `[pre, size, n / (pre * size)]`, major to minor, and the middle one is
meant. `d` alone is the whole axis.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

from shardir.algebra.cluster import Cluster, flat
from shardir.algebra.errors import ShardirError


class Axis(NamedTuple):
    """An axis, or the part of it (a sub-axis) that `pre` and `size` select; `size` 0 is the whole
    axis."""

    name: str
    pre: int = 1
    size: int = 0

    def __str__(self) -> str:
        return f"{self.name}:({self.pre}){self.size}" if self.size else self.name


Axes = tuple[Axis, ...]


class Sized(Axes):
    """Axes that split a dimension into shards of stated sizes, in the order of the shards: the
    documents' `manual_split`. Only axes as they stand have sizes; a part of them, or a sum, is
    plain axes again."""

    sizes: tuple[int, ...]

    def __new__(cls, axes: Axes, sizes: tuple[int, ...]) -> "Sized":
        new = super().__new__(cls, axes)
        new.sizes = sizes
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sized) and tuple.__eq__(self, other) and self.sizes == other.sizes

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.sizes))

    def __getnewargs__(self) -> tuple[Axes, tuple[int, ...]]:
        return tuple(self), self.sizes


def sizes_of(axes: Axes) -> tuple[int, ...]:
    """The stated sizes of shards; empty where they follow from the number of shards."""
    return axes.sizes if isinstance(axes, Sized) else ()


def axes_text(axes: Axes) -> str:
    sizes = f" sizes [{', '.join(map(str, axes.sizes))}]" if isinstance(axes, Sized) else ""
    return "{" + ", ".join(map(str, axes)) + "}" + sizes


def shard_bounds(size: int, parts: int, k: int) -> tuple[int, int]:
    """The rows of shard `k` of a dimension of `size` cut into `parts`."""
    c = -(-size // parts)
    return min(k * c, size), min((k + 1) * c, size)


@dataclass(frozen=True)
class Mesh:
    """`@name <a = 2, b = 4>`: axis names and sizes, major to minor; and the cluster that its
    devices are of, where there is one."""

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

    @property
    def size(self) -> int:
        return prod(s for _, s in self.axes)

    @cached_property
    def cluster_or_default(self) -> Cluster:
        """What communication is priced by: the cluster, or one level that holds all devices."""
        return self.cluster or flat(self.size)

    @cached_property
    def level_sub_axes(self) -> Axes:
        """The sub-axes of axes that end where the units of a level do."""
        found = []
        for unit in self.cluster_or_default.units:
            for name, size in self.axes:
                minor, rest = divmod(unit, self.stride(Axis(name)))
                if 1 < minor < size and not rest:
                    found.append(Axis(name, size // minor, minor))
        return tuple(found)

    def level(self, axes: Axes) -> int:
        """The level, counted from the innermost, over whose links a group over `axes`
        communicates: the first of which one unit holds a whole group."""
        reach = 1
        for a in axes:
            size = self.extent((a,))
            if size > 1:
                reach = max(reach, size * self.stride(a))
        return next(i for i, unit in enumerate(self.cluster_or_default.units) if reach <= unit)

    def stride(self, axis: Axis) -> int:
        """How far in rank one step along an axis, or its sub-axis, is."""
        below = 1
        for n, s in reversed(self.axes):
            if n == axis.name:
                return below * (s // (axis.pre * (axis.size or s)))
            below *= s
        raise ShardirError(f"mesh @{self.name} has no axis {axis.name}")

    def check_cluster(self) -> None:
        """Raises ShardirError when the cluster's devices are not as many as the mesh's, or a
        unit's are not those of some axes and the minor sub-axis of one."""
        if self.cluster is None:
            return
        units = self.cluster.units
        if units[-1] != self.size:
            raise ShardirError(
                f"[M5] the cluster has {units[-1]} devices, the mesh @{self.name} {self.size}; "
                "change the size of an axis, or how many units the outermost level holds"
            )
        for level, unit in zip(self.cluster.levels, units, strict=True):
            below = 1
            for _, s in reversed(self.axes):
                if unit % below == 0 and s % (unit // below) == 0:
                    break
                below *= s
            else:
                raise ShardirError(
                    f"[M5] a {level.name} holds {unit} devices, which no minor axes of the mesh "
                    f"@{self.name} make up; choose sizes of axes that divide it, minor ones first"
                )

    @property
    def names(self) -> Axes:
        """All axes, major to minor."""
        return tuple(Axis(n) for n, _ in self.axes)

    def full(self, name: str) -> int:
        """The size of the axis `name`.

        Raises:
            ShardirError: the mesh has no such axis.
        """
        for n, s in self.axes:
            if n == name:
                return s
        raise ShardirError(
            f"mesh @{self.name} has no axis {name}; it has {', '.join(n for n, _ in self.axes)}"
        )

    def extent(self, axes: Axes) -> int:
        """The number of positions along `axes`."""
        n = 1
        for a in axes:
            n *= a.size or self.full(a.name)
        return n

    def bounds(self, size: int, axes: Axes, k: int) -> tuple[int, int]:
        """The rows of shard `k` of a dimension of `size` that `axes` split."""
        if isinstance(axes, Sized):
            start = sum(axes.sizes[:k])
            return start, start + axes.sizes[k]
        return shard_bounds(size, self.extent(axes), k)

    def largest(self, size: int, axes: Axes) -> int:
        """The rows of the largest shard of a dimension of `size` that `axes` split."""
        if isinstance(axes, Sized):
            return max(axes.sizes)
        return -(-size // self.extent(axes)) if axes else size

    def even(self, size: int, axes: Axes) -> bool:
        """Whether all shards of a dimension of `size` have as many rows."""
        return len(set(sizes_of(axes))) <= 1 and size % self.extent(axes) == 0

    def span(self, axis: Axis) -> tuple[int, int]:
        """Where an axis' sub-axis lies within its axis: the half-open range [pre, pre * size)."""
        return axis.pre, axis.pre * (axis.size or self.full(axis.name))

    def overlap(self, a: Axis, b: Axis) -> bool:
        """Whether two axes share devices' coordinates: both are of one axis, and neither ends
        where the other one can begin. So `d:(1)2` and `d:(3)2` overlap where `d` is 6."""
        if a.name != b.name:
            return False
        (a0, a1), (b0, b1) = self.span(a), self.span(b)
        return b0 % a1 != 0 and a0 % b1 != 0

    def clash(self, axes: Axes) -> tuple[Axis, Axis] | None:
        """The first two of the axes that overlap."""
        for i, a in enumerate(axes):
            for b in axes[:i]:
                if self.overlap(a, b):
                    return b, a
        return None

    def check_axis(self, axis: Axis) -> None:
        """Raises ShardirError when the axis, or the sub-axis, does not exist."""
        full = self.full(axis.name)
        if axis.size and (axis.pre < 1 or axis.size < 1 or full % (axis.pre * axis.size)):
            raise ShardirError(
                f"sub-axis {axis}: {axis.pre} * {axis.size} does not divide {full}, "
                f"the size of axis {axis.name}; take numbers whose product does"
            )

    def order(self, axis: Axis) -> tuple[int, int]:
        """A sort key: mesh order, then major sub-axis first."""
        return [n for n, _ in self.axes].index(axis.name), axis.pre

    def simplify(self, axes: Axes) -> Axes:
        """Normal form: sub-axes that stand side by side are one, a whole axis has no sub-axes,
        sub-axes of size 1 are left out, and so are the sizes that everyone expects."""
        out: list[Axis] = []
        for a in axes:
            pre, end = self.span(a)
            if end == pre:
                continue
            if out and out[-1].name == a.name and self.span(out[-1])[1] == pre:
                pre = out.pop().pre
            whole = pre == 1 and end == self.full(a.name)
            out.append(Axis(a.name) if whole else Axis(a.name, pre, end // pre))
        if isinstance(axes, Sized):
            total, n = sum(axes.sizes), len(axes.sizes)
            usual = [shard_bounds(total, n, k) for k in range(n)]
            if [stop - start for start, stop in usual] != list(axes.sizes):
                return Sized(tuple(out), axes.sizes)
        return tuple(out)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """The coordinate of `rank` along `axis`."""
        return rank // self.stride(axis) % (axis.size or self.full(axis.name))

    def index(self, rank: int, axes: Axes) -> int:
        """The row-major index of `rank` along `axes`, in the order in which they stand."""
        i = 0
        for a in axes:
            i = i * self.extent((a,)) + self.coordinate(rank, a)
        return i

    def moved(self, rank: int, axes: Axes, index: int) -> int:
        """The rank at `index` along `axes` whose other coordinates are those of `rank`."""
        for a in reversed(axes):
            size = self.extent((a,))
            rank += (index % size - self.coordinate(rank, a)) * self.stride(a)
            index //= size
        return rank

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ in `axes` alone, each in row-major order of `axes`."""
        return _groups(self, axes)

    def split(self, axis: Axis, first: int) -> tuple[Axis, Axis]:
        """An axis as two sub-axes, the major one of size `first` (which must divide it)."""
        pre, end = self.span(axis)
        size = end // pre
        return Axis(axis.name, pre, first), Axis(axis.name, pre * first, size // first)

    def without_minor(self, axes: Axes, minor: Axes) -> Axes | None:
        """`axes` less `minor` at its minor end, cutting an axis at a sub-axis where that is needed;
        None when it does not end so."""
        have, gone = list(self.simplify(axes)), list(self.simplify(minor))
        while gone:
            if not have or have[-1].name != gone[-1].name:
                return None
            (h0, h1), (g0, g1) = self.span(have[-1]), self.span(gone[-1])
            if h1 != g1:
                return None
            name = have[-1].name
            if g0 >= h0:
                gone.pop()
            else:
                gone[-1] = Axis(name, g0, h0 // g0)
            have.pop()
            if g0 > h0:
                if g0 % h0:
                    return None
                have.append(Axis(name, h0, g0 // h0))
        return self.simplify(tuple(have))

    def without(self, axes: Axes, gone: Axes) -> Axes | None:
        """`axes`, as a set, less `gone`; None when `gone` is not a part of it."""
        axes = self.simplify(tuple(sorted(axes, key=self.order)))
        gone = self.simplify(gone)
        have = list(self.cut(axes, gone))
        for d in self.cut(gone, axes):
            if d not in have:
                return None
            have.remove(d)
        return self.simplify(tuple(sorted(have, key=self.order)))

    def cut(self, axes: Axes, others: Axes) -> Axes:
        """`axes` as sub-axes, cut where those of `others` begin and end, so that they compare. An
        axis stays as it is where sub-axes would cross: 2 x 3 of 6, and 3 x 2."""
        out: list[Axis] = []
        for a in axes:
            start, end = self.span(a)
            inner = {c for b in others if b.name == a.name for c in self.span(b)}
            at = [start, *sorted(c for c in inner if start < c < end), end]
            if len(at) == 2 or any(hi % lo for lo, hi in pairwise(at)):
                out.append(a)
            else:
                out += [Axis(a.name, lo, hi // lo) for lo, hi in pairwise(at)]
        return tuple(out)

    def take(self, counts: tuple[int, ...]) -> tuple[Axes, ...] | None:
        """Axes for each count of slices, the mesh's devices dealt out major first.

        This is the documents' device matrix: what is left over repeats the calculation on the
        minor side. None when the axes' sizes can't be cut so.
        """
        rest = list(self.names)
        taken: list[Axes] = []
        for count in counts:
            mine: list[Axis] = []
            while count > 1:
                if not rest:
                    return None
                size = self.extent((rest[0],))
                part = gcd(size, count)
                if part == size:
                    mine.append(rest.pop(0))
                elif part == count:
                    major, rest[0] = self.split(rest[0], part)
                    mine.append(major)
                else:
                    return None
                count //= part
            taken.append(self.simplify(tuple(mine)))
        return tuple(taken)


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
