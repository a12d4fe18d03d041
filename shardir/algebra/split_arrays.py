"""Many splits of a dimension as arrays of numbers.

{a, b}, {b}, {}        over the axes a, b: [[0, 1], [1, -1], [-1, -1]]
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Indices
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.traffic import sub_axes_of_primes

Extents = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class PrimeSplits(NamedTuple):
    """Splits over sub-axes of prime sizes, each with the number of the axis that it is a part of,
    among the `owners`: [split, place], -1 after the last."""

    primes: Indices
    owner: Indices
    prime_axes: Axes
    owners: Axes


class SplitArrays:
    """Some splits of a dimension: `numbers` has those of their axes, among `axes`: [split, place],
    -1 after the last."""

    def __init__(self, mesh: Mesh, splits: Sequence[Axes]):
        self.mesh, self.splits = mesh, splits
        self.axes = tuple(dict.fromkeys(a for split in splits for a in split))
        at, width = {a: i for i, a in enumerate(self.axes)}, max(map(len, splits), default=0)
        rows = [[at[a] for a in split] + [-1] * (width - len(split)) for split in splits]
        self.numbers = np.array(rows, dtype=np.int64).reshape(len(splits), width)

    @cached_property
    def extents(self) -> Extents:
        """The number of shards of each split."""
        sizes = np.array([*(float(self.mesh.extent((a,))) for a in self.axes), 1.0])
        found: Extents = sizes[self.numbers].prod(axis=1)
        return found

    @cached_property
    def reach(self) -> Indices:
        """The level over whose links the shards of each split communicate."""
        levels = np.array([*(self.mesh.level((a,)) for a in self.axes), 0])
        found: Indices = levels[self.numbers].max(axis=1, initial=0)
        return found

    def over(self, axes: Axes) -> Indices:
        """Return the numbers of the axes among others, of which they are some: [split, place]."""
        return renumbered(self.numbers, self.axes, axes)

    @cached_property
    def primes(self) -> PrimeSplits:
        """The splits over sub-axes of prime sizes of their axes."""
        return self._cut([(a,) for a in self.axes])

    @cached_property
    def primes_by_level(self) -> PrimeSplits:
        """The same of their axes cut at the units of levels."""
        return self._cut([self.mesh.cut((a,), self.mesh.level_sub_axes) for a in self.axes])

    def _cut(self, parts: Sequence[Axes]) -> PrimeSplits:
        """Return the splits over primes of the parts of each axis."""
        owners = tuple([piece for some in parts for piece in some])
        at = {a: i for i, a in enumerate(owners)}
        each = [sub_axes_of_primes(self.mesh, some) for some in parts]
        primes = tuple(dict.fromkeys(prime for some in each for prime, _ in some))
        numbers = {prime: i for i, prime in enumerate(primes)}
        width = max(map(len, each), default=0)
        table = np.full((len(parts) + 1, width, 2), -1)
        for i, some in enumerate(each):
            table[i, : len(some)] = [(numbers[prime], at[piece]) for prime, piece in some]
        found = table[self.numbers].reshape(len(self.numbers), self.numbers.shape[1] * width, 2)
        order = (found[..., 0] < 0).argsort(axis=1, kind="stable")  # those that are none last
        found = np.take_along_axis(found, order[..., None], axis=1)
        return PrimeSplits(found[..., 0], found[..., 1], primes, owners)


def renumbered(numbers: Indices, axes: Axes, others: Axes) -> Indices:
    """Return the numbers of axes among `others` in place of those among `axes`."""
    at = {a: i for i, a in enumerate(others)}
    found: Indices = np.array([*(at[a] for a in axes), -1])[numbers]
    return found


def common(*some: Axes) -> tuple[Axis, ...]:
    """Return the axes that occur in any of some."""
    return tuple(dict.fromkeys(a for axes in some for a in axes))
