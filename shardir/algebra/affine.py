"""Affine expressions of indices, and integer sets: the indices at which several are 0 or more.

    d0 - d1 - 1                  an expression of the indices d0 and d1
    {d0 - d1 >= 0}               a set: the lower triangle, of d0 rows and d1 columns

The index of dimension k is between 0 and its size - 1. Both are MLIR's terms.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import NamedTuple

Sizes = Mapping[int, int]
"""The size of each dimension."""


class Affine(NamedTuple):
    """A sum of indices, each with a factor, and a constant."""

    terms: tuple[tuple[int, int], ...] = ()
    """The dimensions, ascending, each with its factor, which is not 0."""
    constant: int = 0

    @classmethod
    def dim(cls, dim: int) -> "Affine":
        return cls(((dim, 1),))

    def __add__(self, other: object) -> "Affine":
        if not isinstance(other, Affine):
            return (
                Affine(self.terms, self.constant + other)
                if isinstance(other, int)
                else NotImplemented
            )
        factors = dict(self.terms)
        for d, k in other.terms:
            factors[d] = factors.get(d, 0) + k
        terms = tuple((d, k) for d, k in sorted(factors.items()) if k)
        return Affine(terms, self.constant + other.constant)

    def __sub__(self, other: "Affine") -> "Affine":
        return self + other.times(-1)

    def times(self, factor: int) -> "Affine":
        if not factor:
            return Affine()
        return Affine(tuple((d, k * factor) for d, k in self.terms), self.constant * factor)

    def replaced(self, dim: int, by: "Affine") -> "Affine":
        """Return the expression with another one in place of an index."""
        factor = dict(self.terms).get(dim, 0)
        rest = Affine(tuple((d, k) for d, k in self.terms if d != dim), self.constant)
        return rest + by.times(factor)

    def bounds(self, sizes: Sizes) -> tuple[int, int]:
        """Return the minimum and the maximum."""
        ends = [(k * (sizes[d] - 1) if k < 0 else 0, k * (sizes[d] - 1) if k > 0 else 0)
                for d, k in self.terms]  # fmt: skip
        low, high = (sum(end) for end in zip(*ends, strict=True)) if ends else (0, 0)
        return self.constant + low, self.constant + high

    def divided(self, by: int, sizes: Sizes) -> "tuple[Affine, Affine] | None":
        """Return the quotient and the remainder; None where these are no affine expressions."""
        quotient = Affine(tuple((d, k // by) for d, k in self.terms if k % by == 0))
        rest = Affine(tuple((d, k) for d, k in self.terms if k % by), self.constant)
        multiple = rest.bounds(sizes)[0] // by
        rest = Affine(rest.terms, rest.constant - multiple * by)
        if rest.bounds(sizes)[1] >= by:
            return None
        return Affine(quotient.terms, multiple), rest


class IntegerSet(NamedTuple):
    """The indices at which all of these expressions are 0 or more."""

    constraints: frozenset[Affine] = frozenset()

    @classmethod
    def of(cls, expressions: Iterable[Affine], sizes: Sizes) -> "IntegerSet":
        """Return the set without the constraints that hold everywhere; NOWHERE where one holds
        nowhere. Factors have no common divisor."""
        found = set[Affine]()
        for e in expressions:
            low, high = e.bounds(sizes)
            if high < 0:
                return NOWHERE
            if low < 0:
                common = gcd(*(k for _, k in e.terms))
                terms = tuple((d, k // common) for d, k in e.terms)
                found.add(Affine(terms, e.constant // common))
        return cls(frozenset(found))

    def complement(self, sizes: Sizes) -> "IntegerSet | None":
        """Return the other indices; None where these are no such set."""
        if len(self.constraints) > 1:
            return None
        return (
            IntegerSet.of([e.times(-1) + -1 for e in self.constraints], sizes)
            if self.constraints
            else NOWHERE
        )


EVERYWHERE, NOWHERE = IntegerSet(), IntegerSet(frozenset([Affine(constant=-1)]))


def compared(how: str, x: Affine, y: Affine, sizes: Sizes) -> IntegerSet | None:
    """Return where `x` `how` `y`: eq, ne, lt, le, gt or ge; None where this is no such set."""
    at_least, at_most = x - y, y - x
    match how:
        case "ge":
            return IntegerSet.of([at_least], sizes)
        case "gt":
            return IntegerSet.of([at_least + -1], sizes)
        case "le":
            return IntegerSet.of([at_most], sizes)
        case "lt":
            return IntegerSet.of([at_most + -1], sizes)
        case "eq":
            return IntegerSet.of([at_least, at_most], sizes)
    equal = IntegerSet.of([at_least, at_most], sizes)
    return equal.complement(sizes)


def flattened(index: Sequence[Affine], shape: Sequence[int]) -> Affine:
    """Return the position of an element among all of its tensor, row by row."""
    found = Affine()
    for e, n in zip(index, shape, strict=True):
        found = found.times(n) + e
    return found


def unflattened(position: Affine, shape: Sequence[int], sizes: Sizes) -> tuple[Affine, ...] | None:
    """Return the index of the element at a position; None where it is not affine."""
    found: list[Affine] = []
    for n in reversed(shape[1:]):
        parts = position.divided(n, sizes)
        if parts is None:
            return None
        position, rest = parts
        found.append(rest)
    return tuple(reversed([*found, position] if shape else found))
