"""Live ranges of values, and the storages that they share.

A storage is a piece of memory with all values in it. Its name is the value that it was made for,
its root. The caller tells which values share memory, with `join`, in the order of the ops, by the
relations of aliasing.py:

    the emitter       values that may share memory, so that none is overwritten before its last
                      read; and values written in place
    the memory count  values that share memory, so that none is counted twice
    the search        views, and the new value of an update with the old one
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.analysis.loops import Loops
from shardir.compat.xdsl import operands_of
from shardir.dialects.dist import WaitOp, is_started
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.train import AfterLoop, CarriedOp, CarryOp, ItemOp, ItemsOp, Loop


class Span(NamedTuple):
    """The first and the last op of a live range; of arguments, the first is -1."""

    start: int
    end: int


def live_ops(ops: Sequence[Operation]) -> list[Operation]:
    """Return the ops whose results are used; sends, receives, collectives and ops that set a
    variable are always live."""
    needed: set[SSAValue] = set()
    live = []
    for op in reversed(ops):
        if _is_pure(type(op)) and needed.isdisjoint(op.results):
            continue
        live.append(op)
        needed.update(operands_of(op))
    return live[::-1]


def reads(op: Operation) -> Sequence[SSAValue]:
    """The operands that an op reads: not the variable that train.carry sets."""
    return (op.x,) if type(op) is CarryOp else operands_of(op)


@cache
def _is_pure(kind: type[Operation]) -> bool:
    """Whether ops of a kind do nothing but make their results; asked once for each kind."""
    return issubclass(kind, TensorOp) and not issubclass(kind, CarryOp)


def waits(ops: Sequence[Operation]) -> dict[Operation, int]:
    """Return the index of the last wait for each started collective: until then it reads its
    operands and holds its buffers. If a run of a loop waits for it, that is not before the end of
    the loop."""
    started = [op for op in ops if "started" in op.properties and is_started(op)]
    if not started:
        return {}
    at, loops = {op: i for i, op in enumerate(ops)}, Loops(ops)

    def end(v: SSAValue, of: Loop | None) -> int:
        ends = [0]
        for user in dict.fromkeys(use.operation for use in v.uses):
            loop = loops.around(user) if user in at else None
            inside = loop is not None and loop is not of
            here = at.get(loops.ends[loop] if inside and loop is not None else user, len(ops))
            if isinstance(user, WaitOp):
                ends.append(here)
            elif isinstance(user, AfterLoop | CarryOp) and loop is not None:
                ends += [at[loops.ends[loop]], *(end(x, loops.around(loop)) for x in user.results)]
            elif isinstance(user, CarriedOp | ItemOp):
                ends += [here, *(end(x, loop) for x in user.results)]
            else:
                ends.append(len(ops))
        return max(ends)

    return {op: end(op.results[0], loops.around(op)) for op in started}


class Storages:
    """The storages of one block.

    Args:
        args: the arguments, which belong to the caller and are live throughout.
        ops: the ops that read and write memory, in order.
    """

    def __init__(self, args: Sequence[SSAValue], ops: Sequence[Operation]):
        self.at = {op: i for i, op in enumerate(ops)}
        self._loops = loops = Loops(ops)
        read = map(reads if loops else operands_of, ops)
        self.last = {v: i for i, operands in enumerate(read) for v in operands}
        """The last op that reads a value; of a value from before a loop in which it is read, and
        which the loop does not change, not before the loop's end. Values that no op reads are not
        in it."""
        made = chain([args], map(attrgetter("results"), ops))
        self._born = {v: i for i, values in enumerate(made, -1) for v in values}
        self.held: dict[Operation, list[SSAValue]] = {}
        """By the end of a loop the values from before it that nothing reads later."""
        self._extend(ops, loops)
        self.joined: dict[SSAValue, list[SSAValue]] = {}
        """By value those whose memory it shares, as `join` was told."""
        self._root: dict[SSAValue, SSAValue] = {}
        self._members: dict[SSAValue, list[SSAValue]] = {}
        self._read = self.last | self._read_once(ops, loops)
        self._items = [op for op in ops if isinstance(op, ItemOp)] if loops else []
        self._taken: dict[SSAValue, list[ItemOp]] = {}
        """The ops that take a value of several in a run of a loop."""
        for op in self._items:
            for v in dict.fromkeys(op.values):
                self._taken.setdefault(v, []).append(op)
        self._draws: dict[SSAValue, list[ItemOp]] = {op.out: [op] for op in self._items}
        """By root the ops that draw a value of several into its storage."""
        self._pinned: set[SSAValue] = set()
        self.waits = waits(ops)
        """The index of the last wait for each started collective."""
        self._in_flight: dict[SSAValue, list[Span]] = {}
        for op, end in self.waits.items():
            for v in op.operands:
                self._in_flight.setdefault(v, []).append(Span(self.at[op], end))

    def _extend(self, ops: Sequence[Operation], loops: Loops) -> None:
        """Extend the live ranges of values that a loop reads or adds to over all of it."""
        if not loops:
            return
        changed = {op.carried: loops.around(op) for op in ops if isinstance(op, CarryOp)}
        for loop, end in loops.ends.items():
            begin, last = self.at[loop], self.at[end]
            for op in ops[begin:last]:
                if isinstance(op, AfterLoop) and loops.around(op) is loop:
                    self._born |= dict.fromkeys(op.results, begin)
                for v in reads(op):
                    if self._born[v] < begin < self.last[v] < last:
                        if changed.get(v) is not loop:
                            self.last[v] = last
                        self.held.setdefault(end, []).append(v)

    def _read_once(self, ops: Sequence[Operation], loops: Loops) -> dict[SSAValue, int]:
        """The values that a loop reads in one of its runs only, each with the op that takes it."""
        found: dict[SSAValue, int] = {}
        for op in ops if loops else ():
            loop = loops.around(op)
            if not isinstance(op, ItemOp) or loop is None:
                continue
            begin, end = self.at[loop], self.at[loops.ends[loop]]
            for v in op.values:
                if self.last[v] != end:
                    continue
                if sum(begin < self.at.get(use.operation, -1) < end for use in v.uses) == 1:
                    found[v] = self.at[op]
        return found

    def root(self, v: SSAValue) -> SSAValue:
        """Return the root of a value's storage."""
        return self._root.get(v, v)

    def members(self, root: SSAValue) -> Sequence[SSAValue]:
        """The values in a storage."""
        return self._members.get(root, (root,))

    def join(self, v: SSAValue, other: SSAValue) -> None:
        """Put `v` into the storage of `other`; call it at the op that makes `v`."""
        self.joined.setdefault(v, []).append(other)
        mine, root = self.root(v), self.root(other)
        if mine is root:
            return
        if isinstance(mine, BlockArgument):  # memory that may be the caller's is not written
            mine, root = root, mine
        if self._pinned and mine in self._pinned:
            self._pinned.add(root)
        joined = self._members.pop(mine, None) or [mine]
        for value in joined:
            self._root[value] = root
        self._members.setdefault(root, [root]).extend(joined)
        self._read[root] = max(self._read.get(root, -1), self._read.pop(mine, -1))
        if self._draws and mine in self._draws:
            self._draws.setdefault(root, []).extend(self._draws.pop(mine))
        if self._in_flight and mine in self._in_flight:
            self._in_flight.setdefault(root, []).extend(self._in_flight.pop(mine))

    def pin(self, v: SSAValue) -> None:
        """Forbid writes into the memory of `v`, which outlives the function's call."""
        self._pinned.add(self.root(v))

    def spans(self, among: Iterable[SSAValue] | None = None) -> dict[SSAValue, Span]:
        """Return the live range of each storage, or of those whose root is among some values: from
        the op that makes it to the last that makes or reads a value in it, or the wait for a
        collective that does; arguments to the end."""
        found = dict[SSAValue, Span]()
        joined, read, members, flying = self._root, self._read, self._members, self._in_flight
        last, new = len(self.at), partial(tuple.__new__, Span)  # half the time of Span()
        for root in self._born if among is None else among:
            if root in joined:
                continue
            born = self._born[root]
            if born < 0:
                found[root] = new((born, last))
                continue
            end = max(born, read.get(root, born))
            if root in members:
                end = max(end, *map(self._born.__getitem__, members[root]))
            if flying and root in flying:
                end = max(end, *(span.end for span in flying[root]))
            found[root] = new((born, end))
        return found

    def sizes(
        self, roots: Iterable[SSAValue], size_of: Callable[[SSAValue], int]
    ) -> dict[SSAValue, int]:
        """The bytes of storages: of the values in each of the op that makes it."""
        found, members = dict[SSAValue, int](), self._members
        for root in roots:
            if root in members:
                owner = root.owner
                found[root] = sum(size_of(v) for v in members[root] if v.owner is owner)
            else:
                found[root] = size_of(root)
        return found

    def is_last(self, v: SSAValue, op: Operation) -> bool:
        """Whether nothing reads the memory of `v` after `op`, nor a collective that was started
        before."""
        at, roots = self.at[op], self.sources(self.root(v))
        for root in self._with_items(roots) if self._items else roots:
            if self._read.get(root, -1) > at:
                return False
            if any(span.start < at < span.end for span in self._in_flight.get(root, ())):
                return False
        return True

    def sources(self, root: SSAValue) -> list[SSAValue]:
        """The roots of the storages whose memory may be that of a root: itself, and those of the
        values of which a loop takes one in each run."""
        if root not in self._draws:
            return [root]
        found, todo = {root: None}, [root]
        while todo:
            for op in self._draws.get(todo.pop(), ()):
                new = {r: None for v in op.values if (r := self.root(v)) not in found}
                found |= new
                todo += new
        return list(found)

    def _with_items(self, roots: Collection[SSAValue]) -> set[SSAValue]:
        """The roots, and those of the values that loops take of theirs."""
        found, todo = set(roots), list(roots)
        while todo:
            for v in self.members(todo.pop()):
                taken = {self.root(op.out) for op in self._taken.get(v, ())} - found
                found |= taken
                todo += taken
        return found

    def is_of_each_run(self, op: ItemsOp) -> bool:
        """Whether the values of all runs of a loop have memory of their own: each run makes it, and
        no other result of the loop is in it. Call it when all other values are joined."""
        values, loop = self.members(self.root(op.x)), self._loops.around(op)
        for v in values:
            maker = v.owner
            if not isinstance(maker, Operation) or isinstance(maker, CarriedOp | ItemOp):
                return False
            if self._loops.around(maker) is not loop:
                return False
        users = [use.operation for v in values for use in v.uses]
        return [x for x in users if isinstance(x, CarryOp | ItemsOp)] == [op]

    def is_free(self, v: SSAValue, op: Operation, lent: Collection[SSAValue] = ()) -> bool:
        """Whether `op` may write into the memory of `v`: the function made it, or it is of an
        argument in `lent`, and nothing reads it later."""
        roots = self.sources(self.root(v))
        arguments = [x for r in roots for x in self.members(r) if isinstance(x, BlockArgument)]
        lends = all(x in lent for x in arguments) if arguments else self._pinned.isdisjoint(roots)
        return lends and self.is_last(v, op)

    def is_shared(self, v: SSAValue, op: Operation) -> bool:
        """Whether another operand of `op` is in the storage of `v`."""
        return sum(self.root(x) is self.root(v) for x in op.operands) > 1
