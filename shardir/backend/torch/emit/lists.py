"""The lists of a function: values of equal blocks, of which a loop reads or makes one in each run.

train.item %w0, %w1, %w2        arguments at equal distances      w = arguments[2:8:2]; w[i]
                                results of train.items            hs.pop(), hs[i]
                                any others                        xs = [a, b, c] before the loop
train.items %h                  hs = [] before the loop           hs.append(h)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from xdsl.ir import BlockArgument, Operation, OpResult, SSAValue

from shardir.analysis.repeats import common_name
from shardir.dialects import train

MIN_RESULTS = 8
"""The fewest results of an op, all of one type and read by one op, that are a list."""


def _read_together(values: Sequence[SSAValue]) -> bool:
    """Whether values have one type, and one op reads each of them once, and nothing else does."""
    users = [use.operation for v in values for use in v.uses]
    return len({v.type for v in values}) == len({*users}) == 1 and len(users) == len(values)


@dataclass(eq=False)
class ValueList:
    """Values that one variable of the program holds as a list."""

    values: list[SSAValue]
    stride: int
    """The distance of two among the arguments, or among the results of an op; 0: a list of its
    own."""

    @property
    def hint(self) -> str | None:
        """A name for the list."""
        return common_name([v.name_hint for v in self.values])


def index_of(v: SSAValue) -> int:
    """The number of a value among the arguments of its block, or the results of its op."""
    assert isinstance(v, OpResult | BlockArgument)
    return v.index


class Lists:
    """The lists of a function, and the places of values in them."""

    def __init__(self, ops: Iterable[Operation]):
        self.place: dict[SSAValue, tuple[ValueList, int]] = {}
        """The list of a value, and its index there."""
        self._found: list[ValueList] = []
        items: list[tuple[SSAValue, ...]] = []
        several: list[tuple[SSAValue, ...]] = []
        for op in ops:
            if isinstance(op, train.ItemsOp):
                self._found.append(ValueList(list(op.outs), 0))
            elif isinstance(op, train.ItemOp):
                items.append(tuple(op.values))
            elif len(op.results) >= MIN_RESULTS and _read_together(op.results):
                several.append(tuple(op.results))
        self._number()
        for values in (*sorted(items, key=len, reverse=True), *several):
            self._add(values)

    def _number(self) -> None:
        self.place = {v: (of, i) for of in self._found for i, v in enumerate(of.values)}

    def _add(self, values: tuple[SSAValue, ...]) -> None:
        """Make or extend a list of arguments, or of results of one op, that has these values."""
        if len({v.owner for v in values}) > 1 or self.range(values) is not None:
            return
        if index_of(values[0]) > index_of(values[-1]):
            values = values[::-1]
        strides = {index_of(b) - index_of(a) for a, b in pairwise(values)}
        stride = next(iter(strides))
        if len(strides) > 1 or stride <= 0:
            return
        new = [v for v in values if v not in self.place]
        if len(new) == len(values):
            self._found.append(ValueList(list(values), stride))
        else:
            of, _ = next(self.place[v] for v in values if v in self.place)
            joined = sorted({*of.values, *new}, key=index_of)
            gaps = {index_of(b) - index_of(a) for a, b in pairwise(joined)}
            if of.stride != stride or gaps != {stride} or new[0].owner is not of.values[0].owner:
                return
            of.values[:] = joined
        self._number()

    def range(self, values: Sequence[SSAValue]) -> tuple[ValueList, int, int] | None:
        """The list that has these values one after the other, the index of the first, and whether
        they ascend (1) or descend (-1); None if there is none."""
        places = [self.place.get(v) for v in values]
        if places[0] is None:
            return None
        of, first = places[0]
        for step in (1, -1):
            if places == [(of, first + step * k) for k in range(len(values))]:
                return of, first, step
        return None

    def parts(self, values: Sequence[SSAValue]) -> Iterator[ValueList | list[SSAValue]]:
        """Yield the lists whose values are arguments or results of one op, and the values between
        them that are in none; in order, a list where its first value is."""
        alone: list[SSAValue] = []
        for v in values:
            place = self.place.get(v)
            if place is None or place[0].stride == 0:
                alone.append(v)
            elif place[1] == 0:
                if alone:
                    yield alone
                    alone = []
                yield place[0]
        if alone:
            yield alone


def rows(
    values: Sequence[SSAValue], lists: Lists
) -> Iterator[SSAValue | tuple[list[ValueList], int]]:
    """Yield values one by one; and where they are the first of several lists, then the second of
    each and so on, those lists and how many of each; a negative number: a list from its end."""
    i = 0
    while i < len(values):
        if (of := reversed_at(values, i, lists)) is not None:
            yield [of], -len(of.values)
            i += len(of.values)
            continue
        heads = []
        for v in values[i:]:
            place = lists.place.get(v)
            if place is None or place[1] != 0:
                break
            heads.append(place[0])
        while heads:
            n = min(len(of.values) for of in heads)
            wanted = [of.values[k] for k in range(n) for of in heads]
            if list(values[i : i + len(wanted)]) == wanted:
                yield heads, n
                i += len(wanted)
                break
            heads.pop()
        else:
            yield values[i]
            i += 1


def reversed_at(values: Sequence[SSAValue], i: int, lists: Lists) -> ValueList | None:
    """The list, of two values or more, whose values are those from i on in reverse."""
    place = lists.place.get(values[i])
    if place is None or len(place[0].values) < 2:
        return None
    of = place[0]
    return of if list(values[i : i + len(of.values)]) == of.values[::-1] else None
