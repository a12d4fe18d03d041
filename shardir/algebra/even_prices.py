"""The times of single moves of even shards, for many of them, one after the other.

    an all-gather over {b}                 [{a}, {c, b}] -> [{a}, {c}]
                                           its forms, found once, by the share of a device
    an exchange                            the part of each changed dimension in the traffic
                                           of each level, found once, multiplied

The numbers are those of the records (`step_seconds`). Many exchanges at once are priced by
exchange_costs.py, whose closed form this is.
"""

from math import prod
from typing import NamedTuple

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.forms import Forms, copying, rounds
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.named_costs import NamedMove, first_dims, named_forms
from shardir.algebra.steps import step_seconds
from shardir.algebra.traffic import places


class SplitChange(NamedTuple):
    """A dimension of which an exchange changes the split: for each level (first the device alone)
    the share of the new shard that is within its unit; the parts of an old shard that a device
    keeps, those of them along new axes alone, and whether it keeps nothing on some device."""

    found: tuple[float, ...]
    parts: tuple[tuple[Axis, int], ...]
    paired: frozenset[Axis]


class EvenPrices:
    """The times of moves of a tensor that the mesh's size divides in each dimension, between
    layouts over sub-axes that are equal or disjoint, each of one level."""

    def __init__(self, mesh: Mesh, shape: Shape, itemsize: int):
        self.mesh, self.shape, self.itemsize = mesh, shape, itemsize
        self.size = prod(shape) * itemsize
        cluster = mesh.cluster_or_default
        speeds = [level.bandwidth for level in cluster.levels]
        self._closed = speeds == sorted(speeds, reverse=True)
        self._byte_seconds = [1 / speed for speed in speeds]
        self._latencies = [level.latency for level in cluster.levels]
        self._factor = cluster.times["exchange"]
        self._byte_factor = cluster.byte_times["exchange"]
        self._copying = copying(1, mesh)
        self._axes: dict[Axes, tuple[int, int]] = {}
        self._forms: dict[tuple[str, Axes, int, int], Forms] = {}
        self._changes: dict[tuple[Axes, Axes], SplitChange | None] = {}

    def seconds(self, before: Layout, step: CollectiveStep) -> float:
        """Return the time of a step, in its fastest form."""
        if step.kind == "exchange":
            found = self._exchange(before, step.layout) if self._closed else None
        elif step.record.start is None or step.record.end is None:
            found = None
        elif not step.record.communicates:
            return 0.0
        else:
            found = self._named(before, step)
        if found is None:
            return step_seconds(self.mesh, self.shape, before, step, self.itemsize)
        return found

    def _named(self, before: Layout, step: CollectiveStep) -> float:
        """Return the time of a named collective: its forms are those of a tensor that no other axes
        split, by the share of a device."""
        key = step.kind, step.axes, step.dim, step.concat
        if (forms := self._forms.get(key)) is None:
            record = step.record
            assert record.start is not None and record.end is not None
            move = NamedMove(record.start, record.end, *key[1:])
            forms = self._forms[key] = named_forms(self.mesh, first_dims(move))
        others = 1
        for have, want in zip(before.dims, step.layout.dims, strict=True):
            others *= min(self._axes_of(have)[0], self._axes_of(want)[0])
        size = self.size / others
        return min(form.seconds(size) for form in forms)

    def _exchange(self, before: Layout, after: Layout) -> float | None:
        """Return the time of an exchange; None where there is no closed form."""
        n, reach, had, has = 1, 0, set[Axis](), set[Axis]()
        old, new, moving, changes = 1, 1, list[Axis](), list[SplitChange]()
        for have, want in zip(before.dims, after.dims, strict=True):
            extent, level = self._axes_of(have)
            old *= extent
            new *= self._axes_of(want)[0]
            had.update(have)
            has.update(want)
            if have != want:
                n, reach = n * extent, max(reach, level)
                moving += have
                if (have, want) not in self._changes:
                    self._changes[have, want] = self._change(have, want)
                if (change := self._changes[have, want]) is None:
                    return None
                changes.append(change)
        within = [prod(c.found[k] for c in changes) for k in range(len(self._latencies) + 1)]
        receiving = 0.0
        for k, seconds in enumerate(self._byte_seconds):
            receiving += (within[k + 1] - within[k]) * seconds
        copies = n // self._axes_of(tuple([a for a in moving if a in has]))[0]
        parts, wanted, keeps = 1, 1, True
        for change in changes:
            for axis, size in change.parts:
                parts *= size
                if axis not in had:
                    wanted *= size
            keeps &= not (change.paired & had)
        sent = max(copies / (old * wanted) - (1 / (old * parts) if keeps else 0), 0)
        packed = 2 * sent + (1 - within[0]) / new
        latency = self._factor * rounds(n) * self._latencies[reach]
        rate = self._byte_factor * receiving / new + self._copying * packed
        return latency + rate * self.size

    def _axes_of(self, axes: Axes) -> tuple[int, int]:
        """Return the extent of axes, and their level."""
        if (found := self._axes.get(axes)) is None:
            found = self._axes[axes] = self.mesh.extent(axes), self.mesh.level(axes)
        return found

    def _change(self, have: Axes, want: Axes) -> SplitChange | None:
        """Return the part of a dimension in exchanges; None where it has no closed form."""
        forward, back = places(self.mesh, have, want), places(self.mesh, want, have)
        if forward is None or back is None:
            return None
        found = list[float]()
        for level in range(-1, len(self._latencies)):
            far = {a for a in have if self._axes_of((a,))[1] > level}
            lacks = any(axis in far for *_, axis in forward.pairs)
            parts = prod(size for axis, size in forward.parts if axis in far)
            found.append(0.0 if lacks else 1 / parts)
        return SplitChange(tuple(found), back.parts, frozenset(axis for *_, axis in back.pairs))
