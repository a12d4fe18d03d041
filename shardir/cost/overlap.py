"""The time of starts: between which ops computation hides a collective.

Computation keeps its order, so a time is that at which an op begins if computation waits for no
collective. A collective can start when its operands are available, and must end before the first
op that needs its result.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, repeat
from typing import TypeGuard

from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.cost.schedule import level_of, seconds_in_order
from shardir.cost.seconds import OpCost, cost_of
from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.dialects.blocks import of_kind
from shardir.dialects.nn.types import size_of
from shardir.dialects.train import available_after

MIN_HIDDEN = 0.05
"""The part of a collective's time that computation must hide for it to be started."""


@cache
def computes(kind: type[Operation]) -> bool:
    """Whether ops of a kind are no communication; asked once for each kind."""
    return not issubclass(kind, (dist.CollectiveOp, dist.WaitOp))


class Costs(dict[Operation, OpCost]):
    """The cost of each op of a block, computed when it is first asked for; an op without a cost
    (such as a call) hides nothing."""

    def __init__(self, ops: Sequence[Operation], mesh: Mesh):
        super().__init__()
        self.mesh, self.loops = mesh, Loops(ops)

    def __missing__(self, op: Operation) -> OpCost:
        try:
            cost = cost_of(op, self.mesh)
        except ShardirError:
            cost = None
        if cost is None:
            cost = OpCost(op, 0, 0, 0.0)
        elif self.loops:
            cost = cost.times(self.loops.runs(op))
        self[op] = cost
        return cost

    def of_ops(self, ops: Iterable[Operation]) -> float:
        """Return the seconds of the ops of the block, in their order."""
        return seconds_in_order(map(self.__getitem__, ops), self.mesh)


def can_start(op: Operation, mesh: Mesh) -> TypeGuard[dist.AsyncOp]:
    """Tell whether an op is a collective or a copy, not started, whose result is used."""
    return (
        isinstance(op, dist.AsyncOp)
        and not dist.is_started(op)
        and op.moves(mesh)
        and any(v.first_use is not None for v in op.results)
    )


def startable(ops: Iterable[Operation], mesh: Mesh) -> list[dist.AsyncOp]:
    """Return the ops that can start (`can_start`), in order."""
    return [op for op in of_kind(ops, dist.AsyncOp) if can_start(op, mesh)]


def grows(op: dist.AsyncOp) -> bool:
    """Whether the results take more of a device's memory than the operands, as those of an
    all-gather, and of a copy from the host."""
    return sum(map(_on_device, op.outs)) > sum(map(_on_device, op.values))


def frees(op: dist.AsyncOp) -> bool:
    """Whether an op is a copy to the host, after which the device may not need the operands."""
    return isinstance(op, dist.CopyOp) and not grows(op)


def _on_device(v: SSAValue) -> int:
    """Return the bytes of a value in the memory of a device."""
    layout = dist.layout_of(v)
    return 0 if layout is not None and layout.host else size_of(v)


def users(op: Operation, loops: Loops) -> set[Operation]:
    """Return the ops that need a result of an op: for those in another loop its beginning."""
    return {loops.needed_at(use.operation, op) for v in op.results for use in v.uses}


class Timeline:
    """The time of each op of a block and of each value, if computation waits for no collective."""

    def __init__(self, ops: Sequence[Operation], costs: Costs):
        self.mesh, self.costs = costs.mesh, costs
        self.loops = costs.loops
        self.seconds = {op: costs[op].seconds for op in ops if computes(type(op))}
        self.begins = self.begins_of(ops)
        self._arrivals: dict[Operation, float] = {}

    def begins_of(self, ops: Sequence[Operation]) -> dict[Operation, float]:
        """Return the time at which each op begins, in this order."""
        spent = accumulate(map(self.seconds.get, ops, repeat(0.0)), initial=0.0)
        return dict(zip(ops, spent, strict=False))

    def available(self, v: SSAValue) -> float:
        """Return the time at which a value is available, if collectives start at once."""
        op = v.owner
        if not isinstance(op, Operation):
            return 0.0
        if can_start(op, self.mesh):
            if op not in self._arrivals:
                begin = max(map(self.available, op.operands))
                self._arrivals[op] = begin + self.costs[op].seconds
            return self._arrivals[op]
        there = available_after(op)
        return self.begins[there] + self.seconds.get(there, 0.0)


def hideable(
    ops: Sequence[Operation], candidates: Sequence[dist.AsyncOp], timeline: Timeline
) -> dict[dist.AsyncOp, OpCost]:
    """Return the `startable` collectives of a block of which computation between operands and users
    can hide enough.

    Operands and users are those of a chain of collectives.
    """
    loops = timeline.loops
    begins = timeline.begins_of(ops)
    earliest: dict[Operation, float] = {}
    for op in candidates:
        owners = [
            loops.available_after(v.owner, op)
            for v in op.operands if isinstance(v.owner, Operation)
        ]  # fmt: skip
        if (loop := loops.around(op)) is not None:
            owners.append(loop)
        ends = (earliest.get(o, begins[o] + timeline.seconds.get(o, 0.0)) for o in owners)
        earliest[op] = max(ends, default=0.0)
    latest: dict[Operation, float] = {}
    for op in reversed(candidates):
        latest[op] = min(latest.get(u, begins[u]) for u in users(op, loops))
    return {
        op: timeline.costs[op] for op in candidates
        if latest[op] - earliest[op] > MIN_HIDDEN * timeline.costs[op].seconds
    }  # fmt: skip


class StartSchedule:
    """The starts of the collectives of a block that computation can hide.

    A position is the index of an op among the others, before which a collective starts or by which
    it has ended.
    """

    def __init__(
        self, ops: Sequence[Operation], timeline: Timeline, costs: dict[dist.AsyncOp, OpCost]
    ):
        """`costs`: of those that start, of `hideable` ones."""
        self.mesh, self.loops, self.costs = timeline.mesh, timeline.loops, costs
        self.others = [op for op in ops if op not in self.costs]
        self.at = {op: i for i, op in enumerate(self.others)}
        self.begins = list(timeline.begins_of(self.others).values())
        self.latest: dict[Operation, int] = {}
        """The first use of the result, through other collectives too."""
        for op in reversed(self.costs):
            self.latest[op] = min(
                self.at[u] if u in self.at else self.latest[u] for u in users(op, self.loops)
            )
        self.starts: dict[Operation, int] = {}
        self.ends: dict[Operation, int] = {}
        self._free = 0.0
        """When the copies to the host so far have ended."""
        for op in self.costs:
            self._start_early(op)
        free: dict[str, float] = {}
        for op in reversed(self.costs):
            if grows(op):
                self._start_late(op, free)

    def _start_early(self, op: dist.AsyncOp) -> None:
        """Start when the operands are available."""
        ready = 0
        for v in op.values:
            if isinstance(v.owner, Operation):
                maker = self.loops.available_after(v.owner, op)
                end = self.ends.get(maker)
                ready = max(ready, self.at[maker] + 1 if end is None else end)
        ready = self._in_loop(op, ready)
        begin = self.begins[ready]
        if frees(op):
            begin = self._free = max(begin, self._free) + self.costs[op].seconds
        else:
            begin += self.costs[op].seconds
        done = bisect_left(self.begins, begin, lo=ready)
        self.starts[op] = ready
        self.ends[op] = min(done, self.latest[op])

    def _start_late(self, op: dist.AsyncOp, free: dict[str, float]) -> None:
        """Start as late as the computation before the first use hides it.

        `free` has the time at which a later collective needs the links of a level.
        """
        name, use, cost = level_of(self.mesh, op.axes.data), self.first_use(op), self.costs[op]
        begin = min(self.begins[use], free.get(name, self.begins[use])) - cost.seconds
        hidden = bisect_right(self.begins, begin, hi=use + 1) - 1
        start = self.starts[op] = self._in_loop(op, max(self.starts[op], hidden))
        free[name] = max(begin, self.begins[start])

    def _in_loop(self, op: Operation, start: int) -> int:
        """Return the first position from `start` on at which an op is in the loop that it is in, or
        in none if it is in none."""
        mine, there = self.loops.around(op), self.loops.around(self.others[start])
        if mine is there:
            return start
        if mine is not None:
            return self.at[mine] + 1
        assert there is not None
        return self.at[self.loops.ends[there]] + 1

    def freed(self, op: dist.AsyncOp) -> Operation | None:
        """Return the op before which a copy to the host has ended, after which its operand is not
        needed; None of another collective, and where that op is in another loop."""
        if not frees(op):
            return None
        found = self.others[min(self.ends[op], len(self.others) - 1)]
        return found if self.loops.around(found) is self.loops.around(op) else None

    def first_use(self, op: Operation) -> int:
        """Return the position of the first op that uses a result."""
        return min(self.at[u] if u in self.at else self.starts[u] for u in users(op, self.loops))

    def in_order(self) -> list[dist.AsyncOp]:
        """Return the collectives in the order of their starts."""
        return sorted(self.costs, key=self.starts.__getitem__)

    def hides(self, op: dist.AsyncOp) -> bool:
        """Whether enough of a collective is hidden between its start and its first use."""
        beside = self.begins[self.first_use(op)] - self.begins[self.starts[op]]
        return beside > MIN_HIDDEN * self.costs[op].seconds
