"""Affine expressions and integer sets: each operation against all indices, one by one."""

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from support.extent import sampled

from shardir.algebra.affine import (
    EVERYWHERE,
    NOWHERE,
    Affine,
    IntegerSet,
    compare,
    flatten,
    unflatten,
)

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return product(*(range(n) for n in sizes))


def value(e: Affine, index: Sequence[int]) -> int:
    return e.constant + sum(k * index[d] for d, k in e.terms)


def holds(s: IntegerSet, index: Sequence[int]) -> bool:
    return all(value(e, index) >= 0 for e in s.constraints)


@pytest.mark.parametrize("seed", sampled(range(40), 8))
def test_operations_are_those_of_each_index(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randint(1, 4) for _ in range(3)]
    sizes = dict(enumerate(shape))

    def expression() -> Affine:
        terms = tuple((d, k) for d in range(3) if (k := draw.choice([-4, -2, -1, 0, 0, 1, 2, 3])))
        return Affine(terms, draw.randint(-5, 5))

    x, y, by = expression(), expression(), draw.randint(1, 5)
    found = [value(x, i) for i in indices(shape)]
    assert x.bounds(sizes)[0] <= min(found) and max(found) <= x.bounds(sizes)[1]
    parts, inserted = x.divide(by, sizes), x.substitute(1, y)
    sets = [(how, s, s and s.complement(sizes)) for how in COMPARISONS
            for s in [compare(how, x, y, sizes)]]  # fmt: skip
    for i in indices(shape):
        a, b = value(x, i), value(y, i)
        assert (value(x + y, i), value(x - y, i), value(x.times(3), i)) == (a + b, a - b, 3 * a)
        assert value(inserted, i) == value(x, (i[0], b, i[2]))
        assert parts is None or [value(e, i) for e in parts] == [a // by, a % by]
        for how, s, other in sets:
            truth = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b,
                     "ge": a >= b}[how]  # fmt: skip
            assert s is None or holds(s, i) == truth
            assert other is None or holds(other, i) != truth


def test_sets_have_one_form() -> None:
    sizes, (i, j) = {0: 8, 1: 8}, (Affine.dim(0), Affine.dim(1))
    lower = IntegerSet.of([i - j], sizes)
    assert compare("lt", j.times(4), i.times(4) + 3, sizes) == lower
    assert compare("gt", j, i, sizes) == lower.complement(sizes)
    assert compare("ge", i, Affine(), sizes) == EVERYWHERE
    assert compare("lt", i + j, Affine(), sizes) == NOWHERE
    assert EVERYWHERE.complement(sizes) == NOWHERE and NOWHERE.complement(sizes) == EVERYWHERE


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 1, 3, 2)])
def test_positions_are_row_by_row(shape: tuple[int, ...]) -> None:
    sizes = dict(enumerate(shape))
    index = tuple(map(Affine.dim, range(len(shape))))
    position = flatten(index, shape)
    assert [value(position, i) for i in indices(shape)] == list(range(len([*indices(shape)])))
    back = unflatten(position, shape, sizes)
    assert back is not None
    for i in indices(shape):
        assert tuple(value(e, i) for e in back) == i


def test_a_remainder_is_below_the_divisor() -> None:
    i, sizes = Affine.dim(0), {0: 4}
    assert i.divide(4, sizes) == (Affine(), i) and i.divide(3, sizes) is None
    assert (i.times(3) + 2).divide(3, sizes) == (i, Affine((), 2))
    assert (i + -1).divide(4, sizes) is None
