"""Old and new splits compared place by place, in sub-axes of prime sizes (traffic.py), for many
layouts at once.

    {a, b}, {c}  ->  {b}, {c, a}      place 0 of dimension 0 has b for a: indices along both must be
                                      equal, or a device has nothing of its new shard (paired)
                                      place 1 of dimension 0 is gone: it has a part
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from shardir.algebra.even_codes import Spelling
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.traffic import Flags, Indices, sub_axes_of_primes

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

    def some(self, rows: Indices) -> "SplitPlaces":
        return SplitPlaces(
            self.gone[rows], self.paired[rows], self.gone_of_new[rows], self.paired_of_new[rows],
            self.pairs[rows], self.known[rows],
        )  # fmt: skip

    def joined(self, other: "SplitPlaces") -> "SplitPlaces":
        """Return the result of two comparisons, of different dimensions."""
        return SplitPlaces(
            self.gone | other.gone, self.paired | other.paired,
            self.gone_of_new | other.gone_of_new, self.paired_of_new | other.paired_of_new,
            self.pairs | other.pairs, self.known & other.known,
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
        self._set_chunks(parts)

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
        if len(old) == len(new):
            return self._compared(old, new)
        found = list[SplitPlaces]()
        for here, there in zip(old.T[..., None], new.T[..., None], strict=True):
            some, at = np.unique(here if len(new) == 1 else there, return_inverse=True)
            ends = (some[:, None], there) if len(new) == 1 else (here, some[:, None])
            found.append(self._compared(*ends).some(at.ravel()))
        return reduce(SplitPlaces.joined, found)

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
