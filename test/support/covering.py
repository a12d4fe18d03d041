"""Covering arrays: few rows in which every two values of two columns stand together somewhere.

Most errors in a program of many parameters show with one value of one of them or with two values
of two (Kuhn, Wallace, Gallo 2004); a covering array tries those at a small part of the product.
"""

import random
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

Row = tuple[Any, ...]
Pair = tuple[int, Hashable, int, Hashable]
"""A column and a part of its value, and a later column and a part of its value."""
View = Callable[[Any], Sequence[Hashable]]
"""The parts of a value that count."""


def itself(value: Hashable) -> tuple[Hashable]:
    """The value as its only part."""
    return (value,)


class Covered(NamedTuple):
    """Two columns, the first before the second, whose pairs are to stand in rows: each two values,
    or, by another view, each part of a value of one with each part of a value of the other."""

    first: int
    second: int
    view: View = itself

    def pairs(self, a: Any, b: Any) -> Iterator[Pair]:
        """The pairs of these values of the two columns."""
        for x, y in product(self.view(a), self.view(b)):
            yield self.first, x, self.second, y


def covering(
    columns: Sequence[Sequence[Hashable]],
    draw: random.Random,
    between: Sequence[Covered] | None = None,
    equivalent: Callable[[Row], Row] | None = None,
) -> list[Row]:
    """Rows in which the pairs of the columns `between` stand (None: of all columns). A row counts
    for its `equivalent` row as well.

    Greedy: a row starts from a pair that is missing, and takes in each further column the value
    that adds the most missing pairs.
    """
    if between is None:
        between = [Covered(i, j) for i, j in combinations(range(len(columns)), 2)]
    missing: dict[Pair, tuple[Covered, Any, Any]] = {}
    for c in between:  # a dict, as a set has no order that is the same in each run
        for a, b in product(columns[c.first], columns[c.second]):
            missing.update(dict.fromkeys(c.pairs(a, b), (c, a, b)))
    rows: list[Row] = []
    while missing:
        c, a, b = next(iter(missing.values()))
        chosen = {c.first: a, c.second: b}
        for k in draw.sample(range(len(columns)), len(columns)):
            if k in chosen:
                continue
            near = [c for c in between if k in c[:2] and (c.first in chosen or c.second in chosen)]
            values = draw.sample(columns[k], len(columns[k]))
            chosen[k] = max(values, key=lambda v: added(missing, near, {**chosen, k: v}))
        row = tuple(chosen[k] for k in range(len(columns)))
        rows.append(row)
        for r in (row, *([equivalent(row)] if equivalent else [])):
            for c in between:
                for pair in c.pairs(r[c.first], r[c.second]):
                    missing.pop(pair, None)
    return rows


def added(missing: Container[Pair], between: Sequence[Covered], chosen: dict[int, Any]) -> int:
    """The number of missing pairs that these values of columns have."""
    return sum(
        pair in missing for c in between for pair in c.pairs(chosen[c.first], chosen[c.second])
    )
