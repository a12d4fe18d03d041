"""Layouts as numbers, for many of them at once: splits of a dimension, and sets of axes.

    axes a, b, c are 1, 2, 3, and a split is     {a, c}  ->  1 + 3 * 4
    a number in base 4, the major axis first
    a set of axes is the sum of their bits       {a, c}  ->  0b101

So axes are added to a dimension, or removed from it, by arithmetic of arrays. Prices compare splits
place by place in sub-axes of prime sizes, which have numbers and bits of their own
(even_places.py).
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.traffic import Indices


class Spelling:
    """The numbers and bits of some sub-axes, disjoint and each of one level."""

    def __init__(self, mesh: Mesh, axes: Axes):
        self.axes, self.count = axes, len(axes)
        self.base = self.count + 1
        self.number = {a: i + 1 for i, a in enumerate(axes)}
        self.powers = np.array([self.base**i for i in range(self.count + 1)], dtype=np.int64)
        self.bits = np.array([0, *(1 << i for i in range(self.count))], dtype=np.int64)
        self.sizes = [mesh.extent((a,)) for a in axes]
        self.levels = [mesh.level((a,)) for a in axes]
        self.extents = self.over_sets(1, lambda x, i: x * self.sizes[i])
        self.reach = self.over_sets(0, lambda x, i: max(x, self.levels[i])).astype(np.int64)

    def over_sets(self, empty: float, join: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a number for each set of axes, from that of the set without its last axis."""
        found = [float(empty)]
        for i in range(self.count):
            found += [join(x, i) for x in found]
        return np.array(found)

    def code(self, axes: Axes) -> int:
        return sum(self.number[a] * self.base**i for i, a in enumerate(axes))

    def bitmask(self, axes: Axes) -> int:
        return sum(1 << (self.number[a] - 1) for a in axes)

    def spelled(self, code: int) -> Axes:
        """Return the axes of a code."""
        found = []
        while code:
            code, number = divmod(code, self.base)
            found.append(self.axes[number - 1])
        return tuple(found)

    def of_bits(self, mask: int) -> Axes:
        """Return the axes of a set, in their order."""
        return tuple([a for i, a in enumerate(self.axes) if mask >> i & 1])

    def of_sets(self, masks: Indices, reverse: bool = False) -> Indices:
        """Return the codes of sets of axes, in their order or the reverse."""
        found, at = np.zeros(masks.shape, dtype=np.int64), np.zeros(masks.shape, dtype=np.int64)
        for i in range(self.count)[:: -1 if reverse else 1]:
            has = masks >> i & 1
            found += has * (i + 1) * self.powers[at]
            at += has
        return found

    def lengths(self, codes: Indices) -> Indices:
        """Return the numbers of axes."""
        return np.searchsorted(self.powers[: self.count], codes, side="right")

    def places(self, codes: Indices) -> list[Indices]:
        """Return the numbers of the axes at each place, as far as there are some."""
        found = []
        for _ in range(int(self.lengths(codes.max(initial=0)))):
            codes, number = np.divmod(codes, self.base)
            found.append(number)
        return found

    def masks(self, codes: Indices) -> Indices:
        """Return the sets of axes."""
        found = np.zeros(codes.shape, dtype=np.int64)
        for number in self.places(codes):
            found |= self.bits[number]
        return found

    def without(self, codes: Indices, masks: Indices | int, keep: bool = False) -> Indices:
        """Return the codes without the axes of some sets; `keep`: with these alone."""
        found, at = np.zeros(np.broadcast(codes, masks).shape, dtype=np.int64), 0
        for number in self.places(codes):
            stays = (number > 0) & (((self.bits[number] & masks) != 0) == keep)
            found += stays * number * self.powers[at]
            at = at + stays
        return found

    def before(self, codes: Indices, masks: Indices | int) -> Indices:
        """Return the major axes before the first that is in a set."""
        found = np.zeros(np.broadcast(codes, masks).shape, dtype=np.int64)
        alive: Any = True
        for place, number in enumerate(self.places(codes)):
            alive = alive & ((self.bits[number] & masks) == 0)
            found += alive * number * self.powers[place]
        return found

    def joined(self, major: Indices, minor: Indices) -> Indices:
        """Return the axes of two splits after each other."""
        return major + self.powers[self.lengths(major)] * minor


def union(sets: Indices) -> Indices:
    """Return the union of the sets of all dimensions: [layout, dimension]."""
    return reduce(np.bitwise_or, sets.T, np.zeros(len(sets), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of one tensor: the codes of their splits, [layout, dimension], and the bits of their
    partial axes, [layout]."""

    splits: Indices
    partial: Indices

    def __getitem__(self, some: Any) -> "Layouts":
        return Layouts(self.splits[some], self.partial[some])
