"""plan-memory: run ops that free memory earlier, and give storages offsets in one block.

    %b = nn.matmul %x, %w        %b = nn.matmul %x, %w {offsets = array<i64: 0>}
    %a = nn.relu %x         ->   %c = nn.reduce <sum> %b dims <0> {offsets = array<i64: 4096>}
    %c = nn.reduce <sum> %b ...  %a = nn.relu %x {offsets = array<i64: 0>}

1. Neither peak memory nor the estimated seconds increase.
2. Collectives, waits, sends and receives, marks and loops stay where they are, and no op moves past
   them. So all ranks run equal collectives in one order, with as much computation beside each as
   before.
3. The ops around the peak are rescheduled, greedily by the bytes freed, until the peak decreases no
   further.
4. Storages that the function makes have offsets, arguments have none; `shardir/cost/memory_plan.py`
   has the attributes. The report of `--cost` has the bytes of the block, and the lower bound on
   them: the maximum of the bytes live at one op.
5. A second run changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.storages import reads
from shardir.cost.memory import LiveStorages
from shardir.cost.memory_plan import plan_offsets
from shardir.dialects.dist.base import HandsOn
from shardir.dialects.nn.base import TensorOp
from shardir.rewriting.bases import Function, LocalPass


@dataclass(frozen=True)
class PlanMemory(LocalPass):
    """Orders ops for a lower peak of memory, and gives storages offsets in one block."""

    name = "plan-memory"

    def rewrite(self, f: Function) -> None:
        if f.mesh is not None:
            lower_peak(f.op, f.mesh)
            plan_offsets(f.op, f.mesh)


def lower_peak(f: FuncOp, mesh: Mesh) -> None:
    """Reschedule the ops around the peak while that decreases it."""
    live = LiveStorages(f, mesh)
    while live.ops:
        peak = max(live.needed)
        around = _movable_around(live.ops[live.needed.index(peak)])
        order = _freeing_first(around, live)
        if order == around:
            return
        _arrange(f.body.block, around, order)
        after = LiveStorages(f, mesh)
        if max(after.needed) >= peak:
            _arrange(f.body.block, order, around)
            return
        live = after


def _is_movable(op: Operation | None) -> bool:
    """Whether an op only computes values of its operands."""
    return isinstance(op, TensorOp) and not isinstance(op, HandsOn)


def _movable_around(op: Operation) -> list[Operation]:
    """Return the consecutive movable ops around an op; if the op itself is not movable, the movable
    ops right before it."""
    movable = list[Operation]()
    before = op.prev_op
    while before is not None and _is_movable(before):
        movable.append(before)
        before = before.prev_op
    movable.reverse()
    after: Operation | None = op
    while after is not None and _is_movable(after):
        movable.append(after)
        after = after.next_op
    return movable


def _freeing_first(ops: Sequence[Operation], live: LiveStorages) -> list[Operation]:
    """Return the ops in a topological order: of the ready ops, the one with the smallest growth
    (bytes allocated minus bytes freed) is next; ties go to the present order."""
    number = {op: i for i, op in enumerate(ops)}
    makers = [[v.owner for v in op.operands if isinstance(v.owner, Operation)] for op in ops]
    waiting = [{maker for maker in owners if maker in number} for owners in makers]
    users: dict[Operation, list[int]] = {op: [] for op in ops}
    for i, owners in enumerate(waiting):
        for maker in owners:
            users[maker].append(i)
    roots = [{live.root(v) for v in reads(op)} for op in ops]
    readers: dict[SSAValue, set[int]] = {}
    for i, read in enumerate(roots):
        for v in read:
            readers.setdefault(v, set()).add(i)
    last = max((live.at[op] for op in ops if op in live.at), default=-1)
    dies = {v for v in readers if v in live.spans and live.spans[v].end <= last}

    def growth(i: int) -> int:
        allocated = sum(live.sizes.get(v, 0) for v in ops[i].results)
        return allocated - sum(live.sizes[v] for v in roots[i] & dies if len(readers[v]) == 1)

    ready = [(growth(i), i) for i in range(len(ops)) if not waiting[i]]
    heapify(ready)
    order, scheduled = list[Operation](), set[int]()
    while ready:
        _, i = heappop(ready)
        if i in scheduled:
            continue
        scheduled.add(i)
        order.append(ops[i])
        for v in roots[i]:
            readers[v].discard(i)
            if len(readers[v]) == 1:  # the last one now frees it
                (other,) = readers[v]
                if not waiting[other]:
                    heappush(ready, (growth(other), other))
        for user in users[ops[i]]:
            waiting[user].discard(ops[i])
            if not waiting[user]:
                heappush(ready, (growth(user), user))
    return order


def _arrange(block: Block, present: Sequence[Operation], order: Sequence[Operation]) -> None:
    """Put adjacent ops into another order."""
    after = present[-1].next_op
    assert after is not None
    for op in order:
        op.detach()
        block.insert_op_before(op, after)
