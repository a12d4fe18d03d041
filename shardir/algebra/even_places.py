"""Old and new splits compared place by place, in sub-axes of prime sizes (traffic.py), for many
layouts at once.

    {a, b}, {c}  ->  {b}, {c, a}      place 0 of dimension 0 has b for a: indices along both must be
                                      equal, or a device has nothing of its new shard (paired)
                                      place 1 of dimension 0 is gone: it has a part
"""

from typing import NamedTuple

import numpy as np

from shardir.algebra.even_codes import Spelling, union
from shardir.algebra.mesh import Mesh
from shardir.algebra.traffic import Flags, Indices, sub_axes_of_primes


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


class PrimePlaces:
    """The sub-axes of prime sizes of those of a spelling, each of the level of its axis: `primes`
    has their numbers and bits."""

    def __init__(self, mesh: Mesh, spelling: Spelling):
        self.spelling = spelling
        each = [sub_axes_of_primes(mesh, (a,)) for a in spelling.axes]
        self.primes = Spelling(mesh, tuple([prime for some in each for prime, _ in some]))
        self.primes.levels = [
            l for l, some in zip(spelling.levels, each, strict=True) for _ in some
        ]
        self._codes = np.array(
            [0, *(self.primes.code(tuple([p for p, _ in some])) for some in each)]
        )
        self._counts = np.array([0, *map(len, each)])
        sets = [self.primes.bitmask(tuple([p for p, _ in some])) for some in each]
        self.of_sets = spelling.over_sets(0, lambda x, i: int(x) | sets[i]).astype(np.int64)
        self._sizes = np.array([1, *self.primes.sizes])
        self._several_primes = len({*self.primes.sizes}) > 1

    def codes(self, codes: Indices) -> Indices:
        """Return the codes of splits over sub-axes of prime sizes."""
        found, at = np.zeros(codes.shape, dtype=np.int64), 0
        for number in self.spelling.places(codes):
            found += self._codes[number] * self.primes.powers[at]
            at = at + self._counts[number]
        return found

    def compared(self, old: Indices, new: Indices) -> SplitPlaces:
        """Compare old and new splits, by their codes over sub-axes of prime sizes: [.., dimension];
        `old` has as many layouts as the result."""
        primes, sizes = self.primes, self._sizes
        found = [np.zeros(len(old), dtype=np.int64) for _ in range(5)]
        known = np.ones(len(old), dtype=np.bool_)
        new = np.broadcast_to(new, old.shape)

        places = max(primes.lengths(x.max(initial=0)) for x in (old, new))
        for _ in range(int(places)):
            (old, have), (new, want) = np.divmod(old, primes.base), np.divmod(new, primes.base)
            had, has = primes.bits[have], primes.bits[want]
            paired = (have > 0) & (want > 0) & (have != want)
            found[0] |= union(np.where(want == 0, had, 0))
            found[1] |= union(np.where(paired, had, 0))
            found[2] |= union(np.where(have == 0, has, 0))
            found[3] |= union(np.where(paired, has, 0))
            found[4] += (paired * primes.powers[have - (have > 0)] * want).sum(axis=1)
            if self._several_primes:
                known &= ~(paired & (sizes[have] != sizes[want])).any(axis=1)
        gone, paired, gone_of_new, paired_of_new, pairs = found
        return SplitPlaces(gone, paired, gone_of_new, paired_of_new, pairs, known)
