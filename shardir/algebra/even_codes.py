"""Layouts as numbers, for many of them at once: splits of a dimension, and sets of axes.

    axes a, b, c are 1, 2, 3, and a split has    {a, c}  ->  0b1101
    two bits for each, the major axis last
    a set of axes is the sum of their bits       {a, c}  ->  0b101

So axes are added to a dimension, or removed from it, by arithmetic of arrays. Prices compare splits
place by place in sub-axes of prime sizes, which have numbers and bits of their own
(even_places.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.traffic import Indices

CHUNK = 12
"""The bits of a split that are looked up at once."""


class Spelling:
    """The numbers and bits of some sub-axes, disjoint and each of one level; of partial values
    their `reduction`."""

    def __init__(self, mesh: Mesh, axes: Axes, reduction: str = "sum"):
        self.mesh, self.axes, self.count, self.reduction = mesh, axes, len(axes), reduction
        self.width = self.count.bit_length()
        """The bits of the number of an axis."""
        self.last = (1 << self.width) - 1
        self.number = {a: i + 1 for i, a in enumerate(axes)}
        self.bits = np.zeros(1 << self.width, dtype=np.int64)
        self.bits[1 : self.count + 1] = 1 << np.arange(self.count)
        self._ends = 1 << self.width * np.arange(self.count, dtype=np.int64)
        self.sizes = [mesh.extent((a,)) for a in axes]
        self.levels = [mesh.level((a,)) for a in axes]
        self.extents = self.over_sets(1, lambda x, i: x * self.sizes[i])
        self.reach = self.over_sets(0, lambda x, i: np.maximum(x, self.levels[i]))
        self.numbers_of = self.over_sets(0, lambda x, i: x | (self.last << self.width * i))
        """All the bits of the numbers at those places whose bits a set has."""
        self.chunk = max(min(CHUNK // max(self.width, 1), self.count), 1) * self.width
        self._masks = self._masks_of(np.arange(1 << self.chunk))

    def over_sets(self, empty: float, join: Any) -> np.ndarray[Any, Any]:
        """Return a number for each set of axes: `join` makes those of sets with an axis from those
        of the sets without it."""
        found = np.array([empty])
        for i in range(self.count):
            found = np.concatenate([found, join(found, i)])
        return found

    def over_levels(self, some: Callable[[int], bool]) -> Indices:
        """Return for each set of axes the positions along those of some levels."""
        return self.over_sets(1, lambda x, i: x * self.sizes[i] if some(self.levels[i]) else x)

    def code(self, axes: Axes) -> int:
        return sum(self.number[a] << self.width * i for i, a in enumerate(axes))

    def bitmask(self, axes: Axes) -> int:
        return sum(1 << (self.number[a] - 1) for a in axes)

    def numbers(self, code: int) -> Iterator[int]:
        """Yield the numbers of a code."""
        while code:
            yield code & self.last
            code >>= self.width

    @cached_property
    def every(self) -> Indices:
        """The codes of all splits of a dimension."""
        found = [np.zeros(1, dtype=np.int64)]
        for _ in range(self.count):
            row, i = np.nonzero(self.masks(found[-1])[:, None] & self.bits[1 : self.count + 1] == 0)
            found.append(self.joined(found[-1][row], i + 1))
        return np.concatenate(found)

    def spelled(self, code: int) -> Axes:
        """Return the axes of a code."""
        return tuple([self.axes[number - 1] for number in self.numbers(code)])

    def of_bits(self, mask: int) -> Axes:
        """Return the axes of a set, in their order."""
        return tuple([a for i, a in enumerate(self.axes) if mask >> i & 1])

    def of_layout(self, layout: Layout) -> "Layouts":
        """Return one layout as numbers."""
        splits = np.array([[self.code(axes) for axes in layout.dims]], dtype=np.int64)
        return Layouts(splits, np.array([self.bitmask(layout.partial)], dtype=np.int64))

    def layout(self, one: "Layouts") -> Layout:
        """Return the layout of one row."""
        dims = tuple([self.spelled(code) for code in one.splits.tolist()])
        return Layout(self.mesh.name, dims).with_partial(
            self.of_bits(int(one.partial)), self.reduction
        )

    def keys(self, layouts: "Layouts") -> Indices:
        """Return a number for each layout: its axes, with a 0 after each dimension, then those that
        are partial."""
        found, at = np.zeros((2, len(layouts)), dtype=np.int64)
        for codes in layouts.splits.T:
            found |= codes << at
            at += self.width * (self.lengths(codes) + 1)
        return (found << self.count) | layouts.partial

    def of_sets(self, masks: Indices, reverse: bool = False) -> Indices:
        """Return the codes of sets of axes, in their order or the reverse."""
        return self._in_order[int(reverse)][masks]

    @cached_property
    def _in_order(self) -> list[Indices]:
        """The codes of all sets, in the order of the axes and in the reverse."""
        found = list[Indices]()
        for order in (range(self.count), range(self.count)[::-1]):
            masks, codes, at = np.arange(1 << self.count), *np.zeros((2, 1 << self.count), np.int64)
            for i in order:
                has = masks >> i & 1
                codes += has * (i + 1) << at
                at += has * self.width
            found.append(codes)
        return found

    def lengths(self, codes: Indices) -> Indices:
        """Return the numbers of axes."""
        return np.searchsorted(self._ends, codes, side="right")

    def places(self, codes: Indices) -> Iterator[Indices]:
        """Yield the numbers of the axes at each place, as far as there are some."""
        for _ in range(int(self.lengths(codes.max(initial=0)))):
            yield codes & self.last
            codes = codes >> self.width

    def chunks(self, codes: Indices) -> Iterator[Indices]:
        """Yield the codes of the axes at some places at once, as far as there are some."""
        full = (1 << self.chunk) - 1
        for _ in range(-(-int(codes.max(initial=0)).bit_length() // max(self.chunk, 1))):
            yield codes & full
            codes = codes >> self.chunk

    def masks(self, codes: Indices) -> Indices:
        """Return the sets of axes."""
        found = np.zeros(codes.shape, dtype=np.int64)
        for chunk in self.chunks(codes):
            found |= self._masks[chunk]
        return found

    def _masks_of(self, codes: Indices) -> Indices:
        found = np.zeros(codes.shape, dtype=np.int64)
        for number in self.places(codes):
            found |= self.bits[number]
        return found

    def without(self, codes: Indices, masks: Indices | int, keep: bool = False) -> Indices:
        """Return the codes without the axes of some sets; `keep`: with these alone."""
        shape = np.broadcast(codes, masks).shape
        found, at = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for number in self.places(codes):
            stays = (number > 0) & (((self.bits[number] & masks) != 0) == keep)
            found += stays * number << at
            at += stays * self.width
        return found

    def before(self, codes: Indices, masks: Indices | int) -> Indices:
        """Return the major axes before the first that is in a set."""
        found = np.zeros(np.broadcast(codes, masks).shape, dtype=np.int64)
        alive: Any = True
        for place, number in enumerate(self.places(codes)):
            alive = alive & ((self.bits[number] & masks) == 0)
            found += alive * number << self.width * place
        return found

    def joined(self, major: Indices, minor: Indices) -> Indices:
        """Return the axes of two splits after each other."""
        return major | minor << self.width * self.lengths(major)

    def parted(self, codes: Indices, n: Indices | int) -> tuple[Indices, Indices]:
        """Return the n major axes of splits, and the others."""
        bits = self.width * n
        return codes & (1 << bits) - 1, codes >> bits

    def after_common(self, codes: Indices, others: Indices) -> Indices:
        """Return the sets of the axes after those that two splits of each dimension begin with:
        [layout, dimension] -> [layout]."""
        differ = codes ^ others
        place = self.lengths(differ & -differ) - 1  # of the lowest bit that differs
        return union(self.masks(np.where(differ, codes >> self.width * place.clip(min=0), 0)))


class KeyNumbers:
    """The numbers of keys, in the order in which they were added."""

    def __init__(self) -> None:
        self._keys, self._numbers = np.zeros((2, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Indices) -> Indices:
        """Return the numbers of keys, -1 of those that were not added."""
        if not len(self._keys):
            return np.full(len(keys), -1)
        at = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        found: Indices = np.where(self._keys[at] == keys, self._numbers[at], -1)
        return found

    def add(self, keys: Indices) -> Indices:
        """Return the numbers of new keys, each once and in their order."""
        numbers, at = len(self._keys) + np.arange(len(keys)), np.searchsorted(self._keys, keys)
        self._keys = np.insert(self._keys, at, keys)
        self._numbers = np.insert(self._numbers, at, numbers)
        return numbers


def union(sets: Indices) -> Indices:
    """Return the union of the sets of all dimensions: [layout, dimension]."""
    return reduce(np.bitwise_or, sets.T, np.zeros(len(sets), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of one tensor: the codes of their splits, [layout, dimension], and the bits of their
    partial axes, [layout]."""

    splits: Indices
    partial: Indices

    def __len__(self) -> int:
        return len(self.partial)

    def __getitem__(self, some: Any) -> "Layouts":
        return Layouts(self.splits[some], self.partial[some])

    def joined(self, others: "Layouts") -> "Layouts":
        return Layouts(
            np.concatenate([self.splits, others.splits]),
            np.concatenate([self.partial, others.partial]),
        )
