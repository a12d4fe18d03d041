"""The bound of the time of redistributions of even shards, for many of them.

    [{a, b}, {}] -> [{b}, {a}]      dimension 0: of what a device needs, it has all or nothing,
                                    by whether its indices along a and b are equal
                                    dimension 1: it has all that it needs

The numbers are those of `seconds_bound` (bound.py). The part of the old and the new split of one
dimension is found once for all layouts that have them, as that of the partial axes is. The rest is
products.
"""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from shardir.algebra.bound import (
    minimum_factors,
    minimum_latency,
    outward,
    reduced,
    seconds_bound,
)
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.traffic import places, solutions

Pairs = tuple[tuple[Axis, Axis], ...]


class DimensionPart(NamedTuple):
    """The part of one dimension: the latency, and for each level outside of which links are
    slower the share of the new shard that a device finds within its unit, and the pairs of
    sub-axes along which indices must be equal for that; None where these have no closed form."""

    latency: float
    found: tuple[float, ...] | None
    pairs: tuple[Pairs, ...]


class PartialPart(NamedTuple):
    """The part of the partial axes: the latency, the seconds of the mean traffic of levels
    across which values are reduced, the numbers of the other levels, and whether any is reduced."""

    latency: float
    seconds: float
    others: tuple[int, ...]
    reduced: bool


class BoundTarget:
    """A target: the elements of a shard, the devices that share its partial values, and for each
    level the units that must end with all elements, and those that get equal ones."""

    def __init__(self, bound: "EvenBound", layout: Layout):
        mesh, self.layout = bound.mesh, layout
        self.splits = frozenset(a for axes in layout.dims for a in axes)
        self.partial = frozenset(layout.partial)
        self.elements = prod(bound.shape) // bound.extent(self.splits)
        self.sharers = bound.extent(layout.partial)
        self.groups, self.equal = list[int](), list[int]()
        for level in bound.levels:
            unit = mesh.cluster_or_default.units[level] if level >= 0 else 1
            split = bound.outside(level, self.splits)
            partial = bound.outside(level, layout.partial)
            self.groups.append(max(mesh.size // unit // split // partial, 1))
            self.equal.append(unit * partial // (bound.extent(self.splits) // split))
        self.dims: list[dict[Axes, DimensionPart]] = [{} for _ in layout.dims]
        self.partials: dict[tuple[Axes, str], PartialPart] = {}


class EvenBound:
    """The bounds of a tensor that the mesh's size divides in each dimension, between layouts over
    sub-axes that are equal or disjoint, each of one level; not partial `any`."""

    def __init__(self, mesh: Mesh, shape: Shape, itemsize: int):
        self.mesh, self.shape, self.itemsize = mesh, shape, itemsize
        self.levels, seconds_outside = outward(mesh)
        self.byte_seconds = [itemsize * each for each in seconds_outside]
        self.factors = minimum_factors(mesh)
        self._axes: dict[Axis, tuple[int, int]] = {}
        self._targets: dict[Layout, BoundTarget] = {}
        self._parts: dict[tuple[Axes, Axes, tuple[tuple[bool, bool], ...]], DimensionPart] = {}
        """By both splits, and whether each old axis splits or is partial at the end."""

    def seconds(self, source: Layout, target: Layout) -> float:
        """Return a lower bound of the time of any plan."""
        end = self.target(target)
        latency, mean, others, is_reduced = self.partial_part(source, end)
        found, pairs = [1.0] * len(self.levels), list[tuple[Pairs, ...]]()
        for d, axes in enumerate(source.dims):
            part = self._dimension_part(d, axes, end)
            latency += part.latency
            if part.found is None:
                return seconds_bound(self.mesh, self.shape, source, target, self.itemsize)
            if part.found[0] < 1:
                found = [x * y for x, y in zip(found, part.found, strict=True)]
            if part.pairs[0]:
                pairs.append(part.pairs)
        one_in = [1] * len(found)  # devices that find something
        if pairs:
            one_in = [solutions([p for each in pairs for p in each[k]]) for k in range(len(found))]
        elements = end.elements
        for k in others:
            mean += elements * (1 - found[k] / one_in[k]) / end.equal[k] * self.byte_seconds[k]
        lacking = elements
        if not is_reduced and one_in[0] == 1:
            lacking -= round(elements * found[0])
        one = -(-lacking // end.sharers) * self.byte_seconds[0]
        complete = not (source.partial or target.partial)
        mean *= self.factors.complete if complete else self.factors.received
        return max(mean, self.factors.received * one) + latency

    def latency(self, source: Layout, target: Layout) -> float:
        """Return a lower bound of the latencies of any plan."""
        end = self.target(target)
        total = self.partial_part(source, end).latency
        for d, axes in enumerate(source.dims):
            total += self._dimension_part(d, axes, end).latency
        return total

    def target(self, layout: Layout) -> BoundTarget:
        if (found := self._targets.get(layout)) is None:
            found = self._targets[layout] = BoundTarget(self, layout)
        return found

    def extent(self, axes: Iterable[Axis]) -> int:
        """Return the number of positions along axes."""
        return prod(self._axis(a)[0] for a in axes)

    def outside(self, level: int, axes: Iterable[Axis]) -> int:
        """Return the number of units of a level (-1: of devices) that differ along axes."""
        known = map(self._axis, axes)
        return prod(extent for extent, reach in known if reach > level)

    def _axis(self, axis: Axis) -> tuple[int, int]:
        """Return the extent of an axis, and its level."""
        if (found := self._axes.get(axis)) is None:
            found = self._axes[axis] = self.mesh.extent((axis,)), self.mesh.level((axis,))
        return found

    def _latency(self, axis: Axis, factor: float) -> float:
        return factor * minimum_latency(self.mesh, axis)

    def partial_part(self, source: Layout, end: BoundTarget) -> PartialPart:
        """Return the part of the partial axes, for all layouts that are partial as the source."""
        if (known := end.partials.get((source.partial, source.reduction))) is not None:
            return known
        gone, factors = reduced(source, end.layout), self.factors
        latency, seconds, others = 0.0, 0.0, list[int]()
        for a in gone:
            stays = a in end.splits or a in end.partial
            split = factors.scattered + (0 if stays else factors.ended)
            latency += self._latency(a, min(factors.reduced, split))
        retained = [a for a in source.partial if a not in gone]
        for k, level in enumerate(self.levels):
            lost, stay = self.outside(level, source.partial), self.outside(level, retained)
            if lost > stay:
                messages = prod(self.shape) * (lost - stay + end.groups[k] - 1)
                seconds += messages / self.mesh.size * self.byte_seconds[k]
            else:
                others.append(k)
        part = PartialPart(latency, seconds, tuple(others), bool(gone))
        end.partials[source.partial, source.reduction] = part
        return part

    def _dimension_part(self, dim: int, have: Axes, end: BoundTarget) -> DimensionPart:
        """Return the part of a dimension."""
        if (known := end.dims[dim].get(have)) is None:
            want, states = (
                end.layout.dims[dim],
                tuple([(a in end.splits, a in end.partial) for a in have]),
            )
            if (known := self._parts.get((have, want, states))) is None:
                known = self._parts[have, want, states] = self._new_part(have, want, end)
            end.dims[dim][have] = known
        return known

    def _new_part(self, have: Axes, want: Axes, end: BoundTarget) -> DimensionPart:
        latency, retained = 0.0, 0
        while retained < min(len(have), len(want)) and have[retained] == want[retained]:
            retained += 1
        for a in have[retained:]:
            if a not in end.partial:
                factors = self.factors
                latency += self._latency(a, factors.moved if a in end.splits else factors.ended)
        if (known := places(self.mesh, have, want)) is None:
            return DimensionPart(latency, None, ())
        found, pairs = list[float](), list[Pairs]()
        for level in self.levels:
            far = {a for a in have if a not in end.partial and self._axis(a)[1] > level}
            found.append(1 / prod(size for axis, size in known.parts if axis in far))
            pairs.append(tuple([(a, b) for a, b, axis in known.pairs if axis in far]))
        return DimensionPart(latency, tuple(found), tuple(pairs))
