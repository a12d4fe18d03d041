"""overlap-communication: collectives are in flight while devices compute.

    %y = nn.matmul %a, %b
    %g1 = dist.all_reduce <sum> %g over <dp>
    %w1 = train.sgd %w, %g1, %lr
 -> %g1 = dist.all_reduce <sum> %g over <dp> async
    %y = nn.matmul %a, %b
    %g2 = dist.wait %g1
    %w1 = train.sgd %w, %g2, %lr

1. A bucket (of `fuse-communication`) without a `fusion` index is cut, in the order in which its
   values become available, so that its last part ends first. Each part costs a latency and an op's
   overhead.
2. A collective whose results are no larger than its operands (all-reduce, reduce-scatter,
   all-to-all) starts when its operands are available, which frees memory early.
3. One whose results are larger (all-gather) starts as late as the computation before its first use
   hides it, by the time model of the mesh's cluster. Without cluster or rates that is Gloo's.
4. Computation keeps its order. A collective of which less than MIN_HIDDEN would be hidden is
   not started; one that is `async` stays where it is.
5. Peak memory is at most the larger of the peak before and the memory of a device of the cluster.
   Collectives that are in flight at a peak above that are not started.
6. The estimated time does not increase; a function that gains nothing stays as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from xdsl.dialects.builtin import UnitAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, Region

from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.mesh import Mesh
from shardir.cost.memory import memory_of
from shardir.cost.overlap import (
    StartSchedule,
    Timeline,
    block_seconds,
    can_start,
    computes,
    cost_or_zero,
    grows,
    users,
)
from shardir.cost.schedule import cuts
from shardir.cost.seconds import OpCost, steps_of, together
from shardir.dialects import dist
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.rewriter import Rewriter, erase

MAX_ATTEMPTS = 20
"""The maximum number of attempts to start fewer collectives; after that none is started."""


@dataclass(frozen=True)
class OverlapCommunication(LocalPass):
    """Starts collectives early, and waits for them before their first use."""

    name = "overlap-communication"

    def rewrite(self, f: Function) -> None:
        if f.mesh is not None:
            _overlap(f.op, f.mesh)


def _overlap(f: FuncOp, mesh: Mesh) -> None:
    """Keep the fastest of the body as it is, with started collectives, and with cut buckets too."""
    computation = [cost_or_zero(op, mesh) for op in f.body.block.ops if computes(op)]
    limit = max(memory_of(f, mesh).peak, mesh.cluster_or_default.memory or 0)
    given = f.body.clone()
    fastest, best = block_seconds(f.body.block, computation, mesh), f.body.detach_block(0)
    for cutting in (False, True):
        _start_within(limit, f, given, computation, mesh, cutting)
        seconds, made = block_seconds(f.body.block, computation, mesh), f.body.detach_block(0)
        if seconds < fastest * IMPROVEMENT:
            fastest, best, made = seconds, made, best
        made.erase()
    f.body.add_block(best)


def _start_within(
    limit: int, f: FuncOp, given: Region, computation: list[OpCost], mesh: Mesh, cutting: bool
) -> None:
    """Give the function, which has no body, the given one, with collectives started within memory.

    As long as that needs more memory than the limit, those that are in flight at the peak are
    excluded; all, if none is.
    """
    excluded: set[int] = set()
    for _ in range(MAX_ATTEMPTS):
        f.body.add_block(given.clone().detach_block(0))
        numbers = _start(f.body.block, computation, mesh, excluded, cutting)
        use = memory_of(f, mesh)
        if use.peak <= limit:
            return
        at_peak = {numbers[op] for op in _in_flight(f.body.block, use.op) if op in numbers}
        excluded |= at_peak or {*numbers.values()}
        f.body.detach_block(0).erase()
    f.body.add_block(given.clone().detach_block(0))


def _start(
    block: Block, computation: list[OpCost], mesh: Mesh, excluded: set[int], cutting: bool
) -> dict[Operation, int]:
    """Start the collectives that are not excluded, and return the number of each.

    A collective is numbered in the order of the block; the parts of a bucket have its number.
    """
    candidates = [op for op in block.ops if can_start(op, mesh)]
    numbers: dict[Operation, int] = {op: i for i, op in enumerate(candidates)}
    timeline = Timeline(block, computation, mesh)
    for bucket in [op for op in candidates if cutting and numbers[op] not in excluded]:
        for part in _cut(bucket, timeline):
            numbers[part] = numbers[bucket]
    chosen = {op for op, i in numbers.items() if i not in excluded}
    schedule = StartSchedule(block, timeline, chosen)
    for op in schedule.in_order():
        Rewriter().before(schedule.others[schedule.starts[op]]).move(op)
    for op in schedule.costs:
        if schedule.hides(op):
            _wait(op)
    return numbers


def _in_flight(block: Block, during: Operation) -> Iterator[Operation]:
    """Yield the collectives that are in flight during an op."""
    at = {op: i for i, op in enumerate(block.ops)}
    for op in block.ops:
        if isinstance(op, dist.WaitOp) and at[op.started] <= at[during] <= at[op]:
            yield op.started


def _cut(op: dist.FusibleOp, timeline: Timeline) -> Iterator[dist.FusibleOp]:
    """Yield the parts by which a bucket is replaced; none if it stays as it is."""
    if len(op.values) == 1 or op.fusion is not None or grows(op):
        return
    values = together(steps_of(op, timeline.mesh), timeline.mesh)
    form, each = values.fastest
    available = [timeline.available(v) for v in op.values]
    order = sorted(range(len(available)), key=available.__getitem__)
    sending = [each[i] + values.packing[i] for i in order]
    cluster = timeline.mesh.cluster_or_default
    ends = cuts(sending, [available[i] for i in order], form.latency, cluster)
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


def _wait(op: dist.FusibleOp) -> None:
    """Start a collective where it is, and wait for it before the first use of a result."""
    following, user = users(op), op.next_op
    while user is not None and user not in following:
        user = user.next_op
    assert user is not None, "only a collective whose result is used is started"
    op.properties["started"] = UnitAttr()
    rewriter = Rewriter().before(user)
    rewriter.location = op.location
    wait = rewriter.create(dist.WaitOp, op.outs, [v.type for v in op.outs], names=op.outs)
    for v, out in zip(op.outs, wait.outs, strict=True):
        v.replace_uses_with_if(out, lambda use: use.operation is not wait)
