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
"""The minimum number of states with one name in a list."""

MIN_RESULTS = 8
"""The minimum number of an op's results in a list; they have one type and one reader."""


def columns_of(f: FuncOp) -> list["ValueList"]:
    """Return lists of a function's states with one name, such as `exp_avg`: one state for each of
    several parameters, at equal distances among the arguments."""
    states: dict[str, list[tuple[BlockArgument, SSAValue]]] = {}
    parameters: dict[str, BlockArgument] = {}
    for v, argument in zip(f.body.block.args, arguments(f), strict=True):
        if argument.role is Role.PARAMETER and argument.key is not None:
            parameters[argument.key] = v
        elif argument.role is Role.STATE and argument.key is not None:
            parameter, _, name = argument.key.rpartition(".")
            if parameter in parameters:
                states.setdefault(name, []).append((v, parameters[parameter]))
    columns = []
    for name, pairs in states.items():
        gaps = {b.index - a.index for (a, _), (b, _) in pairwise(pairs)}
        if len(pairs) >= MIN_COLUMN and len(gaps) == 1:
            values, of = ([p[k] for p in pairs] for k in range(2))
            columns.append(ValueList(values, gaps.pop(), name, of))
    return columns


def _read_together(values: Sequence[SSAValue]) -> bool:
    """Whether values have one type, and one op is the only reader and reads each value once."""
    users = [use.operation for v in values for use in v.uses]
    return len({v.type for v in values}) == len({*users}) == 1 and len(users) == len(values)


@dataclass(eq=False)
class ValueList:
    """Values in one list of the program."""

    values: list[SSAValue]
    stride: int
    """The distance of neighbours among the arguments, or among the results of an op; 0 for a list
    that the function makes."""
    name: str | None = None
    """The name of the list, if it does not follow from the names of its values."""
    of: list[SSAValue] | None = None
    """The parameters of states."""

    @property
    def hint(self) -> str | None:
        """A name for the list."""
        return self.name or common_name([v.name_hint for v in self.values])


def index_of(v: SSAValue) -> int:
    """The index of a value among the arguments of its block, or the results of its op."""
    assert isinstance(v, OpResult | BlockArgument)
    return v.index


class Lists:
    """The lists of a function, and the places of values in them."""

    def __init__(self, ops: Iterable[Operation], columns: Iterable[ValueList] = ()):
        self.place: dict[SSAValue, tuple[ValueList, int]] = {}
        """The list of a value, and its index in the list."""
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
        """Make or extend a list of arguments, or of results of one op, so that it has `values`."""
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
        """The list with these values, the index of the first value, and the step between their
        indices, such as -1; None if no list has them."""
        places = [self.place.get(v) for v in values]
        if places[0] is None or places[-1] is None:
            return None
        of, first = places[0]
        step = 1 if len(values) == 1 else (places[-1][1] - first) // (len(values) - 1)
        if step == 0 or places != [(of, first + step * k) for k in range(len(values))]:
            return None
        return of, first, step

    def parts(self, values: Sequence[SSAValue]) -> Iterator[ValueList | list[SSAValue]]:
        """Yield the lists of arguments or results of one op, at the place of their first value, and
        the values in between that are in no such list."""
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
