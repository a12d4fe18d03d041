"""Lower bounds of any redistribution: elements that devices must receive, and seconds.

Elements. Let p devices hold partial values of an element (p = 1 of a complete value). Divide the
devices into groups, each of which must end with the full element among its members: single devices,
or the devices along the axes over which the target is partial. A group that has c of the p partial
values lacks p - c. Each message takes at most one partial value away from its device. So at least
p - c messages are received before the first group has all partial values, and each other group that
lacks some receives one message more after that. All devices together receive at least
p - c + (groups - 1) messages. By this argument Patarasuk and Yuan (Bandwidth optimal all-reduce
algorithms for clusters of workstations, 2009) show 2 (n - 1) / n of a value for an all-reduce; for
a reduce-scatter it gives (n - 1) / n. Rings reach both with even shards.

The device that receives most receives at least the mean, and at least the elements that one device
or group lacks. The argument holds for the units of a level too, and the links between them.

Seconds. A step costs the latency of a form, and its bytes times the form's rate (forms.py), both
times the cluster's ratio for its kind. So the bound is the sum of a bound of all bytes and a bound
of all latencies. A plan may use any kinds, since a complete value may become partial on the way at
no cost. So the bound takes the smallest ratio.

Bytes. Each form takes at least the time of a program of its step in which every device receives as
many bytes over the links of each level. This program is the form itself, with two exceptions: for
the tree of an all-reduce halving needs fewer bytes; and a form that is not hierarchical counts all
bytes at the outermost links, though some cross inner links, which are at least as fast. (If inner
links are slower, the bound counts the fastest links at least as far out.) Packing is not counted.
So the sum over steps is at least the time in which a redistribution receives its bytes.

If a complete value becomes partial, one device of each group has an element and the others have
zeros, or all have it. By an all-reduce of n such devices, or units, at most n - 1 get the element,
and it is received 2 (n - 1) times. By a reduce-scatter one device gets it, and it is received n - 1
times. So between complete layouts the mean counts the ratio of an all-reduce twice. The maximum
does not: one device may get as many elements as it receives (n = 2).

Latencies. Let a collective be over sub-axes of n_1, n_2, ... devices, each of one level. Its
latency is at least the sum of log2 n_i a_i, where a_i is the smallest latency from that level
outwards: n - 1 and ceil(log2 n) are at least log2 n; the logarithm of a product is a sum; and a
form counts the outermost level's latency for all sub-axes, or, if hierarchical, the latency of each
level. If the mesh's size is a power of two times at most one odd prime, ceil(log2 n_i) replaces
log2 n_i: the prime is in one n_i only, so the rounds still add up. An all-reduce has twice the
latency. Every plan has these sub-axes in collectives:

    sub-axis                                       collectives
    partial, and the target splits over it         reduce-scatter or all-reduce
    partial, and the target is unsharded on it     all-reduce; or reduce-scatter, and then a
                                                   collective that ends the split
    splits, and the target does not use it         all-gather or exchange; or the value becomes
                                                   partial, and then a reduction
    splits another dimension of the target, or     any: except by an exchange over all axes of a
    stands behind the first sub-axis that          dimension, only its minor sub-axes are added or
    differs in its dimension                       removed

Local steps have no axes in a collective, and there are no other moves.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import isqrt, log2, prod
from typing import NamedTuple

from shardir.algebra.collectives import COLLECTIVES, AxisState, Collective, between
from shardir.algebra.forms import rounds
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, sizes_of
from shardir.algebra.traffic import cut, shares, within

MAX_COUNTED_DEVICES = 64
"""Bounds the devices on which elements of uneven shards are counted device by device, in bounds of
time and in tables of paths: on more the count takes longer than it saves."""


def refined(mesh: Mesh, source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Return both layouts, cut at each other's sub-axes and at the units of levels.

    Unless sub-axes cross, any two are then equal or disjoint, and each is of one level.
    """
    sub_axes = (*source.used, *target.used, *mesh.level_sub_axes)
    return cut(mesh, source, sub_axes), cut(mesh, target, sub_axes)


@lru_cache(maxsize=65536)
def bound(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """Return a lower bound of the elements received by the device that receives most."""
    source, target = refined(mesh, source.simplified(mesh), target.simplified(mesh))
    if crossing(mesh, source, target):
        is_partial = source.partial or target.partial
        return 0 if is_partial else _maximum_lacking(mesh, shape, source, target)
    ((total, devices),) = _total_received(mesh, shape, source, target, (-1,))
    return max(-(-total // devices), _maximum_lacking(mesh, shape, source, target))


def seconds_bound(mesh: Mesh, shape: Shape, source: Layout, target: Layout, itemsize: int) -> float:
    """Return a lower bound of the seconds of any plan between two refined layouts; 0 if their
    sub-axes cross."""
    if crossing(mesh, source, target):
        return 0.0
    levels, byte_seconds = outward_links(mesh)
    counted = mesh.size <= MAX_COUNTED_DEVICES or (
        source.even(mesh, shape) and target.even(mesh, shape)
    )
    mean = 0.0  # seconds of the mean traffic of a device, over levels
    traffic = _total_received(mesh, shape, source, target, levels, counted)
    for (total, devices), seconds in zip(traffic, byte_seconds, strict=True):
        if total:
            mean += total / devices * itemsize * seconds
    largest = _maximum_lacking if counted else _lacking_of_first
    maximum = largest(mesh, shape, source, target) * itemsize * byte_seconds[0]
    factors = minimum_factors(mesh)
    complete = not (source.partial or target.partial)
    mean *= factors.complete if complete else factors.received
    return max(mean, factors.received * maximum) + latency_bound(mesh, source, target)


@lru_cache(maxsize=256)
def outward_links(mesh: Mesh) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the levels outside of which the fastest links are slower than outside of the level
    before (-1: the device itself), and by how many seconds a byte."""
    links = mesh.cluster_or_default.levels
    best = [max(l.bandwidth for l in links[i:]) for i in range(len(links))]
    slower = [i for i in range(len(best)) if not i or best[i] < best[i - 1]]
    seconds = (1 / best[i] - (1 / best[i - 1] if i else 0) for i in slower)
    return tuple(i - 1 for i in slower), tuple(seconds)


@lru_cache(maxsize=65536)
def latency_bound(mesh: Mesh, source: Layout, target: Layout) -> float:
    """Return a lower bound of the latencies of any plan between two refined layouts, in seconds:
    the cheap part of `seconds_bound`."""
    if crossing(mesh, source, target):
        return 0.0
    total = 0.0
    for sub_axis, factor in _collective_sub_axes(mesh, source, target):
        total += factor * minimum_latency(mesh, sub_axis)
    return total


@lru_cache(maxsize=4096)
def minimum_latency(mesh: Mesh, sub_axis: Axis) -> float:
    """Return a lower bound of the share of a sub-axis in a collective's latency, in seconds."""
    levels = mesh.cluster_or_default.levels[mesh.level((sub_axis,)) :]
    n = mesh.extent((sub_axis,))
    return (rounds(n) if _has_one_odd_prime(mesh) else log2(n)) * min(l.latency for l in levels)


@lru_cache(maxsize=256)
def _has_one_odd_prime(mesh: Mesh) -> bool:
    """Whether the mesh's size is a power of two times at most one odd prime."""
    odd = mesh.size // (mesh.size & -mesh.size)
    return all(odd % k for k in range(3, isqrt(odd) + 1, 2))


class MinimumFactors(NamedTuple):
    """Minima, over kinds of collectives, of the cluster's ratios.

    Attributes:
        received: of bytes that a device receives.
        complete: of bytes that all devices together receive between complete layouts.
        spread: of the latency of a broadcast, as all of the following.
        moved: of any collective.
        ended: of a collective that ends a split.
        scattered: of a reduce-scatter.
        reduced: of an all-reduce.
    """

    received: float
    complete: float
    spread: float
    moved: float
    ended: float
    scattered: float
    reduced: float


@lru_cache(maxsize=256)
def minimum_factors(mesh: Mesh) -> MinimumFactors:
    """Return the minimum ratios of a mesh's cluster."""
    times, bytes = mesh.cluster_or_default.times, mesh.cluster_or_default.byte_times
    planned = [c for c in COLLECTIVES.values() if c.planned and c.communicates]

    def factor(*kinds: Collective) -> float:
        return min(times[c.name] * c.rounds for c in kinds)

    kinds = [c for c in planned if c.start is not AxisState.ROOT]
    return MinimumFactors(
        min(bytes[c.name] for c in planned),
        min(bytes[c.name] * c.rounds for c in planned),
        factor(between(AxisState.ROOT, AxisState.REPLICATED)),
        factor(*kinds),
        factor(*(c for c in kinds if c.end is not AxisState.SHARDED)),
        factor(between(AxisState.PARTIAL, AxisState.SHARDED)),
        factor(between(AxisState.PARTIAL, AxisState.REPLICATED)),
    )


def _collective_sub_axes(
    mesh: Mesh, source: Layout, target: Layout
) -> Iterator[tuple[Axis, float]]:
    """Yield the sub-axes that must be in collectives, each with the sum of its minimum ratios."""
    factors = minimum_factors(mesh)
    if source.reduction == "any" and source.partial:
        yield from ((a, factors.spread) for a in reduced(source, target))
        return
    after = {a for axes in target.dims for a in axes}
    for a in reduced(source, target):
        stays = a in after or a in target.partial
        split = factors.scattered + (0 if stays else factors.ended)
        yield a, min(factors.reduced, split)
    for axes, wanted in zip(source.dims, target.dims, strict=True):
        retained = 0
        while retained < min(len(axes), len(wanted)) and axes[retained] == wanted[retained]:
            retained += 1
        for a in axes[retained:]:
            if a not in target.partial:
                yield a, factors.moved if a in after else factors.ended


def crossing(mesh: Mesh, source: Layout, target: Layout) -> bool:
    """Whether unequal sub-axes overlap, as 2 x 3 and 3 x 2 of an axis of 6. Sub-axes then do not
    determine which devices hold equal elements."""
    return _cross(mesh, frozenset(source.used + target.used))


@lru_cache(maxsize=4096)
def _cross(mesh: Mesh, used: frozenset[Axis]) -> bool:
    return mesh.clash(tuple({*used, *mesh.cut(mesh.level_sub_axes, tuple(used))})) is not None


def reduced(source: Layout, target: Layout) -> Axes:
    """Return the partial axes over which a plan must reduce."""
    if source.reduction != target.reduction and target.partial:
        return source.partial
    return tuple(a for a in source.partial if a not in target.partial)


def _total_received(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, levels: tuple[int, ...],
    count: bool = True,
) -> list[tuple[int, int]]:  # fmt: skip
    """Return, for each level, the elements that devices together must receive from outside of their
    unit of the level, and the number of these devices.

    Args:
        levels: -1 stands for the device itself.
        count: visit devices one by one if necessary; otherwise such elements are not counted.
    """
    if source.reduction == "any":  # the devices of the root have all elements
        return [(0, 1)] * len(levels)
    splits, used = tuple(a for d in target.dims for a in d), (*source.used, *target.used)
    gone = reduced(source, target)
    retained = tuple(a for a in source.partial if a not in gone)
    inner = [within(mesh, level, used) for level in levels]
    units = [mesh.cluster_or_default.units[level] if level >= 0 else 1 for level in levels]
    received = [(0, 1)] * len(levels)
    unreduced = []  # the levels outside of which nothing is reduced
    for i, (near, unit) in enumerate(zip(inner, units, strict=True)):
        before, after = _outside(mesh, near, source.partial), _outside(mesh, near, retained)
        if before > after:
            groups = mesh.size // unit // _outside(mesh, near, splits + target.partial)
            received[i] = prod(shape) * (before - after + max(groups, 1) - 1), mesh.size
        else:
            unreduced.append(i)
    if not (count and unreduced):
        return received
    free = tuple(inner[i] | frozenset(target.partial) for i in unreduced)
    cases = shares(mesh, shape, source.complete, target.complete, free)
    visited = sum(cases.values())
    for k, i in enumerate(unreduced):
        equal = units[i] * _outside(mesh, inner[i], target.partial)
        equal //= mesh.extent(tuple(a for a in splits if a in inner[i]))
        lacking = sum((case[0] - case[k + 1]) * n for case, n in cases.items())
        received[i] = lacking, visited * equal
    return received


def _outside(mesh: Mesh, inner: frozenset[Axis], axes: Axes) -> int:
    """Return the number of positions along the axes that are not in `inner`."""
    return mesh.extent(tuple([a for a in axes if a not in inner]))


def _maximum_lacking(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """Return the maximum of the elements that one device must receive, or each device of a group
    over which the target is partial."""
    group = frozenset(target.partial)
    cases = shares(mesh, shape, source.complete, target.complete, (group,))
    if reduced(source, target):
        lacking = (min if source.reduction == "any" else max)(want for want, _ in cases)
    else:
        lacking = max(want - have for want, have in cases)
    return -(-lacking // mesh.extent(target.partial))


def _lacking_of_first(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """Return the elements that the first device, whose shards are the largest, must receive."""
    have, want = source.local_shape(mesh, shape), target.local_shape(mesh, shape)
    if target.partial or any(map(sizes_of, (*source.dims, *target.dims))):
        return 0
    return prod(want) - (0 if reduced(source, target) else prod(map(min, have, want)))
