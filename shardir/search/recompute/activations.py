"""The values that the forward part of a step makes for its backward part, in groups: storages
that are kept together or made again together, by the ops that make them.

%h  = nn.matmul %x, %w          group 0: %h and its view %h2, one storage, made by two ops
%h2 = nn.reshape %h
%p  = nn.gelu %h2               group 1: %p, which reads group 0
train.backward
%d  = nn.gelu_grad %h2, %g      reads group 0

Ops have numbers: their places among the live ops of the function. A group that is repeated is made
again right before the first op of the backward part that needs it (`repetitions.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

import numpy as np
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.analysis.storages import reads, waits
from shardir.cost.memory import LiveStorages, is_on_host
from shardir.cost.seconds import cost_of
from shardir.dialects import dist, train
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.train import BackwardOp, CarryOp


def is_repeatable(op: Operation) -> bool:
    """Whether a second run of an op has the results of the first and no other effect."""
    is_computed = isinstance(op, TensorOp | dist.CollectiveOp | dist.WaitOp)
    return is_computed and not isinstance(op, train.Update)


@dataclass(eq=False)
class SavedActivation:
    """A storage that the forward part makes.

    Attributes:
        made: the op that makes it.
        read: the last op of the forward part that reads it.
        first, last: the first and the last op of the backward part that read it; None if none does.
        readers: the groups of the forward part that read it, each with its last op that does.
    """

    value: SSAValue
    bytes: int
    made: int
    read: int
    first: int | None = None
    last: int | None = None
    readers: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class ActivationGroup:
    """Ops of the forward part that are all repeated, or none.

    Attributes:
        repeatable: whether they may be repeated.
        pinned: whether what they make stays on the device: it is read where no repetition may be.
        seconds: the estimated time to repeat them.
        buffers: of its collectives, the op and the bytes of its buffers.
        needed: whether the backward part reads it, or a group that may be repeated for it.
    """

    ops: list[Operation]
    repeatable: bool
    pinned: bool
    seconds: float
    activations: list[SavedActivation]
    buffers: list[tuple[int, int]]
    needed: bool = False


class Activations:
    """The groups of a function in the local view: first those that are never repeated, then the
    others, each after those that it reads; and the memory of everything else.

    Attributes:
        start: the number of the last `train.backward`.
        fixed: the bytes of everything else at each op.
        between: the bytes of it right before each op: of what is live there and at the op before.

    Args:
        repeats: whether an op of the forward part may be repeated. Those that return values, set
            variables, or are in another loop than `train.backward` are not, whatever it says.
    """

    def __init__(self, f: FuncOp, mesh: Mesh, repeats: Callable[[Operation], bool]):
        self.live = live = LiveStorages(f, mesh)
        self.f, self.ops, self.mesh = f, live.ops, mesh
        self.start = max(i for i, op in enumerate(self.ops) if isinstance(op, BackwardOp))
        self._loops = Loops(f.body.block.ops)
        self.groups = self._groups(*self._members(repeats))
        self._find_readers()
        self._find_needed()
        self._find_fixed()

    # ---- groups ----

    def _members(
        self, repeats: Callable[[Operation], bool]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The ops of each group: of those that are never repeated, and of the others."""
        root_of: dict[int, int] = {}

        def root(i: int) -> int:
            while root_of.get(i, i) != i:
                i = root_of[i]
            return i

        fixed, at = set[int](), self.live.at
        pinned = self._pinned = set[int]()
        loop = self._loops.around(self.ops[self.start])
        for i, op in enumerate(self.ops):
            for v in reads(op):
                maker = self._maker(v)
                if maker is not None and not self._may_read(op, maker, loop):
                    pinned.add(maker)
            if i >= self.start:
                continue
            if not is_repeatable(op) or not repeats(op):
                fixed.add(i)
            if self._loops.around(op) is not loop or any(map(is_on_host, op.results)):
                pinned.add(i)
            for v in op.results:
                owner = self.live.root(v).owner
                if not isinstance(owner, Operation):
                    pinned.add(i)  # a view of an argument
                elif (a := root(at[owner])) != (b := root(i)):
                    root_of[max(a, b)] = min(a, b)
        members: dict[int, list[int]] = {}
        for i in range(self.start):
            members.setdefault(root(i), []).append(i)
        found = ([], [])
        fixed |= pinned
        for group in members.values():
            found[fixed.isdisjoint(group)].append(group)
        return found

    def _maker(self, v: SSAValue) -> int | None:
        """The number of the op of the forward part that makes a value; None for any other."""
        i = self.live.at.get(v.owner) if isinstance(v.owner, Operation) else None
        return i if i is not None and i < self.start else None

    def _may_read(self, op: Operation, maker: int, loop: object) -> bool:
        """Whether an op may read a repetition: not on another stage, or in another loop."""
        if train.stage_of(op) != train.stage_of(self.ops[maker]):
            return False
        return self._loops.around(op) is loop and not isinstance(op, ReturnOp | CarryOp)

    def _groups(self, fixed: list[list[int]], members: list[list[int]]) -> list[ActivationGroup]:
        """The groups, in order; one that reads itself through others is never repeated."""
        of = {i: n for n, group in enumerate(members) for i in group}

        def sources(n: int) -> set[int]:
            read = {self._maker(v) for i in members[n] for v in self.ops[i].operands}
            return {of[i] for i in read if i in of} - {n}

        while True:
            try:
                order = [
                    *TopologicalSorter({n: sources(n) for n in set(of.values())}).static_order()
                ]
                break
            except CycleError as e:
                of = {i: n for i, n in of.items() if n not in e.args[1]}
        fixed = fixed + [group for n, group in enumerate(members) if n not in order]
        found = [self._group(group, False) for group in fixed]
        return found + [self._group(members[n], True) for n in order]

    def _group(self, numbers: list[int], repeatable: bool) -> ActivationGroup:
        ops = [self.ops[i] for i in numbers]
        costs = [cost_of(op, self.mesh) for op in ops] if repeatable else []
        made = [
            SavedActivation(v, size, i, i)
            for i, op in zip(numbers, ops, strict=True)
            for v in op.results
            if (size := self.live.sizes.get(v)) is not None
        ]
        buffers = [(i, self.live.buffers[op][0]) for i, op in zip(numbers, ops, strict=True)
                   if op in self.live.buffers]  # fmt: skip
        seconds = sum(c.seconds for c in costs if c is not None)
        pinned = not self._pinned.isdisjoint(numbers)
        return ActivationGroup(ops, repeatable, pinned, seconds, made, buffers)

    # ---- who reads them ----

    def _find_readers(self) -> None:
        found = {a.value: a for g in self.groups for a in g.activations}
        of = {op: n for n, g in enumerate(self.groups) for op in g.ops}
        ends = waits(self.ops)
        for i, op in enumerate(self.ops):
            end = ends.get(op, i)
            for v in reads(op):
                a = found.get(self.live.root(v))
                if a is None:
                    continue
                if i < self.start:
                    a.read = max(a.read, end)
                    n = of.get(op)
                    if n is not None and a not in self.groups[n].activations:
                        a.readers[n] = i
                elif self._maker(v) is not None and a.first is None:
                    a.first = i
            for v in op.results:  # a view that nothing reads, and what is written in place
                if i < self.start and (a := found.get(self.live.root(v))) is not None:
                    a.read = max(a.read, i)
        for v, a in found.items():
            if (end := self.live.spans[v].end) > self.start:
                a.last = min(end, len(self.ops) - 1)

    def _find_needed(self) -> None:
        for g in reversed(self.groups):
            g.needed = any(
                a.first is not None or any(self._may_need(n) for n in a.readers)
                for a in g.activations
            )

    def _may_need(self, n: int) -> bool:
        """Whether a group may be repeated with an effect."""
        return self.groups[n].needed and self.groups[n].repeatable

    # ---- everything else ----

    def _find_fixed(self) -> None:
        mine = {a.value for g in self.groups for a in g.activations}
        number = len(self.ops)
        at, between = np.zeros(number + 2, np.int64), np.zeros(number + 2, np.int64)
        for size, start, end in self._others(mine):
            at[start + 1] += size  # arguments are from -1
            at[end + 2] -= size
            between[start + 2] += size
            between[end + 2] -= size
        self.fixed = np.cumsum(at)[1 : number + 1]
        self.between = np.cumsum(between)[1 : number + 1]

    def _others(self, mine: set[SSAValue]) -> Iterator[tuple[int, int, int]]:
        """Yield the bytes, the first and the last op of everything else that is live."""
        last = len(self.ops) - 1
        for v, (start, end) in self.live.spans.items():
            if v not in mine:
                begin = -1 if isinstance(v, BlockArgument) else start
                yield self.live.sizes[v], begin, min(end, last)
        for size, (start, end) in self.live.buffers.values():
            yield size, start, min(end, last)
