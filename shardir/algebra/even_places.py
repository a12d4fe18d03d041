"""Old and new splits compared place by place, in sub-axes of prime sizes (traffic.py), for many
layouts at once.

    {a, b}, {c}  ->  {b}, {c, a}      place 0 of dimension 0 has b for a: indices along both must be
                                      equal, or a device has nothing of its new shard (paired)
                                      place 1 of dimension 0 is gone: it has a part
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardir.algebra.even_codes import Spelling
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.traffic import Flags, Indices, sub_axes_of_primes

MAX_EVERY = 5
"""The number of axes, at the maximum, of which all splits, 326, are compared with one at once."""

MAX_ENDS = 256
"""The number of splits, at the maximum, of which those that were compared with them are retained:
with 2,000 of each 13 MB."""

Bits = np.ndarray[Any, np.dtype[np.int16]]


class SplitPlaces(NamedTuple):
    """The result of a comparison of old and new splits: sets of sub-axes of prime sizes, of the old
    split (gone and paired) and of the new one; the pairs as a number; whether pairs are of equal
    sizes."""

    gone: Indices
    paired: Indices
    gone_of_new: Indices
    paired_of_new: Indices
    pairs: Indices
    known: Flags


def several(shape: Shape, splits: Indices) -> Indices:
    """Return splits without those of dimensions of one element: it is on the first devices along
    the axes that split it, so a device that needs it had it unless another axis split it."""
    found: Indices = splits * (np.array(shape) != 1)
    return found


class _ComparedSplits(NamedTuple):
    """The splits of a dimension that were compared with one other split, before or after it, sorted
    by their codes: of each the four sets as bits after each other, the pairs, and whether they are
    of equal sizes."""

    codes: Indices
    sets: Indices
    pairs: Indices
    known: Flags

    @staticmethod
    def none() -> "_ComparedSplits":
        return _ComparedSplits(*np.zeros((3, 0), dtype=np.int64), known=np.zeros(0, dtype=np.bool_))

    def find(self, codes: Indices) -> tuple[Indices, Flags]:
        """Return the number of each split, and whether it was compared."""
        if not len(self.codes):
            return np.zeros(len(codes), dtype=np.int64), np.zeros(len(codes), dtype=np.bool_)
        at = self.codes.searchsorted(codes).clip(max=len(self.codes) - 1)
        return at, self.codes[at] == codes

    def joined(self, codes: Indices, places: SplitPlaces, bits: int) -> "_ComparedSplits":
        """Return these splits and new ones, of which a set has so many bits."""
        order = np.concatenate([self.codes, codes]).argsort()
        sets: Indices = sum(
            (some << bits * k for k, some in enumerate(places[:4])), np.zeros_like(codes)
        )
        return _ComparedSplits(
            np.concatenate([self.codes, codes])[order], np.concatenate([self.sets, sets])[order],
            np.concatenate([self.pairs, places.pairs])[order],
            np.concatenate([self.known, places.known])[order],
        )  # fmt: skip


class PrimePlaces:
    """The sub-axes of prime sizes of those of a spelling, each of the level of its axis: `primes`
    has their numbers and bits."""

    def __init__(self, mesh: Mesh, spelling: Spelling):
        self.spelling = spelling
        each = [sub_axes_of_primes(mesh, (a,)) for a in spelling.axes]
        parts = [tuple([prime for prime, _ in some]) for some in each]
        self.primes = Spelling(mesh, tuple([prime for some in parts for prime in some]))
        self.primes.levels = [
            l for l, some in zip(spelling.levels, parts, strict=True) for _ in some
        ]
        sets = [*map(self.primes.bitmask, parts)]
        self.of_sets = spelling.over_sets(0, lambda x, i: x | sets[i])
        self._sizes = np.array([1, *self.primes.sizes])
        self._several_primes = len({*self.primes.sizes}) > 1
        self._compared_with: dict[tuple[int, bool], _ComparedSplits] = {}
        """By a split, and whether it is the new one."""
        self._few = spelling.count <= MAX_EVERY
        self._set_chunks(parts)

    @staticmethod
    @lru_cache(maxsize=16)
    def of(mesh: Mesh, axes: Axes, reduction: str) -> "PrimePlaces":
        """Return those of some sub-axes: the redistributions of a program are over few."""
        return PrimePlaces(mesh, Spelling(mesh, axes, reduction))

    def _set_chunks(self, parts: Sequence[Axes]) -> None:
        """Make the tables of the codes of some places: those over primes, and their bits."""
        spelling, primes = self.spelling, self.primes
        codes, widths = np.zeros((2, 1 << spelling.width), dtype=np.int64)
        codes[1 : spelling.count + 1] = [*map(primes.code, parts)]
        widths[1 : spelling.count + 1] = [len(some) * primes.width for some in parts]
        every = np.arange(1 << spelling.chunk)
        self._codes, self._widths = np.zeros((2, len(every)), dtype=np.int64)
        for number in spelling.places(every):
            self._codes += codes[number] << self._widths
            self._widths += widths[number]

    def codes(self, codes: Indices) -> Indices:
        """Return the codes of splits over sub-axes of prime sizes."""
        found, at = np.zeros(codes.shape, dtype=np.int64), np.zeros(codes.shape, dtype=np.int64)
        for chunk in self.spelling.chunks(codes):
            found += self._codes[chunk] << at
            at += self._widths[chunk]
        return found

    def bits(self, codes: Indices) -> list[Bits]:
        """Return the bits of the primes at each place of splits, as far as there are some; at most
        15 primes have bits of 16."""
        bits = self.primes.bits.astype(np.int16)
        return [bits[place] for place in self.primes.places(self.codes(codes))]

    def compared(self, old: Indices, new: Indices) -> SplitPlaces:
        """Compare old and new splits, of as many layouts, or either of one: [layout, dimension].
        With one layout each split of a dimension is compared once."""
        if len(old) == len(new) != 1:
            return self._compared(old, new)
        sets, pairs = np.zeros((2, max(len(old), len(new))), dtype=np.int64)
        known = np.ones(len(sets), dtype=np.bool_)
        for here, there in zip(old.T, new.T, strict=True):
            one, some = (there, here) if len(new) == 1 else (here, there)
            compared, at = self._with(int(one[0]), some, len(new) == 1)
            sets |= compared.sets[at]
            pairs |= compared.pairs[at]
            if self._several_primes:
                known &= compared.known[at]
        n = self.primes.count
        gone, paired, gone_of_new, paired_of_new = (sets >> n * k & (1 << n) - 1 for k in range(4))
        return SplitPlaces(gone, paired, gone_of_new, paired_of_new, pairs, known)

    def _with(self, one: int, some: Indices, is_new: bool) -> tuple[_ComparedSplits, Indices]:
        """Return the splits that were compared with one, which is the new one of each or the old
        one, and the numbers of some."""
        compared = self._compared_with.get((one, is_new), _ComparedSplits.none())
        at, is_known = compared.find(some)
        if not is_known.all():
            codes = np.sort(self.spelling.every if self._few else some[~is_known])
            codes = codes[np.diff(codes, prepend=-1) > 0]
            ends = codes[:, None], np.array([[one]])
            places = self._compared(*ends[:: 1 if is_new else -1])
            compared = compared.joined(codes, places, self.primes.count)
            if len(self._compared_with) >= MAX_ENDS:
                self._compared_with.clear()
            self._compared_with[one, is_new] = compared  # by other threads too, each with its own
            at, _ = compared.find(some)
        return compared, at

    def _compared(self, old: Indices, new: Indices) -> SplitPlaces:
        primes, sizes, last = self.primes, self._sizes, self.primes.last
        old, new = np.broadcast_arrays(self.codes(old), self.codes(new))
        found = [np.zeros(len(old), dtype=np.int64) for _ in range(5)]
        known = np.ones(len(old), dtype=np.bool_)
        for dim in range(old.shape[1]):
            rows = np.flatnonzero(old[:, dim] != new[:, dim])
            here, there = old[rows, dim], new[rows, dim]
            parts, good = [np.zeros(len(rows), dtype=np.int64) for _ in range(5)], True
            for _ in range(int(primes.lengths(max(x.max(initial=0) for x in (here, there))))):
                have, want = here & last, there & last
                here, there = here >> primes.width, there >> primes.width
                had, has = primes.bits[have], primes.bits[want]
                paired = (had > 0) & (has > 0) & (have != want)
                parts[0] |= had * (want == 0)
                parts[1] |= had * paired
                parts[2] |= has * (have == 0)
                parts[3] |= has * paired
                parts[4] += (want * paired) << primes.width * (have - 1).clip(min=0)
                if self._several_primes:
                    good = good & ~(paired & (sizes[have] != sizes[want]))
            for total, part in zip(found, parts, strict=True):
                total[rows] += part
            known[rows] &= good
        gone, paired, gone_of_new, paired_of_new, pairs = found
        return SplitPlaces(gone, paired, gone_of_new, paired_of_new, pairs, known)
