"""The lists of a function: values of equal blocks, one for each run of a loop.

train.item %w0, %w1, %w2        arguments at equal distances      w = arguments[2:8:2]; w[i]
                                results of train.items            hs.pop(), hs[i]
                                other values                      xs = [a, b, c] before the loop
train.items %h                  hs = [] before the loop           hs.append(h)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, Operation, OpResult, SSAValue

from shardir.analysis.repeats import common_name
from shardir.dialects import train
from shardir.dialects.train import Role, arguments

MIN_COLUMN = 8
"""The fewest states of one name that are a list."""

MIN_RESULTS = 8
"""The fewest results of an op, all of one type and read by one op, that are a list."""


def columns_of(f: FuncOp) -> list["ValueList"]:
    """Return the lists of a function's states with one state for each parameter, or for some:
    states of one name, such as `exp_avg`, at equal distances among its arguments."""
    found: dict[str, list[tuple[BlockArgument, SSAValue]]] = {}
    parameters: dict[str, BlockArgument] = {}
    for v, argument in zip(f.body.block.args, arguments(f), strict=True):
        if argument.role is Role.PARAMETER and argument.key is not None:
            parameters[argument.key] = v
        elif argument.role is Role.STATE and argument.key is not None:
            of, _, name = argument.key.rpartition(".")
            if of in parameters:
                found.setdefault(name, []).append((v, parameters[of]))
    columns = []
    for name, pairs in found.items():
        gaps = {b.index - a.index for (a, _), (b, _) in pairwise(pairs)}
        if len(pairs) >= MIN_COLUMN and len(gaps) == 1:
            values, of = ([p[k] for p in pairs] for k in range(2))
            columns.append(ValueList(values, gaps.pop(), name, of))
    return columns


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
    name: str | None = None
    """Its name, if it does not follow from the names of its values."""
    of: list[SSAValue] | None = None
    """Of states the parameters."""

    @property
    def hint(self) -> str | None:
        """A name for the list."""
        return self.name or common_name([v.name_hint for v in self.values])


def index_of(v: SSAValue) -> int:
    """The number of a value among the arguments of its block, or the results of its op."""
    assert isinstance(v, OpResult | BlockArgument)
    return v.index


class Lists:
    """The lists of a function, and the places of values in them."""

    def __init__(self, ops: Iterable[Operation], columns: Iterable[ValueList] = ()):
        self.place: dict[SSAValue, tuple[ValueList, int]] = {}
        """The list of a value, and its index there."""
        self._found: list[ValueList] = list(columns)
        items: list[tuple[SSAValue, ...]] = []
        several: list[tuple[SSAValue, ...]] = []
        for op in ops:
            if isinstance(op, train.ItemsOp):
                self._found.append(ValueList(list(op.outs), 0))
            elif isinstance(op, train.ItemOp):
                items.append(tuple(op.values))
            elif len(op.results) >= MIN_RESULTS and _read_together(op.results):
                several.append(tuple(op.results))
        for of in self._found:
            self._number(of)
        for values in (*sorted(items, key=len, reverse=True), *several):
            self._add(values)

    def _number(self, of: ValueList) -> None:
        self.place |= {v: (of, i) for i, v in enumerate(of.values)}

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
            of = ValueList(list(values), stride)
            self._found.append(of)
        else:
            of, _ = next(self.place[v] for v in values if v in self.place)
            joined = sorted({*of.values, *new}, key=index_of)
            gaps = {index_of(b) - index_of(a) for a, b in pairwise(joined)}
            if of.stride != stride or gaps != {stride} or new[0].owner is not of.values[0].owner:
                return
            of.values[:] = joined
        self._number(of)

    def range(self, values: Sequence[SSAValue]) -> tuple[ValueList, int, int] | None:
        """The list that has these values, the index of the first, and the distance of each index to
        the next, such as -1; None if there is none."""
        places = [self.place.get(v) for v in values]
        if places[0] is None or places[-1] is None:
            return None
        of, first = places[0]
        step = 1 if len(values) == 1 else (places[-1][1] - first) // (len(values) - 1)
        if step == 0 or places != [(of, first + step * k) for k in range(len(values))]:
            return None
        return of, first, step

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
