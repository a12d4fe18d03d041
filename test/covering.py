"""Covering arrays: few rows in which every two values of two columns stand together somewhere.

Most errors in a program of many parameters show with one value of one of them or with two values
of two (Kuhn, Wallace, Gallo 2004); a covering array tries those at a small part of the product.
"""

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

Row = tuple[Any, ...]
Pair = tuple[int, Hashable, int, Hashable]
"""A column and its value, and a later column and its value."""


def pairs(row: Sequence[Hashable], between: Iterable[tuple[int, int]]) -> Iterator[Pair]:
    """The pairs of values that a row has in these pairs of columns."""
    return ((i, row[i], j, row[j]) for i, j in between)


def covering(
    columns: Sequence[Sequence[Hashable]],
    draw: random.Random,
    between: Sequence[tuple[int, int]] | None = None,
    equivalent: Callable[[Row], Row] | None = None,
) -> list[Row]:
    """Rows in which each pair of values of the columns `between` (i, j), i < j, stands (None: of
    all pairs of columns). A row counts for its `equivalent` row as well.

    Greedy: a row starts from a pair that is missing, and takes in each further column the value
    that adds the most missing pairs.
    """
    if between is None:
        between = [*combinations(range(len(columns)), 2)]
    missing = {
        (i, a, j, b): None for i, j in between for a, b in product(columns[i], columns[j])
    }  # a dict, as a set has no order that is the same in each run
    rows: list[Row] = []
    while missing:
        i, a, j, b = next(iter(missing))
        chosen = {i: a, j: b}
        for k in draw.sample(range(len(columns)), len(columns)):
            if k in chosen:
                continue
            values = draw.sample(columns[k], len(columns[k]))
            chosen[k] = max(values, key=lambda v: added(missing, between, chosen, k, v))
        row = tuple(chosen[k] for k in range(len(columns)))
        rows.append(row)
        for r in (row, *([equivalent(row)] if equivalent else [])):
            for p in pairs(r, between):
                missing.pop(p, None)
    return rows


def added(
    missing: dict[Pair, None],
    between: Sequence[tuple[int, int]],
    chosen: dict[int, Hashable],
    k: int,
    value: Hashable,
) -> int:
    """The number of missing pairs that this value in column k makes with the chosen ones."""
    return sum(
        (i, value, j, chosen[j]) in missing if i == k else (i, chosen[i], j, value) in missing
        for i, j in between
        if (i == k and j in chosen) or (j == k and i in chosen)
    )
