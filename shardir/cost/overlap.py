"""Where collectives start and end, so that computation hides them.

Times are of a timeline in which computation keeps its order and waits for no collective. A
collective can start once its operands are available, and must end before the first op that needs a
result.
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
"""The part of a collective's time that computation must hide for the collective to be started.
Bounds what starts are worth: a smaller part is within the error of the time model, about 4%."""


@cache
def computes(kind: type[Operation]) -> bool:
    """Whether ops of a kind are computation."""
    return not issubclass(kind, (dist.CollectiveOp, dist.WaitOp))


class Costs(dict[Operation, OpCost]):
    """The cost of each op of a block, in all its runs, computed at the first access. An op without
    a cost, such as a call, counts as 0 seconds and hides nothing."""

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
        """Return the makespan of some ops of the block, in their order."""
        return seconds_in_order(map(self.__getitem__, ops), self.mesh)


def can_start(op: Operation, mesh: Mesh) -> TypeGuard[dist.AsyncOp]:
    """Whether an op is a blocking collective or copy that moves data and whose result is used."""
    return (
        isinstance(op, dist.AsyncOp)
        and not dist.is_started(op)
        and op.moves(mesh)
        and any(v.first_use is not None for v in op.results)
    )


def startable_ops(ops: Iterable[Operation], mesh: Mesh) -> list[dist.AsyncOp]:
    """Return the ops that can start (`can_start`), in order."""
    return [op for op in of_kind(ops, dist.AsyncOp) if can_start(op, mesh)]


def grows(op: dist.AsyncOp) -> bool:
    """Whether results take more device memory than operands, as in an all-gather or a copy from the
    host."""
    return sum(map(_on_device, op.outs)) > sum(map(_on_device, op.values))


def frees(op: dist.AsyncOp) -> bool:
    """Whether an op is a copy to the host, after which the operands may be freed on the device."""
    return isinstance(op, dist.CopyOp) and not grows(op)


def _on_device(v: SSAValue) -> int:
    """Return the bytes of a value in device memory."""
    layout = dist.layout_of(v)
    return 0 if layout is not None and layout.host else size_of(v)


def users(op: Operation, loops: Loops) -> set[Operation]:
    """Return the ops before which a result of an op is needed: each user, or the begin of its loop
    if the op is not in that loop."""
    return {loops.needed_at(use.operation, op) for v in op.results for use in v.uses}


class Timeline:
    """The begin of each op of a block, and when each value is available, in seconds, if computation
    waits for no collective."""

    def __init__(self, ops: Sequence[Operation], costs: Costs):
        self.mesh, self.costs = costs.mesh, costs
        self.loops = costs.loops
        self.seconds = {op: costs[op].seconds for op in ops if computes(type(op))}
        self.begins = self.begins_of(ops)
        self._arrivals: dict[Operation, float] = {}

    def begins_of(self, ops: Sequence[Operation]) -> dict[Operation, float]:
        """Return the begin of each op, if the ops run in this order."""
        spent = accumulate(map(self.seconds.get, ops, repeat(0.0)), initial=0.0)
        return dict(zip(ops, spent, strict=False))

    def available(self, v: SSAValue) -> float:
        """Return when a value is available, if collectives start as soon as they can."""
        op = v.owner
        if not isinstance(op, Operation):
            return 0.0
        if can_start(op, self.mesh):
            if op not in self._arrivals:
                begin = max(map(self.available, op.operands))
                self._arrivals[op] = begin + self.costs[op].seconds
            return self._arrivals[op]
        last = available_after(op)
        return self.begins[last] + self.seconds.get(last, 0.0)


def hideable_collectives(
    ops: Sequence[Operation], candidates: Sequence[dist.AsyncOp], timeline: Timeline
) -> dict[dist.AsyncOp, OpCost]:
    """Return the collectives that computation can hide well enough (MIN_HIDDEN), with their costs.

    A collective may move between the operands and the users of its chain of collectives.

    Args:
        candidates: `startable_ops` of the block.
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
    """Where collectives of a block start and end.

    A position is an index into `others`, the ops that are not started: a collective starts before
    the op at its start, and has ended before the op at its end.
    """

    def __init__(
        self, ops: Sequence[Operation], timeline: Timeline, costs: dict[dist.AsyncOp, OpCost]
    ):
        """`costs`: the collectives to start, a choice of `hideable_collectives`."""
        self.mesh, self.loops, self.costs = timeline.mesh, timeline.loops, costs
        self.others = [op for op in ops if op not in self.costs]
        self.at = {op: i for i, op in enumerate(self.others)}
        self.begins = list(timeline.begins_of(self.others).values())
        self.latest: dict[Operation, int] = {}
        """The position of the first use of the result, through chains of collectives too."""
        for op in reversed(self.costs):
            self.latest[op] = min(
                self.at[u] if u in self.at else self.latest[u] for u in users(op, self.loops)
            )
        self.starts: dict[Operation, int] = {}
        self.ends: dict[Operation, int] = {}
        self._free = 0.0
        """When the last copy to the host so far ends, in seconds."""
        for op in self.costs:
            self._start_early(op)
        free: dict[str, float] = {}
        for op in reversed(self.costs):
            if grows(op):
                self._start_late(op, free)

    def _start_early(self, op: dist.AsyncOp) -> None:
        """Start an op as soon as its operands are available."""
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
        """Start an op as late as the computation before its first use hides it.

        Args:
            free: by level, when the next collective needs its links, in seconds.
        """
        name, use, cost = level_of(self.mesh, op.axes.data), self.first_use(op), self.costs[op]
        begin = min(self.begins[use], free.get(name, self.begins[use])) - cost.seconds
        hidden = bisect_right(self.begins, begin, hi=use + 1) - 1
        start = self.starts[op] = self._in_loop(op, max(self.starts[op], hidden))
        free[name] = max(begin, self.begins[start])

    def _in_loop(self, op: Operation, start: int) -> int:
        """Return the first position from `start` on that is in the op's loop, or outside of loops
        if the op is in none."""
        own, loop = self.loops.around(op), self.loops.around(self.others[start])
        if own is loop:
            return start
        if own is not None:
            return self.at[own] + 1
        assert loop is not None
        return self.at[self.loops.ends[loop]] + 1

    def freed(self, op: dist.AsyncOp) -> Operation | None:
        """Return the op before which a copy to the host has ended, so that its operand can be
        freed; None for another op, and if that op is in another loop."""
        if not frees(op):
            return None
        end = self.others[min(self.ends[op], len(self.others) - 1)]
        return end if self.loops.around(end) is self.loops.around(op) else None

    def first_use(self, op: Operation) -> int:
        """Return the position of the first op that uses a result."""
        return min(self.at[u] if u in self.at else self.starts[u] for u in users(op, self.loops))

    def in_order(self) -> list[dist.AsyncOp]:
        """Return the collectives in the order of their starts."""
        return sorted(self.costs, key=self.starts.__getitem__)

    def hides(self, op: dist.AsyncOp) -> bool:
        """Whether enough of a collective is hidden between its start and its first use
        (MIN_HIDDEN)."""
        beside = self.begins[self.first_use(op)] - self.begins[self.starts[op]]
        return beside > MIN_HIDDEN * self.costs[op].seconds
