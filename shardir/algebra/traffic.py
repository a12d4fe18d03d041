"""Traffic: the elements that each device lacks, by the level of the nearest device that has them.

Counting is by dimension. Of a device's new shard, the elements along one dimension that are on
devices which differ from it along some axes only are those of the old shards whose other sub-axes
are its own; over dimensions such counts multiply. So only positions along axes that dimensions
share are enumerated.

Where shards are even and the axes of a dimension, cut into sub-axes of prime sizes, have equal
sizes in both layouts, place by place, nothing is enumerated. A device has all or nothing of a part
of its new shard, by whether its indices along the old and the new sub-axis of each place are equal.
"""

from collections import Counter
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Indices
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, SizedAxes, sizes_of

MAX_PAIRS = 1 << 22
"""The maximum number of pairs of devices that are counted one by one, which limits memory and time.
Of more, where axes cross, a device is taken to send as much as one receives at most: on average it
does."""

Counts = tuple[int, ...]


@lru_cache(maxsize=4096)
def _edges(mesh: Mesh, n: int, axes: Axes) -> Indices:
    """Return the start of each shard of a dimension, and the end of the last."""
    if sizes := sizes_of(axes):
        return np.array([*accumulate(sizes, initial=0)])
    shards = mesh.extent(axes)
    return np.minimum(np.arange(shards + 1) * mesh.largest(n, axes), n)


@lru_cache(maxsize=4096)
def _indices(mesh: Mesh, names: tuple[str, ...], axes: Axes) -> Indices:
    """Return the index along `axes` of each position along the full axes `names`."""
    stride, below = {}, 1
    for name in reversed(names):
        stride[name] = below
        below *= mesh.full(name)
    found, position = np.zeros(below, dtype=np.int64), np.arange(below)
    for a in axes:
        size = mesh.extent((a,))
        step = stride[a.name] * (mesh.full(a.name) // (a.pre * size))
        found = found * size + position // step % size
    return found


@lru_cache(maxsize=4096)
def _sets(
    mesh: Mesh, n: int, have: Axes, free: frozenset[Axis]
) -> tuple[Indices, Indices, Indices]:  # fmt: skip
    """Return the sets of shards that differ along the axes in `free` only: the number of that of
    each shard, the shards in the order of sets, each as set * count + shard, and the rows of all
    before each of these."""
    edges, stride = _edges(mesh, n, have), 1
    shards = np.arange(count := len(edges) - 1)
    found = np.zeros(count, dtype=np.int64)
    for a in reversed(have):
        size = mesh.extent((a,))
        if a not in free:
            found += stride * (shards // stride % size)
        stride *= size
    order = np.argsort(found, kind="stable")
    rows = np.concatenate([[0], np.cumsum(np.diff(edges)[order])])
    return found, found[order] * count + order, rows


@lru_cache(maxsize=65536)
def _held(
    mesh: Mesh, names: tuple[str, ...], n: int, have: Axes, want: Axes, free: frozenset[Axis]
) -> Indices:
    """Return, for each position along `names`, the number of elements of its new shard that are on
    devices which differ from it along the axes in `free` only."""
    edges, (sets, in_order, rows) = _edges(mesh, n, have), _sets(mesh, n, have, free)
    ends = _edges(mesh, n, want)[np.add.outer([0, 1], _indices(mesh, names, want))]
    here, count = sets[_indices(mesh, names, have)], len(sets)
    last = np.minimum(edges.searchsorted(ends, side="right") - 1, count - 1)
    before = rows[in_order.searchsorted(here * count + last)]  # in the set, and in those before it
    start, stop = before + np.where(sets[last] == here, ends - edges[last], 0)
    found: Indices = stop - start
    return found


def _components(mesh: Mesh, source: Layout, target: Layout) -> list[tuple[set[str], list[int]]]:
    """Return the groups of dimensions that share axes, before or after, with their axes."""
    found: list[tuple[set[str], list[int]]] = []
    for d, (s, t) in enumerate(zip(source.dims, target.dims, strict=True)):
        names, dims = {a.name for a in (*s, *t)}, [d]
        for other in [c for c in found if c[0] & names]:
            found.remove(other)
            names, dims = names | other[0], other[1] + dims
        found.append((names, dims))
    return found


@lru_cache(maxsize=65536)
def _cases(
    mesh: Mesh,
    names: tuple[str, ...],
    dims: tuple[tuple[int, Axes, Axes], ...],
    free: tuple[frozenset[Axis], ...],
) -> tuple[tuple[Counts, int], ...]:
    """Return the `shares` of the dimensions (size, source, target) alone, whose full axes are
    `names`: the distinct tuples, each with the number of its positions."""
    counts: Indices = np.ones((1, 1), dtype=np.int64)
    for n, have, want in dims:
        new = np.diff(_edges(mesh, n, want))[_indices(mesh, names, want)]
        held = [_held(mesh, names, n, have, want, f) for f in free]
        counts = counts * np.stack([new, *held])
    columns = counts[:, np.lexsort(counts)]
    changes = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
    ends = pairwise([0, *changes.tolist(), columns.shape[1]])
    return tuple((tuple(columns[:, start].tolist()), end - start) for start, end in ends)


@lru_cache(maxsize=65536)
def shares(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, free: tuple[frozenset[Axis], ...]
) -> Counter[Counts]:
    """Return, for each device, the number of elements of its new shard, and for each set of axes in
    `free` the number of them on devices that differ from it along those axes only: the distinct
    tuples, with the number of devices of each (up to a common factor)."""
    if (aligned := _aligned(mesh, shape, source, target, free)) is not None:
        return aligned
    return _counted(mesh, shape, source, target, free)


def _counted(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, free: tuple[frozenset[Axis], ...]
) -> Counter[Counts]:
    """Return the `shares` of any shards: by enumeration."""
    out: Counter[Counts] = Counter({(1,) * (len(free) + 1): 1})
    for axes, dims in _components(mesh, source, target):
        names = tuple(n for n, _ in mesh.axes if n in axes)
        here = tuple((shape[d], source.dims[d], target.dims[d]) for d in dims)
        both: Counter[Counts] = Counter()
        for (a, n), (b, m) in product(out.items(), _cases(mesh, names, here, free)):
            both[tuple(x * y for x, y in zip(a, b, strict=True))] += n * m
        out = both
    return out


@lru_cache(maxsize=65536)
def sub_axes_of_primes(mesh: Mesh, axes: Axes) -> tuple[tuple[Axis, Axis], ...]:
    """Return the sub-axes of prime sizes into which axes are cut, each with its axis."""
    found = []
    for axis in axes:
        at, end = mesh.span(axis)
        size, prime = end // at, 2
        while size > 1:
            while size % prime:
                prime += 1
            found.append((Axis(axis.name, at, prime), axis))
            at, size = at * prime, size // prime
    return tuple(found)


class Places(NamedTuple):
    """A dimension of which the sub-axes of prime sizes are aligned: those of the old split that
    have no new one in their place, and the pairs of those that differ, each with the axis of the
    old one; and all of them, old and new."""

    parts: tuple[tuple[Axis, int], ...]
    pairs: tuple[tuple[Axis, Axis, Axis], ...]
    used: frozenset[Axis]


@lru_cache(maxsize=65536)
def places(mesh: Mesh, have: Axes, want: Axes) -> Places | None:
    """Return the places of a dimension; None where sizes differ in one."""
    old, new = sub_axes_of_primes(mesh, have), sub_axes_of_primes(mesh, want)
    parts, pairs = [], []
    for place, (a, axis) in enumerate(old):
        b = new[place][0] if place < len(new) else None
        if b is None:
            parts.append((axis, a.size))
        elif a.size != b.size:
            return None
        elif a != b:
            pairs.append((a, b, axis))
    return Places(tuple(parts), tuple(pairs), frozenset(a for a, _ in (*old, *new)))


def _aligned(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, free: tuple[frozenset[Axis], ...]
) -> Counter[Counts] | None:
    """Return the `shares` of even shards whose sub-axes of prime sizes are aligned; None for
    others. Each set in `free` contains the one before."""
    shard, dims = 1, list[Places]()
    for n, have, want in zip(shape, source.dims, target.dims, strict=True):
        if have or want:
            size = mesh.extent(want)
            if n % size or n % mesh.extent(have) or sizes_of(have) or sizes_of(want):
                return None
            if (found := places(mesh, have, want)) is None:
                return None
            dims.append(found)
            n //= size
        shard *= n
    if _overlapping(mesh, frozenset[Axis]().union(*(d.used for d in dims))):
        return None
    out: Counter[Counts] = Counter()
    held, devices = [], []
    for among in free:
        parts, pairs = 1, []
        for d in dims:
            for axis, size in d.parts:
                if axis not in among:
                    parts *= size
            pairs += [(a, b) for a, b, axis in d.pairs if axis not in among]
        held.append(shard // parts)
        devices.append(solutions(pairs) if pairs else 1)  # one in so many has something
    total, counted = max([1, *devices]), 0
    for i, one_in in enumerate(devices):
        if n := total // one_in - counted:
            out[shard, *[0] * i, *held[i:]] += n
            counted += n
    if total > counted:
        out[shard, *[0] * len(free)] += total - counted
    return out


@lru_cache(maxsize=4096)
def _overlapping(mesh: Mesh, primes: frozenset[Axis]) -> bool:
    """Whether some sub-axes of prime sizes overlap."""
    return mesh.clash(tuple(primes)) is not None


def solutions(pairs: list[tuple[Axis, Axis]]) -> int:
    """Return n where one in n devices has equal indices along the sub-axes of each pair."""
    parent: dict[Axis, Axis] = {}
    n = 1
    for a, b in pairs:
        while a in parent:
            a = parent[a]
        while b in parent:
            b = parent[b]
        if a != b:
            parent[a] = b
            n *= a.size
    return n


@lru_cache(maxsize=65536)
def within(mesh: Mesh, level: int, sub_axes: Axes) -> frozenset[Axis]:
    """Return the sub-axes along which devices of one unit of a level differ; of level -1, none."""
    if level < 0:
        return frozenset()
    unit = mesh.cluster_or_default.units[level]
    return frozenset(a for a in sub_axes if mesh.stride(a) * mesh.extent((a,)) <= unit)


@lru_cache(maxsize=65536)
def fetched(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> tuple[Counts, ...]:
    """Return the elements that devices fetch from each level, innermost first, each from the device
    that has them and otherwise the same coordinates: the distinct cases."""
    source = cut(mesh, source, mesh.level_sub_axes)
    sub_axes = tuple(a for d in source.dims for a in d)
    levels = range(-1, len(mesh.cluster_or_default.levels) - 1)
    cases = shares(mesh, shape, source, target, tuple(within(mesh, i, sub_axes) for i in levels))
    found = set()
    for total, *held in cases:
        reached = [*held, total]
        found.add(tuple(b - a for a, b in pairwise(reached)))
    return tuple(sorted(found))


@lru_cache(maxsize=65536)
def sent(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """Return the maximum number of elements that a device sends in an exchange: the sum over the
    devices of its group of those that they fetch from it."""
    axes = mesh.simplify(exchange_axes(source, target))
    target = cut(mesh, target, axes)
    if mesh.clash(tuple({*mesh.cut(axes, target.used), *target.used})) is not None:
        if mesh.size * mesh.extent(axes) <= MAX_PAIRS:
            return _sent_to_each(mesh, shape, source, target, axes)
        return max(map(sum, fetched(mesh, shape, source, target)))
    splits = tuple(a for d in target.dims for a in d)
    group = frozenset(a for a in splits if any(mesh.overlap(a, b) for b in axes))
    replicas = mesh.extent(axes) // mesh.extent(tuple(group))  # devices that fetch the same
    cases = shares(mesh, shape, target, source, (frozenset(), group))
    return max(fetched * replicas - retained for _, retained, fetched in cases)


def _sent_to_each(mesh: Mesh, shape: Shape, source: Layout, target: Layout, axes: Axes) -> int:
    """Return the maximum where axes cross, so that replicas are not those along some axes: by what
    each device sends to each of its group, that along `axes`."""
    ranks = np.arange(mesh.size)
    group = ranks[:, None]
    for a in axes:
        stride, n = mesh.stride(a), mesh.extent((a,))
        first = group - stride * (group // stride % n)
        group = (first[..., None] + stride * np.arange(n)).reshape(mesh.size, -1)
    fetched, kept = np.ones(group.shape, dtype=np.int64), np.ones(mesh.size, dtype=np.int64)
    for size, have, want in zip(shape, source.dims, target.dims, strict=True):
        (low, high), (start, stop) = (
            (edges[:-1][at], edges[1:][at])
            for edges, at in (
                (_edges(mesh, size, some), _indices(mesh, tuple(n for n, _ in mesh.axes), some))
                for some in (have, want)
            )
        )
        rows = np.minimum(high[:, None], stop[group]) - np.maximum(low[:, None], start[group])
        fetched *= rows.clip(min=0)
        kept *= (np.minimum(high, stop) - np.maximum(low, start)).clip(min=0)
    return int((fetched.sum(axis=1) - kept).max())


@lru_cache(maxsize=65536)
def cut(mesh: Mesh, layout: Layout, sub_axes: Axes) -> Layout:
    """Return the layout with its axes cut where those of `sub_axes` begin and end."""

    def fine(axes: Axes) -> Axes:
        found, sizes = mesh.cut(axes, sub_axes), sizes_of(axes)
        return SizedAxes(found, sizes) if sizes else found

    partial = tuple(sorted(mesh.cut(layout.partial, sub_axes), key=mesh.order))
    return Layout(layout.mesh, tuple(map(fine, layout.dims))).with_partial(
        partial, layout.reduction
    )
