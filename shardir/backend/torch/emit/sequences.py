"""Sequences of values in the text, many of them elements of lists.

x, hs[0], hs[1], hs[2]               x, *hs
hs[2], hs[1], hs[0]                  *reversed(hs)
ws[0], bs[0], ws[1], bs[1], ...      *(x for of_each in zip(ws, bs) for x in of_each)
a, ms[0], b, ms[1], c, ms[2], ...    *(x for of_each in zip([a, b, c, ...], ms) for x in of_each)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_RUN = 3
"""The minimum number of elements of a list that are written as a slice."""

MIN_ROWS = 8
"""The minimum number of rows of lists that alternate with values outside of lists."""

MAX_COLUMNS = 128
"""The maximum number of lists whose elements alternate."""


class Spot(NamedTuple):
    """An element of a list: the variable of the list, the index, and the number of elements. A list
    that is popped elsewhere can be written as a whole only (`is_full`)."""

    name: str
    index: int
    count: int
    is_full: bool = False


Spots = Sequence[Spot | None]
"""The place of each value in a list, or None."""


class _RowText(NamedTuple):
    """The text of consecutive values, and their number."""

    text: str
    values: int


def texts_of(spots: Spots, one: Callable[[int], str]) -> list[str]:
    """Return the texts of values. `one` returns the text of a single value, by its index."""
    out: list[str] = []
    i = 0
    while i < len(spots):
        rows = max(_rows(spots, i), _mixed_rows(spots, i, one), key=lambda r: r.values)
        out.append(rows.text if rows.values else one(i))
        i += max(rows.values, 1)
    return out


def _rows(spots: Spots, i: int) -> _RowText:
    """The rows from index i on whose values are all elements of lists."""
    columns = _distance(spots, i, MAX_COLUMNS)
    if not columns:
        return _RowText("", 0)
    parts = _parts(spots, range(i, i + columns), columns, MIN_RUN)
    return _RowText(_zip_lists(parts.names), parts.rows * columns) if parts else _RowText("", 0)


def _mixed_rows(spots: Spots, i: int, one: Callable[[int], str]) -> _RowText:
    """The rows from index i on whose first value may be outside of lists."""
    if i + 1 >= len(spots) or not (columns := _distance(spots, i + 1, MAX_COLUMNS)) or columns < 2:
        return _RowText("", 0)
    starts = range(i + 1, i + columns)
    parts = _parts(spots, starts, columns, MIN_ROWS)
    if parts is None or any((s := spots[k]) is None or s.count != parts.rows for k in starts):
        return _RowText("", 0)
    stop = i + parts.rows * columns
    first = texts_of(spots[i:stop:columns], lambda k: one(i + k * columns))
    return _RowText(_zip_lists([f"[{', '.join(first)}]", *parts.names]), parts.rows * columns)


def _distance(spots: Spots, i: int, most: int) -> int:
    """The distance from value i to the next element of its list; 0 if there is none."""
    if (first := spots[i]) is None:
        return 0
    for j in range(i + 1, min(i + 1 + most, len(spots))):
        if (spot := spots[j]) is not None and spot.name == first.name:
            return j - i
    return 0


class _ListParts(NamedTuple):
    """The texts of columns as parts of lists, and the number of rows."""

    names: list[str]
    rows: int


def _parts(spots: Spots, starts: range, distance: int, minimum: int) -> _ListParts | None:
    """Return the columns that begin at the values `starts`, if they have enough rows."""
    extents = [_extent(spots, i, distance) for i in starts]
    rows = min(n for n, _ in extents)
    if rows < minimum:
        return None
    names = []
    for i, (_, step) in zip(starts, extents, strict=True):
        spot = spots[i]
        assert spot is not None
        if spot.is_full and (rows < spot.count or abs(step) > 1):
            return None
        names.append(_part(spot, rows, step))
    return _ListParts(names, rows)


def _extent(spots: Spots, i: int, distance: int) -> tuple[int, int]:
    """The number of values from i on, `distance` apart, that are elements of one list with a
    constant step between indices, and that step."""
    last, n, step = spots[i], 1, 0
    if last is None:
        return 0, 0
    for spot in spots[i + distance :: distance]:
        if spot is None or spot.name != last.name or (n > 1 and spot.index - last.index != step):
            break
        step, last, n = spot.index - last.index, spot, n + 1
    return (n, step) if step else (1, 0)


def _part(spot: Spot, rows: int, step: int) -> str:
    """The text of the part of a list from an element on."""
    stop = spot.index + rows * step
    if rows == spot.count and step in (1, -1):
        return spot.name if step == 1 else f"reversed({spot.name})"
    first = "" if spot.index == (0 if step > 0 else spot.count - 1) else str(spot.index)
    last = "" if stop < 0 or stop >= spot.count else str(stop)
    return f"{spot.name}[{first}:{last}{f':{step}' if step != 1 else ''}]"


def _zip_lists(names: Sequence[str]) -> str:
    """Return the elements of one list, or the elements of several lists in turn."""
    if len(names) == 1:
        return f"*{names[0]}"
    return f"*(x for of_each in zip({', '.join(names)}) for x in of_each)"
