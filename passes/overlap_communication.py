"""overlap-communication: collectives are under way while devices calculate.

    %y = nn.matmul %a, %b
    %g1 = dist.all_reduce <sum> %g over <dp>
    %w1 = train.sgd %w, %g1, %lr
 -> %g1 = dist.all_reduce <sum> %g over <dp> async
    %y = nn.matmul %a, %b
    %g2 = dist.wait %g1
    %w1 = train.sgd %w, %g2, %lr

1. A buffer of several values (`fuse-communication` fills them) is cut, where no `fusion` index asks
   for it: in the order in which its values come to be, into as many as make the last arrive the
   soonest, each of which costs a latency and an op's overhead more.
2. What gives no more bytes than it takes (all-reduce, reduce-scatter, all-to-all) starts where its
   operands are there: memory is free the sooner.
3. What gives more (all-gather) starts as late as hides it behind the calculation before its first
   use, by the seconds of the mesh's cluster; where it has none, or no rates, of Gloo's.
4. Calculation keeps its order. A collective of which less than a twentieth would be hidden is not
   started; one that is `async` stays where it is.
5. No more memory is needed at once than before, or than the cluster says that a device has: what is
   under way when it would be more stays as it was.
6. By these seconds no function takes longer than before; one that gains nothing stays as it is.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeGuard

from xdsl.dialects.builtin import UnitAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.cost.functions import rated
from shardir.cost.memory import memory_of
from shardir.cost.schedule import ROUNDING, cuts, elapsed, level_of
from shardir.cost.seconds import OpCost, cost_of, joining, size_of, together
from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.rewriter import Rewriter, erase

WORTH = 0.05
"""The part of a collective's seconds that there must be to calculate beside it."""

ROUNDS = 20
"""How often less is tried, where memory is short, before nothing is started at all."""


@dataclass(frozen=True)
class OverlapCommunication(LocalPass):
    """Starts collectives early and waits for them where they are used."""

    name = "overlap-communication"

    def rewrite(self, f: Function) -> None:
        if f.mesh is not None:
            _overlap(f.op, rated(f.mesh))


def _overlap(f: FuncOp, mesh: Mesh) -> None:
    """The quickest of the function as it is, with collectives started, and with buffers cut too."""
    costs = [_cost(op, mesh) for op in f.body.block.ops if _calculates(op)]
    limit = max(memory_of(f, mesh).peak, mesh.cluster_or_default.memory or 0)
    given = f.body.clone()
    least, best = _elapsed(f.body.block, costs, mesh), f.body.detach_block(0)
    for cutting in (False, True):
        f.body.add_block(given.clone().detach_block(0))
        barred: set[int] = set()
        for _ in range(ROUNDS):
            more = _start(f, costs, mesh, limit, barred, cutting)
            if not more:
                break
            barred |= more
        seconds, made = _elapsed(f.body.block, costs, mesh), f.body.detach_block(0)
        if seconds < least * ROUNDING:
            least, best, made = seconds, made, best
        made.erase()
    f.body.add_block(best)


def _elapsed(block: Block, costs: list[OpCost], mesh: Mesh) -> float:
    """The seconds of the whole, by those of what calculates, in its order."""
    known = iter(costs)
    return elapsed((next(known) if _calculates(op) else _cost(op, mesh) for op in block.ops), mesh)


def _calculates(op: Operation) -> bool:
    return not isinstance(op, dist.CollectiveOp | dist.WaitOp)


def _start(
    f: FuncOp, costs: list[OpCost], mesh: Mesh, limit: int, barred: set[int], cutting: bool
) -> set[int]:
    """Starts all collectives but the barred ones, by their place among those that could be. Where
    that needs more memory than the limit, it is undone, and what is under way at the moment of most
    memory is to be barred too; or all, where that is nothing."""
    before, block = f.body.clone(), f.body.block
    origin = {op: i for i, op in enumerate(x for x in block.ops if _can_start(x, mesh))}
    clock = _ComputationClock(block, costs, mesh)
    for fused in [op for op, i in origin.items() if cutting and i not in barred]:
        for part in _cut(block, fused, clock):
            origin[part] = origin[fused]
    plan = _OverlapPlan(block, clock, {op for op, i in origin.items() if i not in barred})
    plan.move()
    plan.start()
    use = memory_of(f, mesh)
    if use.peak <= limit:
        return set()
    at = {op: i for i, op in enumerate(block.ops)}
    waits = [op for op in block.ops if isinstance(op, dist.WaitOp)]
    heavy = {
        origin[op.started] for op in waits
        if op.started in origin and at[op.started] <= at[use.op] <= at[op]
    }  # fmt: skip
    f.body.detach_block(0).erase()
    f.body.add_block(before.detach_block(0))
    return heavy or {*origin.values()} - barred


class _ComputationClock:
    """What the ops that do not communicate take, and when each op begins, if it waits for none."""

    def __init__(self, block: Block, costs: list[OpCost], mesh: Mesh):
        self.mesh = mesh
        ops = list(block.ops)
        known = zip((op for op in ops if _calculates(op)), costs, strict=True)
        self.seconds = {op: cost.seconds for op, cost in known}
        self.begins = self.read(ops)
        self.arrived: dict[Operation, float] = {}

    def read(self, ops: list[Operation]) -> dict[Operation, float]:
        spent = accumulate((self.seconds.get(op, 0.0) for op in ops), initial=0.0)
        return dict(zip(ops, spent, strict=False))

    def ready(self, v: SSAValue) -> float:
        """When a value is there."""
        op = v.owner
        if not isinstance(op, Operation):
            return 0.0
        if _can_start(op, self.mesh):
            if op not in self.arrived:
                there = max(map(self.ready, op.operands))
                self.arrived[op] = there + _cost(op, self.mesh).seconds
            return self.arrived[op]
        return self.begins[op] + self.seconds.get(op, 0.0)


def _cut(block: Block, op: dist.FusibleOp, clock: _ComputationClock) -> Iterator[dist.FusibleOp]:
    """Instead of one buffer several, for the values that are there by then; none where one is
    best."""
    if len(op.values) == 1 or op.fusion is not None or _grows(op):
        return
    form, each = min(together(op, clock.mesh), key=lambda way: way[0].latency + sum(way[1]))
    ready = [clock.ready(v) for v in op.values]
    order = sorted(range(len(ready)), key=ready.__getitem__)
    sending = [each[i] + joining(op.values[i], clock.mesh) for i in order]
    ends = cuts(sending, [ready[i] for i in order], form.latency, clock.mesh.cluster_or_default)
    if len(ends) == 1:
        return
    for start, end in pairwise([0, *ends]):
        outs = [op.outs[i] for i in order[start:end]]
        new = Rewriter().before(op).create(
            type(op), [op.values[i] for i in order[start:end]], [v.type for v in outs],
            op.properties, op.attributes, outs,
        )  # fmt: skip
        for old, out in zip(outs, new.outs, strict=True):
            old.replace_all_uses_with(out)
        yield new
    erase(op)


class _OverlapPlan:
    """Before which op of the others, by its index, each collective starts."""

    def __init__(self, block: Block, clock: _ComputationClock, free: set[dist.FusibleOp]):
        self.block, self.mesh = block, clock.mesh
        worth = _worth_moving(block, clock)
        self.costs = {op: cost for op, cost in worth.items() if op in free}
        self.staying = [op for op in block.ops if op not in self.costs]
        self.at = {op: i for i, op in enumerate(self.staying)}
        self.clock = list(clock.read(self.staying).values())
        self.latest: dict[Operation, int] = {}  # what needs the result, by way of others too
        for op in reversed(self.costs):
            users = _users(op)
            self.latest[op] = min(self.at[u] if u in self.at else self.latest[u] for u in users)
        self.starts: dict[Operation, int] = {}
        self.arrives: dict[Operation, int] = {}
        for op in self.costs:
            self._as_soon(op)
        later: dict[str, float] = {}
        for op in reversed(self.costs):
            if _grows(op):
                self._as_late(op, later)

    def _as_soon(self, op: dist.FusibleOp) -> None:
        """Where the operands are there; and where, at the latest, the result is."""
        ready = 0
        for v in op.values:
            if isinstance(v.owner, Operation):
                there = self.arrives.get(v.owner)
                ready = max(ready, self.at[v.owner] + 1 if there is None else there)
        done = bisect_left(self.clock, self.clock[ready] + self.costs[op].seconds, lo=ready)
        self.starts[op] = ready
        self.arrives[op] = min(done, self.latest[op])

    def _as_late(self, op: dist.FusibleOp, later: dict[str, float]) -> None:
        """Where the calculation up to the first use just hides it, and what follows it on the same
        links."""
        name, use, cost = level_of(self.mesh, op.axes.data), self._first_use(op), self.costs[op]
        begin = min(self.clock[use], later.get(name, self.clock[use])) - cost.seconds
        hidden = bisect_right(self.clock, begin, hi=use + 1) - 1
        slot = self.starts[op] = max(self.starts[op], hidden)
        later[name] = max(begin, self.clock[slot])

    def _first_use(self, op: Operation) -> int:
        return min(self.at[u] if u in self.at else self.starts[u] for u in _users(op))

    def move(self) -> None:
        for op in sorted(self.costs, key=self.starts.__getitem__):
            op.detach()
            self.block.insert_op_before(op, self.staying[self.starts[op]])

    def start(self) -> None:
        """Behind `move`: a `dist.wait` before the first use of what something hides."""
        for op, cost in self.costs.items():
            beside = self.clock[self._first_use(op)] - self.clock[self.starts[op]]
            if beside <= WORTH * cost.seconds:
                continue
            users = _users(op)
            user = next(x for x in _behind(op) if x in users)
            op.properties["started"] = UnitAttr()
            rewriter = Rewriter().before(user)
            rewriter.location = op.location
            types = [v.type for v in op.outs]
            wait = rewriter.create(dist.WaitOp, op.outs, types, names=op.outs)
            for v, out in zip(op.outs, wait.outs, strict=True):
                v.replace_uses_with_if(out, lambda use, wait=wait: use.operation is not wait)


def _worth_moving(block: Block, clock: _ComputationClock) -> dict[dist.FusibleOp, OpCost]:
    """The collectives between whose operands and users, behind and before other collectives, there
    is enough to calculate."""
    begins = clock.read(list(block.ops))
    candidates = [op for op in block.ops if _can_start(op, clock.mesh)]
    there: dict[Operation, float] = {}
    for op in candidates:
        owners = [v.owner for v in op.operands if isinstance(v.owner, Operation)]
        ends = (there.get(o, begins[o] + clock.seconds.get(o, 0.0)) for o in owners)
        there[op] = max(ends, default=0.0)
    wanted: dict[Operation, float] = {}
    for op in reversed(candidates):
        wanted[op] = min(wanted.get(u, begins[u]) for u in _users(op))
    costs = ((op, _cost(op, clock.mesh)) for op in candidates)
    return {op: c for op, c in costs if wanted[op] - there[op] > WORTH * c.seconds}


def _can_start(op: Operation, mesh: Mesh) -> TypeGuard[dist.FusibleOp]:
    return (
        isinstance(op, dist.FusibleOp)
        and not dist.is_started(op)
        and mesh.extent(op.axes.data) > 1
        and any(v.first_use is not None for v in op.results)
    )


def _behind(op: Operation) -> Iterator[Operation]:
    while (following := op.next_op) is not None:
        yield (op := following)


def _users(op: Operation) -> set[Operation]:
    return {u.operation for v in op.results for u in v.uses}


def _grows(op: dist.FusibleOp) -> bool:
    return sum(map(size_of, op.outs)) > sum(map(size_of, op.values))


def _cost(op: Operation, mesh: Mesh) -> OpCost:
    """What nobody knows the seconds of (a call, say) hides nothing."""
    try:
        cost = cost_of(op, mesh)
    except ShardirError:
        cost = None
    return cost or OpCost(op, 0, 0, 0.0)
