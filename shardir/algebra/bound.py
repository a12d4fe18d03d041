"""Lower bounds of any redistribution: the elements that devices must receive, and their time.

Let the partial values of an element be on p devices (one, where nothing is partial), and let the
devices be divided into groups, each of which must end with the full element among its members (a
device alone, or those along the axes over which the target is partial). A group that has c of the p
partial values lacks p - c. Before the first group has them all, at least p - c messages of the
element are received, for each message takes at most one partial value away from the device that it
was on. Every other group that lacked some receives one message more, not before then. So all
devices together receive at least p - c + (groups - 1) messages. By this argument Patarasuk and Yuan
(Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009) show 2 (n - 1) / n of a
value for an all-reduce; for a reduce-scatter it is (n - 1) / n. Rings reach both with even shards.

The device that receives most receives at least the mean, and at least the elements that one device
or group lacks. The same holds for the units of a level in place of devices, and the links between
them.

A bound of time is the sum of two bounds, of the bytes and of the latencies of all steps of any
plan, for a step costs the latency of a form and its bytes times the form's rate (forms.py), both
times the cluster's factor for its kind. A plan may consist of any kinds: a complete value may
become partial on the way, since zeros cost nothing. So the bound has the smallest of these factors.

Bytes: each form costs at least the time of a program of the same step in which every device
receives as many bytes over the links of each level. That program is the form itself, except for the
tree of an all-reduce, where halving needs fewer bytes, and for groups of several levels in forms
that are not hierarchical: they count all bytes at the outermost links, some of which are received
over inner ones that are at least as fast. (Where inner links are slower, the bound counts the
fastest links that are at least as far out.) Packing is not counted. So the sum over the steps is
the time in which a redistribution receives its bytes, and the argument above holds.

Where a complete value becomes partial, one device of each group has an element, and the others have
zeros (or all have it). By an all-reduce of n such devices, or of n units, at most n - 1 get the
element, and it is received 2 (n - 1) times; by a reduce-scatter one gets it, and it is received
n - 1 times. So between complete layouts the mean counts the factor of an all-reduce twice. One
device may get as many elements as it receives (n = 2), so the device that receives most does not.

Latencies: let a collective be over sub-axes of n_1, n_2, ... devices, of one level each. Its
latency is at least the sum of log2 n_i a_i, with a_i the smallest latency from that level outwards:
n - 1 and ceil(log2 n) are at least log2 n, a product's logarithm is the sum of logarithms, forms
that are not hierarchical count the outermost level's latency for all, and hierarchical ones that of
each level. If the size of the mesh is a power of two, times one odd prime at most, ceil(log2 n_i)
takes the place of log2 n_i: the prime is in one n_i alone, so the rounds still add up. An
all-reduce's latency is twice as much. And each plan needs some sub-axes in collectives:

    a partial one that the target splits over      a reduce-scatter, or an all-reduce
    a partial one that the target is unsharded on  an all-reduce; or a reduce-scatter, and then
                                                   what ends that split
    a split that the target does not have          an all-gather or an exchange; or it becomes
                                                   partial, and then what ends that
    one that splits another dimension then, or     any collective: only the minor sub-axes of a
    after the first that differ in its dimension   dimension are added or removed, except by an
                                                   exchange, which is over all those of a dimension

Local steps have no axes in a collective, and there are no other kinds of moves.
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
    """Return both layouts, cut at each other's sub-axes and at the boundaries of levels' units, so
    that two sub-axes are equal or disjoint, and each is of one level."""
    sub_axes = (*source.used, *target.used, *mesh.level_sub_axes)
    return cut(mesh, source, sub_axes), cut(mesh, target, sub_axes)


@lru_cache(maxsize=65536)
def bound(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """Return the elements that the device which receives most must receive in any plan."""
    source, target = refined(mesh, source.simplified(mesh), target.simplified(mesh))
    if crossing(mesh, source, target):
        return 0 if source.partial or target.partial else _maximum(mesh, shape, source, target)
    ((total, devices),) = _all(mesh, shape, source, target, (-1,))
    return max(-(-total // devices), _maximum(mesh, shape, source, target))


def seconds_bound(mesh: Mesh, shape: Shape, source: Layout, target: Layout, itemsize: int) -> float:
    """Return a lower bound of the time of any plan between two refined layouts."""
    if crossing(mesh, source, target):
        return 0.0
    levels, seconds = outward(mesh)
    counted = mesh.size <= MAX_COUNTED_DEVICES or (
        source.even(mesh, shape) and target.even(mesh, shape)
    )
    mean = 0.0  # of the traffic of all devices, level by level
    traffic = _all(mesh, shape, source, target, levels, counted)
    for (total, devices), each in zip(traffic, seconds, strict=True):
        if total:
            mean += total / devices * itemsize * each
    largest = _maximum if counted else _first
    one = largest(mesh, shape, source, target) * itemsize * seconds[0]
    factors = minimum_factors(mesh)
    complete = not (source.partial or target.partial)
    mean *= factors.complete if complete else factors.received
    return max(mean, factors.received * one) + latency_bound(mesh, source, target)


@lru_cache(maxsize=256)
def outward(mesh: Mesh) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the levels (-1: the device itself) outside of which the fastest links are slower than
    outside of the level before, and by how many seconds for each byte."""
    links = mesh.cluster_or_default.levels
    best = [max(l.bandwidth for l in links[i:]) for i in range(len(links))]
    found = [i for i in range(len(best)) if not i or best[i] < best[i - 1]]
    seconds = (1 / best[i] - (1 / best[i - 1] if i else 0) for i in found)
    return tuple(i - 1 for i in found), tuple(seconds)


@lru_cache(maxsize=65536)
def latency_bound(mesh: Mesh, source: Layout, target: Layout) -> float:
    """Return a lower bound of the latencies of any plan between two refined layouts: the part of
    `seconds_bound` that is cheap to compute."""
    if crossing(mesh, source, target):
        return 0.0
    total = 0.0
    for sub_axis, times in _in_collectives(mesh, source, target):
        total += times * minimum_latency(mesh, sub_axis)
    return total


@lru_cache(maxsize=4096)
def minimum_latency(mesh: Mesh, sub_axis: Axis) -> float:
    """Return the part of a sub-axis of one level in the latency of a collective, at least."""
    levels = mesh.cluster_or_default.levels[mesh.level((sub_axis,)) :]
    n = mesh.extent((sub_axis,))
    return (rounds(n) if _has_one_odd_prime(mesh) else log2(n)) * min(l.latency for l in levels)


@lru_cache(maxsize=256)
def _has_one_odd_prime(mesh: Mesh) -> bool:
    """Whether the mesh's size is a power of two, times an odd prime at most."""
    odd = mesh.size // (mesh.size & -mesh.size)
    return all(odd % k for k in range(3, isqrt(odd) + 1, 2))


class MinimumFactors(NamedTuple):
    """The minimum of the cluster's factors of bytes: of those that a device receives, and for each
    element that the devices together get between complete layouts; then those of the latencies
    along a sub-axis, for each doubling, by what happens to it."""

    received: float
    complete: float
    spread: float
    """From a root."""
    moved: float
    """In some collective."""
    ended: float
    """In one that ends a split."""
    scattered: float
    reduced: float


@lru_cache(maxsize=256)
def minimum_factors(mesh: Mesh) -> MinimumFactors:
    times, bytes = mesh.cluster_or_default.times, mesh.cluster_or_default.byte_times
    every = [c for c in COLLECTIVES.values() if c.planned and c.communicates]

    def factor(*kinds: Collective) -> float:
        return min(times[c.name] * c.rounds for c in kinds)

    kinds = [c for c in every if c.start is not AxisState.ROOT]
    return MinimumFactors(
        min(bytes[c.name] for c in every),
        min(bytes[c.name] * c.rounds for c in every),
        factor(between(AxisState.ROOT, AxisState.REPLICATED)),
        factor(*kinds),
        factor(*(c for c in kinds if c.end is not AxisState.SHARDED)),
        factor(between(AxisState.PARTIAL, AxisState.SHARDED)),
        factor(between(AxisState.PARTIAL, AxisState.REPLICATED)),
    )


def _in_collectives(mesh: Mesh, source: Layout, target: Layout) -> Iterator[tuple[Axis, float]]:
    """Yield the sub-axes that must be in collectives, each with the sum of their factors."""
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
    """Whether sub-axes overlap that are not equal, 2 x 3 of 6 and 3 x 2: then they do not determine
    which devices hold the same elements."""
    return _cross(mesh, frozenset(source.used + target.used))


@lru_cache(maxsize=4096)
def _cross(mesh: Mesh, used: frozenset[Axis]) -> bool:
    return mesh.clash(tuple({*used, *mesh.cut(mesh.level_sub_axes, tuple(used))})) is not None


def reduced(source: Layout, target: Layout) -> Axes:
    """Return the axes of the partial values that must be reduced."""
    if source.reduction != target.reduction and target.partial:
        return source.partial
    return tuple(a for a in source.partial if a not in target.partial)


def _all(
    mesh: Mesh,
    shape: Shape,
    source: Layout,
    target: Layout,
    levels: tuple[int, ...],
    count: bool = True,
) -> list[tuple[int, int]]:
    """Return (messages, devices) for each level (-1: the device itself): the elements that all
    devices together must receive from outside of their unit of the level. Without `count` 0 where
    each device would have to be visited."""
    if source.reduction == "any":  # the devices of the root have all elements
        return [(0, 1)] * len(levels)
    splits, used = tuple(a for d in target.dims for a in d), (*source.used, *target.used)
    gone = reduced(source, target)
    retained = tuple(a for a in source.partial if a not in gone)
    inner = [within(mesh, level, used) for level in levels]
    units = [mesh.cluster_or_default.units[level] if level >= 0 else 1 for level in levels]
    found = [(0, 1)] * len(levels)
    unreduced = []  # the levels outside of which nothing is reduced
    for i, (near, unit) in enumerate(zip(inner, units, strict=True)):
        lost, stay = _outside(mesh, near, source.partial), _outside(mesh, near, retained)
        if lost > stay:
            groups = mesh.size // unit // _outside(mesh, near, splits + target.partial)
            found[i] = prod(shape) * (lost - stay + max(groups, 1) - 1), mesh.size
        else:
            unreduced.append(i)
    if not (count and unreduced):
        return found
    among = tuple(inner[i] | frozenset(target.partial) for i in unreduced)
    cases = shares(mesh, shape, source.complete, target.complete, among)
    visited = sum(cases.values())
    for k, i in enumerate(unreduced):
        equal = units[i] * _outside(mesh, inner[i], target.partial)
        equal //= mesh.extent(tuple(a for a in splits if a in inner[i]))
        lacking = sum((case[0] - case[k + 1]) * n for case, n in cases.items())
        found[i] = lacking, visited * equal
    return found


def _outside(mesh: Mesh, inner: frozenset[Axis], axes: Axes) -> int:
    """Return the number of positions along those of the axes that are not in `inner`."""
    return mesh.extent(tuple([a for a in axes if a not in inner]))


def _maximum(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """Return the maximum that one device must receive, or each of a group that the target is
    partial over."""
    among = frozenset(target.partial)
    cases = shares(mesh, shape, source.complete, target.complete, (among,))
    if reduced(source, target):
        lacking = (min if source.reduction == "any" else max)(want for want, _ in cases)
    else:
        lacking = max(want - have for want, have in cases)
    return -(-lacking // mesh.extent(target.partial))


def _first(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """Return the elements that the first device must receive: its shards are the largest."""
    have, want = source.local_shape(mesh, shape), target.local_shape(mesh, shape)
    if target.partial or any(map(sizes_of, (*source.dims, *target.dims))):
        return 0
    return prod(want) - (0 if reduced(source, target) else prod(map(min, have, want)))
