"""Live ranges of values, and the storages that they share.

A storage is a piece of memory with all values in it, named by its root, the value for which it was
made. The caller joins values that share memory, in the order of the ops, by the relations of
aliasing.py:

    the emitter       values that may share memory, so that none is overwritten before its last
                      read; and values written in place
    the memory count  values that share memory, so that each is counted once
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
    """Return the ops whose results are used, and all sends, receives, collectives and ops that set
    a variable."""
    used: set[SSAValue] = set()
    live = []
    for op in reversed(ops):
        if _is_pure(type(op)) and used.isdisjoint(op.results):
            continue
        live.append(op)
        used.update(operands_of(op))
    return live[::-1]


def reads(op: Operation) -> Sequence[SSAValue]:
    """Return the operands that an op reads: without the variable that train.carry sets."""
    return (op.x,) if type(op) is CarryOp else operands_of(op)


@cache
def _is_pure(kind: type[Operation]) -> bool:
    """Whether ops of a kind only make their results; cached by kind."""
    return issubclass(kind, TensorOp) and not issubclass(kind, CarryOp)


def waits(ops: Sequence[Operation]) -> dict[Operation, int]:
    """Return the index of the last wait for each started collective, which reads its operands and
    holds its buffers until then. If a run of a loop waits for it, the index is the loop's end or
    later."""
    started = [op for op in ops if "started" in op.properties and is_started(op)]
    if not started:
        return {}
    at, loops = {op: i for i, op in enumerate(ops)}, Loops(ops)

    def end(v: SSAValue, own_loop: Loop | None) -> int:
        ends = [0]
        for user in dict.fromkeys(use.operation for use in v.uses):
            loop = loops.around(user) if user in at else None
            in_inner_loop = loop is not None and loop is not own_loop
            position = at.get(
                loops.ends[loop] if in_inner_loop and loop is not None else user, len(ops)
            )
            if isinstance(user, WaitOp):
                ends.append(position)
            elif isinstance(user, AfterLoop | CarryOp) and loop is not None:
                ends += [at[loops.ends[loop]], *(end(x, loops.around(loop)) for x in user.results)]
            elif isinstance(user, CarriedOp | ItemOp):
                ends += [position, *(end(x, loop) for x in user.results)]
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
        """The last op that reads a value; the loop's end or later for a value from before the loop
        that the loop reads and does not change. Values that no op reads are missing."""
        made = chain([args], map(attrgetter("results"), ops))
        self._born = {v: i for i, values in enumerate(made, -1) for v in values}
        self.held: dict[Operation, list[SSAValue]] = {}
        """For the end of each loop, values from before the loop whose last read is in it."""
        self._extend_over_loops(ops, loops)
        self.joined: dict[SSAValue, list[SSAValue]] = {}
        """For each value the values with which `join` was called."""
        self._root: dict[SSAValue, SSAValue] = {}
        self._members: dict[SSAValue, list[SSAValue]] = {}
        self._read = self.last | self._read_once(ops, loops)
        self._items = [op for op in ops if isinstance(op, ItemOp)] if loops else []
        self._taken: dict[SSAValue, list[ItemOp]] = {}
        """For each value the ops that take it in a run of a loop."""
        for op in self._items:
            for v in dict.fromkeys(op.values):
                self._taken.setdefault(v, []).append(op)
        self._draws: dict[SSAValue, list[ItemOp]] = {op.out: [op] for op in self._items}
        """For each root the ops that take an item into its storage."""
        self._pinned: set[SSAValue] = set()
        self.waits = waits(ops)
        """The index of the last wait for each started collective."""
        self._in_flight: dict[SSAValue, list[Span]] = {}
        for op, end in self.waits.items():
            for v in op.operands:
                self._in_flight.setdefault(v, []).append(Span(self.at[op], end))

    def _extend_over_loops(self, ops: Sequence[Operation], loops: Loops) -> None:
        """Extend the live ranges of values that a loop reads or accumulates over the whole loop."""
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
        """Return the values that only one run of a loop reads, each with the op that takes it."""
        takers: dict[SSAValue, int] = {}
        for op in ops if loops else ():
            loop = loops.around(op)
            if not isinstance(op, ItemOp) or loop is None:
                continue
            begin, end = self.at[loop], self.at[loops.ends[loop]]
            for v in op.values:
                if self.last[v] != end:
                    continue
                if sum(begin < self.at.get(use.operation, -1) < end for use in v.uses) == 1:
                    takers[v] = self.at[op]
        return takers

    def root(self, v: SSAValue) -> SSAValue:
        """Return the root of a value's storage."""
        return self._root.get(v, v)

    def members(self, root: SSAValue) -> Sequence[SSAValue]:
        """Return the values in a storage."""
        return self._members.get(root, (root,))

    def join(self, v: SSAValue, other: SSAValue) -> None:
        """Put `v` into the storage of `other`; called at the op that makes `v`."""
        self.joined.setdefault(v, []).append(other)
        own, root = self.root(v), self.root(other)
        if own is root:
            return
        if isinstance(own, BlockArgument):  # memory that may be the caller's is not written
            own, root = root, own
        if self._pinned and own in self._pinned:
            self._pinned.add(root)
        joined = self._members.pop(own, None) or [own]
        for value in joined:
            self._root[value] = root
        self._members.setdefault(root, [root]).extend(joined)
        self._read[root] = max(self._read.get(root, -1), self._read.pop(own, -1))
        if self._draws and own in self._draws:
            self._draws.setdefault(root, []).extend(self._draws.pop(own))
        if self._in_flight and own in self._in_flight:
            self._in_flight.setdefault(root, []).extend(self._in_flight.pop(own))

    def pin(self, v: SSAValue) -> None:
        """Forbid writes into the memory of `v`, which outlives the function's call."""
        self._pinned.add(self.root(v))

    def spans(self, among: Iterable[SSAValue] | None = None) -> dict[SSAValue, Span]:
        """Return the live range of each storage, or of the storages with roots in `among`: from the
        op that makes it to the last op that makes or reads a value in it, or to the wait for a
        collective that reads it; arguments live to the end."""
        spans = dict[SSAValue, Span]()
        joined, read, members, in_flight = self._root, self._read, self._members, self._in_flight
        last, make_span = len(self.at), partial(tuple.__new__, Span)  # half the time of Span()
        for root in self._born if among is None else among:
            if root in joined:
                continue
            born = self._born[root]
            if born < 0:
                spans[root] = make_span((born, last))
                continue
            end = max(born, read.get(root, born))
            if root in members:
                end = max(end, *map(self._born.__getitem__, members[root]))
            if in_flight and root in in_flight:
                end = max(end, *(span.end for span in in_flight[root]))
            spans[root] = make_span((born, end))
        return spans

    def sizes(
        self, roots: Iterable[SSAValue], size_of: Callable[[SSAValue], int]
    ) -> dict[SSAValue, int]:
        """Return the bytes of storages: of the values in it that the storage's first op makes."""
        sizes, members = dict[SSAValue, int](), self._members
        for root in roots:
            if root in members:
                owner = root.owner
                sizes[root] = sum(size_of(v) for v in members[root] if v.owner is owner)
            else:
                sizes[root] = size_of(root)
        return sizes

    def is_last(self, v: SSAValue, op: Operation) -> bool:
        """Whether nothing reads the memory of `v` after `op`, including collectives started
        before."""
        at, roots = self.at[op], self.sources(self.root(v))
        for root in self._with_items(roots) if self._items else roots:
            if self._read.get(root, -1) > at:
                return False
            if any(span.start < at < span.end for span in self._in_flight.get(root, ())):
                return False
        return True

    def sources(self, root: SSAValue) -> list[SSAValue]:
        """Return the roots of the storages whose memory may be a root's: the root, and the roots of
        the values from which a loop takes it as an item."""
        if root not in self._draws:
            return [root]
        roots, pending = {root: None}, [root]
        while pending:
            for op in self._draws.get(pending.pop(), ()):
                added = {r: None for v in op.values if (r := self.root(v)) not in roots}
                roots |= added
                pending += added
        return list(roots)

    def _with_items(self, roots: Collection[SSAValue]) -> set[SSAValue]:
        """Return roots, and the roots of the items that loops take from them."""
        all_roots, pending = set(roots), list(roots)
        while pending:
            for v in self.members(pending.pop()):
                taken = {self.root(op.out) for op in self._taken.get(v, ())} - all_roots
                all_roots |= taken
                pending += taken
        return all_roots

    def is_of_each_run(self, op: ItemsOp) -> bool:
        """Whether the values of all runs of a loop have memory of their own: each run makes it, and
        no further result of the loop is in it. Call this after all joins."""
        values, loop = self.members(self.root(op.x)), self._loops.around(op)
        for v in values:
            maker = v.owner
            if not isinstance(maker, Operation) or isinstance(maker, CarriedOp | ItemOp):
                return False
            if self._loops.around(maker) is not loop:
                return False
        users = [use.operation for v in values for use in v.uses]
        return [x for x in users if isinstance(x, CarryOp | ItemsOp)] == [op]

    def is_free(self, v: SSAValue, op: Operation, donated: Collection[SSAValue] = ()) -> bool:
        """Whether `op` may write into the memory of `v`: the function made it, or it belongs to an
        argument in `donated`, and nothing reads it later."""
        roots = self.sources(self.root(v))
        arguments = [x for r in roots for x in self.members(r) if isinstance(x, BlockArgument)]
        may_write = (
            all(x in donated for x in arguments) if arguments else self._pinned.isdisjoint(roots)
        )
        return may_write and self.is_last(v, op)

    def is_shared(self, v: SSAValue, op: Operation) -> bool:
        """Whether a second operand of `op` is in the storage of `v`."""
        return sum(self.root(x) is self.root(v) for x in op.operands) > 1
