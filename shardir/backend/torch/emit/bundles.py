"""Bundles: the values that runs of one loop pass to runs of another loop, in a list of tuples.

saved = [(x, first_a)]                  the values of a block outside of the loop
for i in range(3):
    ...
    saved.append((h, a))
for i in range(4):
    h, a = saved.pop()                  from the last run to the first, as in a backward part
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from shardir.dialects import train

MIN_BUNDLE = 2
"""The minimum number of values in a bundle."""


@dataclass(eq=False)
class Bundle:
    """Values of a loop, each read by one item of another loop, from the last run to the first."""

    made: list[train.ItemsOp] = field(default_factory=list)
    read: list[train.ItemOp] = field(default_factory=list)
    """The item that reads each value of `made`."""
    name: str = ""
    """The variable of the list."""

    def before(self) -> list[list[SSAValue]]:
        """The rows that are in the list before the loop: values that no run makes and that are
        read last, a row for each run that reads them, the last run first."""
        first = self._first + len(self.made[0].outs)
        return self._rows(range(len(self.read[0].values) - 1, first - 1, -1))

    def after(self) -> list[list[SSAValue]]:
        """The rows that are appended after the loop and read first, in order of addition."""
        return self._rows(range(self._first - 1, -1, -1))

    @property
    def _first(self) -> int:
        return self.read[0].values.index(self.made[0].outs[-1])

    def _rows(self, runs: range) -> list[list[SSAValue]]:
        return [[op.values[run] for op in self.read] for run in runs]


def bundles_of(ops: Sequence[Operation], without: Collection[SSAValue] = ()) -> Iterator[Bundle]:
    """Yield the bundles of a function, without the values of `without`."""
    index = {op: i for i, op in enumerate(ops)}
    bundles: dict[object, Bundle] = {}
    loops: list[train.Loop] = []
    around: dict[Operation, tuple[train.Loop, ...]] = {}
    for op in ops:
        if isinstance(op, train.EndLoop):
            loops.pop()
        around[op] = tuple(loops)
        if isinstance(op, train.Loop):
            loops.append(op)
    for op in ops:
        if not isinstance(op, train.ItemsOp) or op.x in without:
            continue
        readers = {use.operation for v in op.outs for use in v.uses} & index.keys()
        reader = readers.pop() if len(readers) == 1 else None
        if not isinstance(reader, train.ItemOp) or around[reader][:-1] != around[op][:-1]:
            continue
        values, outs = list(reader.values), list(reversed(op.outs))
        if len(set(values)) < len(values) or outs[0] not in values:
            continue
        first = values.index(outs[0])
        others = [*values[:first], *values[first + len(outs) :]]
        if values[first : first + len(outs)] != outs or any(
            index.get(v.owner, -1) > index[around[op][-1]] for v in values[first + len(outs) :]
            if isinstance(v.owner, Operation)
        ):  # fmt: skip
            continue
        key = (around[op][-1], around[reader][-1], first, len(others))
        bundle = bundles.setdefault(key, Bundle())
        bundle.made.append(op)
        bundle.read.append(reader)
    taken = set[train.ItemOp]()
    for bundle in bundles.values():
        # An item may read values of several loops, but is in one bundle only.
        if len(bundle.made) >= MIN_BUNDLE and taken.isdisjoint(bundle.read):
            taken.update(bundle.read)
            yield bundle
