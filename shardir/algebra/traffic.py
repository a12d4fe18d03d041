"""Traffic: the elements that each device lacks, by the level of the nearest device that has them.

Elements are counted by dimension, and counts of dimensions multiply. Along one dimension, the
elements of a new shard on devices that differ along some axes only are those of the old shards with
equal indices along the other sub-axes. So only positions along axes that dimensions share are
enumerated.

Nothing is enumerated if shards are even and, place by place, the axes of a dimension in both
layouts have equal sizes once cut into sub-axes of prime sizes. Then a device has all or nothing of
a part of its new shard: all if its indices along the old and the new sub-axis of a place are equal.
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
"""Bounds the pairs of devices that are counted one by one, and so memory (34 MB an array) and time.
Beyond it, for crossing axes, the maximum sent is taken to be the maximum received: means are
equal."""

Counts = tuple[int, ...]
"""The elements of a new shard; then, for each set of axes, those that devices hold which differ
along these axes only."""


@lru_cache(maxsize=4096)
def _edges(mesh: Mesh, n: int, axes: Axes) -> Indices:
    """Return the start of each shard of a dimension, and the end of the last: [shard + 1]."""
    if sizes := sizes_of(axes):
        return np.array([*accumulate(sizes, initial=0)])
    shards = mesh.extent(axes)
    return np.minimum(np.arange(shards + 1) * mesh.largest(n, axes), n)


@lru_cache(maxsize=4096)
def _indices(mesh: Mesh, names: tuple[str, ...], axes: Axes) -> Indices:
    """Return the index along `axes` of each position along the mesh axes `names`: [position]."""
    stride, below = {}, 1
    for name in reversed(names):
        stride[name] = below
        below *= mesh.full(name)
    index, position = np.zeros(below, dtype=np.int64), np.arange(below)
    for a in axes:
        size = mesh.extent((a,))
        step = stride[a.name] * (mesh.full(a.name) // (a.pre * size))
        index = index * size + position // step % size
    return index


@lru_cache(maxsize=4096)
def _sets(
    mesh: Mesh, n: int, have: Axes, free: frozenset[Axis]
) -> tuple[Indices, Indices, Indices]:  # fmt: skip
    """Return the sets of shards that differ along the axes in `free` only.

    Returns:
        The set of each shard: [shard]; the shards in the order of sets, each as set * count +
        shard: [shard]; and the rows of all shards before each in that order: [shard + 1].
    """
    edges, stride = _edges(mesh, n, have), 1
    shards = np.arange(count := len(edges) - 1)
    sets = np.zeros(count, dtype=np.int64)
    for a in reversed(have):
        size = mesh.extent((a,))
        if a not in free:
            sets += stride * (shards // stride % size)
        stride *= size
    order = np.argsort(sets, kind="stable")
    rows = np.concatenate([[0], np.cumsum(np.diff(edges)[order])])
    return sets, sets[order] * count + order, rows


@lru_cache(maxsize=65536)
def _held(
    mesh: Mesh, names: tuple[str, ...], n: int, have: Axes, want: Axes, free: frozenset[Axis]
) -> Indices:
    """Return, for each position along `names`, the number of elements of its new shard on devices
    that differ from it along the axes in `free` only: [position]."""
    edges, (sets, in_order, rows) = _edges(mesh, n, have), _sets(mesh, n, have, free)
    ends = _edges(mesh, n, want)[np.add.outer([0, 1], _indices(mesh, names, want))]
    own_set, count = sets[_indices(mesh, names, have)], len(sets)
    last = np.minimum(edges.searchsorted(ends, side="right") - 1, count - 1)
    before = rows[in_order.searchsorted(own_set * count + last)]  # in the set and in earlier sets
    start, stop = before + np.where(sets[last] == own_set, ends - edges[last], 0)
    held: Indices = stop - start
    return held


def _components(mesh: Mesh, source: Layout, target: Layout) -> list[tuple[set[str], list[int]]]:
    """Return the groups of dimensions that share mesh axes in either layout, with these axes."""
    groups: list[tuple[set[str], list[int]]] = []
    for d, (s, t) in enumerate(zip(source.dims, target.dims, strict=True)):
        names, dims = {a.name for a in (*s, *t)}, [d]
        for group in [g for g in groups if g[0] & names]:
            groups.remove(group)
            names, dims = names | group[0], group[1] + dims
        groups.append((names, dims))
    return groups


@lru_cache(maxsize=65536)
def _cases(
    mesh: Mesh,
    names: tuple[str, ...],
    dims: tuple[tuple[int, Axes, Axes], ...],
    free: tuple[frozenset[Axis], ...],
) -> tuple[tuple[Counts, int], ...]:
    """Return the distinct `shares` of some dimensions alone, each with the number of its positions.

    Args:
        names: the mesh axes of the dimensions.
        dims: the size, the old and the new split of each.
    """
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
    """Return the distinct `Counts` of devices, with the number of devices of each, up to a common
    factor.

    Args:
        free: sets of axes; each contains the one before.
    """
    if (aligned := _aligned_shares(mesh, shape, source, target, free)) is not None:
        return aligned
    return _enumerated_shares(mesh, shape, source, target, free)


def _enumerated_shares(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, free: tuple[frozenset[Axis], ...]
) -> Counter[Counts]:
    """Return the `shares` of any shards, by enumeration."""
    cases: Counter[Counts] = Counter({(1,) * (len(free) + 1): 1})
    for axes, dims in _components(mesh, source, target):
        names = tuple(n for n, _ in mesh.axes if n in axes)
        splits = tuple((shape[d], source.dims[d], target.dims[d]) for d in dims)
        products: Counter[Counts] = Counter()
        for (a, n), (b, m) in product(cases.items(), _cases(mesh, names, splits, free)):
            products[tuple(x * y for x, y in zip(a, b, strict=True))] += n * m
        cases = products
    return cases


@lru_cache(maxsize=65536)
def sub_axes_of_primes(mesh: Mesh, axes: Axes) -> tuple[tuple[Axis, Axis], ...]:
    """Return the sub-axes of prime sizes into which axes are cut, each with its axis."""
    primes = []
    for axis in axes:
        at, end = mesh.span(axis)
        size, prime = end // at, 2
        while size > 1:
            while size % prime:
                prime += 1
            primes.append((Axis(axis.name, at, prime), axis))
            at, size = at * prime, size // prime
    return tuple(primes)


class Places(NamedTuple):
    """A dimension whose old and new sub-axes of prime sizes are aligned, place by place.

    Attributes:
        parts: axes and sizes of old sub-axes without a new one in their place.
        pairs: old and new sub-axes of a place that differ, and the axis of the old one.
        used: all sub-axes, old and new.
    """

    parts: tuple[tuple[Axis, int], ...]
    pairs: tuple[tuple[Axis, Axis, Axis], ...]
    used: frozenset[Axis]


@lru_cache(maxsize=65536)
def places(mesh: Mesh, have: Axes, want: Axes) -> Places | None:
    """Return the places of a dimension; None if the sizes of a place differ."""
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


def _aligned_shares(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, free: tuple[frozenset[Axis], ...]
) -> Counter[Counts] | None:
    """Return the `shares` of even shards with aligned sub-axes (`Places`); None for other
    shards."""
    shard, dims = 1, list[Places]()
    for n, have, want in zip(shape, source.dims, target.dims, strict=True):
        if have or want:
            size = mesh.extent(want)
            if n % size or n % mesh.extent(have) or sizes_of(have) or sizes_of(want):
                return None
            if (aligned := places(mesh, have, want)) is None:
                return None
            dims.append(aligned)
            n //= size
        shard *= n
    if _overlapping(mesh, frozenset[Axis]().union(*(d.used for d in dims))):
        return None
    cases: Counter[Counts] = Counter()
    held, one_of = [], []  # the elements that one device of so many holds; others hold none
    for axes in free:
        parts, pairs = 1, []
        for d in dims:
            for axis, size in d.parts:
                if axis not in axes:
                    parts *= size
            pairs += [(a, b) for a, b, axis in d.pairs if axis not in axes]
        held.append(shard // parts)
        one_of.append(solutions(pairs) if pairs else 1)
    total, counted = max([1, *one_of]), 0
    for i, devices in enumerate(one_of):
        if n := total // devices - counted:
            cases[shard, *[0] * i, *held[i:]] += n
            counted += n
    if total > counted:
        cases[shard, *[0] * len(free)] += total - counted
    return cases


@lru_cache(maxsize=4096)
def _overlapping(mesh: Mesh, primes: frozenset[Axis]) -> bool:
    """Whether some sub-axes of prime sizes overlap."""
    return mesh.clash(tuple(primes)) is not None


def solutions(pairs: list[tuple[Axis, Axis]]) -> int:
    """Return n: one in n devices has equal indices along the two sub-axes of every pair."""
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
    """Return the sub-axes along which devices of one unit of a level differ; none for level -1."""
    if level < 0:
        return frozenset()
    unit = mesh.cluster_or_default.units[level]
    return frozenset(a for a in sub_axes if mesh.stride(a) * mesh.extent((a,)) <= unit)


@lru_cache(maxsize=65536)
def fetched(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> tuple[Counts, ...]:
    """Return the elements that a device fetches from each level in an exchange, innermost level
    first: the distinct cases of devices."""
    source = cut(mesh, source, mesh.level_sub_axes)
    sub_axes = tuple(a for d in source.dims for a in d)
    levels = range(-1, len(mesh.cluster_or_default.levels) - 1)
    cases = shares(mesh, shape, source, target, tuple(within(mesh, i, sub_axes) for i in levels))
    return tuple(sorted({
        tuple(b - a for a, b in pairwise([*held, total])) for total, *held in cases
    }))  # fmt: skip


@lru_cache(maxsize=65536)
def sent(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """Return the maximum number of elements that a device sends in an exchange, over all devices of
    its group."""
    axes = mesh.simplify(exchange_axes(source, target))
    target = cut(mesh, target, axes)
    if mesh.clash(tuple({*mesh.cut(axes, target.used), *target.used})) is not None:
        if mesh.size * mesh.extent(axes) <= MAX_PAIRS:
            return _sent_where_axes_cross(mesh, shape, source, target, axes)
        return max(map(sum, fetched(mesh, shape, source, target)))
    splits = tuple(a for d in target.dims for a in d)
    group = frozenset(a for a in splits if any(mesh.overlap(a, b) for b in axes))
    replicas = mesh.extent(axes) // mesh.extent(tuple(group))  # devices that fetch equal elements
    cases = shares(mesh, shape, target, source, (frozenset(), group))
    return max(fetched * replicas - retained for _, retained, fetched in cases)


def _sent_where_axes_cross(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, axes: Axes
) -> int:
    """Like `sent`, for sub-axes that cross: overlap of each peer's new shard with a device's old
    one, summed over the group along `axes`."""
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
                (_edges(mesh, size, split), _indices(mesh, tuple(n for n, _ in mesh.axes), split))
                for split in (have, want)
            )
        )
        rows = np.minimum(high[:, None], stop[group]) - np.maximum(low[:, None], start[group])
        fetched *= rows.clip(min=0)
        kept *= (np.minimum(high, stop) - np.maximum(low, start)).clip(min=0)
    return int((fetched.sum(axis=1) - kept).max())


@lru_cache(maxsize=65536)
def cut(mesh: Mesh, layout: Layout, sub_axes: Axes) -> Layout:
    """Return the layout with its axes cut where `sub_axes` begin and end."""

    def fine(axes: Axes) -> Axes:
        parts, sizes = mesh.cut(axes, sub_axes), sizes_of(axes)
        return SizedAxes(parts, sizes) if sizes else parts

    partial = tuple(sorted(mesh.cut(layout.partial, sub_axes), key=mesh.order))
    return Layout(layout.mesh, tuple(map(fine, layout.dims))).with_partial(
        partial, layout.reduction
    )
