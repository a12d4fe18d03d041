"""Sequences of values in the text, many of them elements of lists.

x, hs[0], hs[1], hs[2]               x, *hs
hs[2], hs[1], hs[0]                  *reversed(hs)
ws[0], bs[0], ws[1], bs[1], ...      *(x for of_each in zip(ws, bs) for x in of_each)
a, ms[0], b, ms[1], c, ms[2], ...    *(x for of_each in zip([a, b, c, ...], ms) for x in of_each)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_RUN = 3
"""The fewest elements of a list that are written as a part of it."""

MIN_ROWS = 8
"""The fewest elements of lists with values of no list between them that are written as rows."""

MAX_COLUMNS = 128
"""The most lists whose elements alternate."""


class Spot(NamedTuple):
    """An element of a list: the variable of the list, the index, and the number of elements. A list
    whose elements are taken out is only written in full."""

    name: str
    index: int
    count: int
    is_full: bool = False


Spots = Sequence[Spot | None]
"""By value its place in a list, if it is in one."""


class _RowText(NamedTuple):
    """The text of some values, and the number of values."""

    text: str
    values: int


def texts_of(spots: Spots, one: Callable[[int], str]) -> list[str]:
    """Return the texts of values; `one` returns the text of a single value by its index."""
    out: list[str] = []
    i = 0
    while i < len(spots):
        rows = max(_rows(spots, i), _mixed_rows(spots, i, one), key=lambda r: r.values)
        out.append(rows.text if rows.values else one(i))
        i += max(rows.values, 1)
    return out


def _rows(spots: Spots, i: int) -> _RowText:
    """The rows from i on, all of whose values are elements of lists."""
    columns = _distance(spots, i, MAX_COLUMNS)
    if not columns:
        return _RowText("", 0)
    parts = _parts(spots, range(i, i + columns), columns, MIN_RUN)
    return _RowText(_zip_lists(parts.names), parts.rows * columns) if parts else _RowText("", 0)


def _mixed_rows(spots: Spots, i: int, one: Callable[[int], str]) -> _RowText:
    """The rows from i on that begin with any value."""
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
    """The distance to the next element of the list of value i; 0 if there is none."""
    if (first := spots[i]) is None:
        return 0
    for j in range(i + 1, min(i + 1 + most, len(spots))):
        if (spot := spots[j]) is not None and spot.name == first.name:
            return j - i
    return 0


class _ListParts(NamedTuple):
    """The parts of lists that columns are, and the number of their elements."""

    names: list[str]
    rows: int


def _parts(spots: Spots, starts: range, distance: int, minimum: int) -> _ListParts | None:
    """Return the columns that begin at some values, if they have enough rows."""
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
    """The number of elements of the list of value i, a distance apart, and the step of indices."""
    last, n, step = spots[i], 1, 0
    if last is None:
        return 0, 0
    for spot in spots[i + distance :: distance]:
        if spot is None or spot.name != last.name or (n > 1 and spot.index - last.index != step):
            break
        step, last, n = spot.index - last.index, spot, n + 1
    return (n, step) if step else (1, 0)


def _part(spot: Spot, rows: int, step: int) -> str:
    """The part of a list from an element on."""
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
