"""Affine expressions of indices, and integer sets: the indices at which expressions are at least 0.

    d0 - d1 - 1                  an expression of the indices d0 and d1
    {d0 - d1 >= 0}               a set: the lower triangle, of d0 rows and d1 columns

The index of dimension k is between 0 and its size - 1. The terms are MLIR's.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import NamedTuple

Sizes = Mapping[int, int]
"""The size of each dimension."""


class Affine(NamedTuple):
    """A weighted sum of indices, and a constant.

    Attributes:
        terms: pairs of a dimension, ascending, and its factor, which is not 0.
    """

    terms: tuple[tuple[int, int], ...] = ()
    constant: int = 0

    @classmethod
    def dim(cls, dim: int) -> "Affine":
        """Return the index of a dimension."""
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
        """Return the expression multiplied by a factor."""
        if not factor:
            return Affine()
        return Affine(tuple((d, k * factor) for d, k in self.terms), self.constant * factor)

    def substitute(self, dim: int, by: "Affine") -> "Affine":
        """Return the expression with `by` in place of the index of a dimension."""
        factor = dict(self.terms).get(dim, 0)
        rest = Affine(tuple((d, k) for d, k in self.terms if d != dim), self.constant)
        return rest + by.times(factor)

    def bounds(self, sizes: Sizes) -> tuple[int, int]:
        """Return the minimum and the maximum over all indices."""
        ends = [(k * (sizes[d] - 1) if k < 0 else 0, k * (sizes[d] - 1) if k > 0 else 0)
                for d, k in self.terms]  # fmt: skip
        low, high = (sum(end) for end in zip(*ends, strict=True)) if ends else (0, 0)
        return self.constant + low, self.constant + high

    def divide(self, by: int, sizes: Sizes) -> "tuple[Affine, Affine] | None":
        """Return the quotient and the remainder; None unless both are affine."""
        quotient = Affine(tuple((d, k // by) for d, k in self.terms if k % by == 0))
        rest = Affine(tuple((d, k) for d, k in self.terms if k % by), self.constant)
        multiple = rest.bounds(sizes)[0] // by
        rest = Affine(rest.terms, rest.constant - multiple * by)
        if rest.bounds(sizes)[1] >= by:
            return None
        return Affine(quotient.terms, multiple), rest


class IntegerSet(NamedTuple):
    """The indices at which all `constraints` are at least 0."""

    constraints: frozenset[Affine] = frozenset()

    @classmethod
    def of(cls, expressions: Iterable[Affine], sizes: Sizes) -> "IntegerSet":
        """Return the set in normal form: without constraints that hold everywhere, and with factors
        without a common divisor; NOWHERE if a constraint holds nowhere."""
        constraints = set[Affine]()
        for e in expressions:
            low, high = e.bounds(sizes)
            if high < 0:
                return NOWHERE
            if low < 0:
                divisor = gcd(*(k for _, k in e.terms))
                terms = tuple((d, k // divisor) for d, k in e.terms)
                constraints.add(Affine(terms, e.constant // divisor))
        return cls(frozenset(constraints))

    def complement(self, sizes: Sizes) -> "IntegerSet | None":
        """Return the complement; None unless it is an IntegerSet."""
        if len(self.constraints) > 1:
            return None
        return (
            IntegerSet.of([e.times(-1) + -1 for e in self.constraints], sizes)
            if self.constraints
            else NOWHERE
        )


EVERYWHERE, NOWHERE = IntegerSet(), IntegerSet(frozenset([Affine(constant=-1)]))


def compare(predicate: str, x: Affine, y: Affine, sizes: Sizes) -> IntegerSet | None:
    """Return the indices at which a predicate holds for x and y; None unless it is an IntegerSet.

    Args:
        predicate: eq, ne, lt, le, gt or ge.
    """
    at_least, at_most = x - y, y - x
    match predicate:
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


def flatten(index: Sequence[Affine], shape: Sequence[int]) -> Affine:
    """Return the row-major position of an element."""
    position = Affine()
    for e, n in zip(index, shape, strict=True):
        position = position.times(n) + e
    return position


def unflatten(position: Affine, shape: Sequence[int], sizes: Sizes) -> tuple[Affine, ...] | None:
    """Return the index of the element at a row-major position; None unless it is affine."""
    index: list[Affine] = []
    for n in reversed(shape[1:]):
        parts = position.divide(n, sizes)
        if parts is None:
            return None
        position, rest = parts
        index.append(rest)
    return tuple(reversed([*index, position] if shape else index))
