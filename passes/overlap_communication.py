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
   Collectives that are in flight where more is needed are not started.
6. The estimated time does not increase; a function that gains nothing stays as it is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from xdsl.dialects.builtin import UnitAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation

from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.mesh import Mesh
from shardir.cost.memory import memory_at_ops
from shardir.cost.overlap import Costs, StartSchedule, Timeline, can_start, grows, users
from shardir.cost.schedule import cuts
from shardir.cost.seconds import steps_of, together
from shardir.dialects import dist
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.rewriter import Rewriter

MAX_ATTEMPTS = 20
"""The maximum number of attempts to start fewer collectives; after that none is started."""


@dataclass(frozen=True)
class OverlapCommunication(LocalPass):
    """Starts collectives early, and waits for them before their first use."""

    name = "overlap-communication"

    def rewrite(self, f: Function) -> None:
        if f.mesh is not None:
            _overlap(f.op, f.mesh)


class Arrangement:
    """A state of a block: its ops in order, the operands of each, and whether it is started."""

    def __init__(self, block: Block):
        self.ops = [(op, tuple(op.operands), dist.is_started(op)) for op in block.ops]

    def restore(self, block: Block) -> None:
        """Return the block to this state; ops that are not in it lose their operands."""
        kept = {op for op, _, _ in self.ops}
        for op in block.ops:
            op.detach()
            if op not in kept:
                op.operands = ()
        for op, operands, started in self.ops:
            if tuple(op.operands) != operands:
                op.operands = operands
            if started:
                op.properties["started"] = UnitAttr()
            elif dist.is_started(op):
                del op.properties["started"]
            block.add_op(op)


def _overlap(f: FuncOp, mesh: Mesh) -> None:
    """Keep the fastest of the body as it is, with started collectives, and with cut buckets too."""
    block = f.body.block
    costs = Costs(block, mesh)
    limit = max(*memory_at_ops(f, mesh).values(), mesh.cluster_or_default.memory or 0)
    given = kept = Arrangement(block)
    fastest = costs.of_block(block)
    for cutting in (False, True):
        if cutting and not _is_cut(block, costs):
            break
        _start_within(limit, f, costs, given, cutting)
        seconds = costs.of_block(block)
        if seconds < fastest * IMPROVEMENT:
            fastest, kept = seconds, Arrangement(block)
        given.restore(block)
    kept.restore(block)


def _start_within(limit: int, f: FuncOp, costs: Costs, given: Arrangement, cutting: bool) -> None:
    """Start collectives within memory.

    As long as that needs more memory than the limit, collectives that are in flight where it does
    are excluded, and the block is what was given before.
    """
    excluded = set[int]()
    for _ in range(MAX_ATTEMPTS):
        numbers = _start(f.body.block, costs, excluded, cutting)
        needed = memory_at_ops(f, costs.mesh)
        over = [op for op, bytes in needed.items() if bytes > limit]
        if not over:
            return
        over.sort(key=needed.__getitem__, reverse=True)
        excluded |= _to_exclude(f.body.block, over, numbers)
        given.restore(f.body.block)


def _start(block: Block, costs: Costs, excluded: set[int], cutting: bool) -> dict[Operation, int]:
    """Start the collectives that are not excluded, and return the number of each.

    A collective is numbered in the order of the block; the parts of a bucket have its number.
    """
    candidates = [op for op in block.ops if can_start(op, costs.mesh)]
    numbers: dict[Operation, int] = {op: i for i, op in enumerate(candidates)}
    timeline = Timeline(block, costs)
    for bucket in [op for op in candidates if cutting and numbers[op] not in excluded]:
        for part in _cut(bucket, timeline):
            numbers[part] = numbers[bucket]
    chosen = {op for op, i in numbers.items() if i not in excluded}
    schedule = StartSchedule(block, timeline, chosen)
    for op in schedule.in_order():
        Rewriter().before(schedule.others[schedule.starts[op]]).move(op)
    at = {op: i for i, op in enumerate(block.ops)}
    for op in schedule.costs:
        if schedule.hides(op):
            _wait(op, min(users(op, schedule.loops), key=at.__getitem__))
    return numbers


def _to_exclude(
    block: Block, over: Sequence[Operation], numbers: Mapping[Operation, int]
) -> set[int]:
    """Return the numbers of the collectives in flight at each of the ops `over` at which none of
    those before is, so that the number of attempts does not depend on that of layers; all, if none
    is in flight at one of them."""
    in_flight: dict[Operation, set[int]] = {op: set() for op in over}
    now, found = Counter[int](), set[int]()  # a bucket may have several parts in flight
    for op in block.ops:
        if op in numbers and dist.is_started(op):
            now[numbers[op]] += 1
        if op in in_flight:
            in_flight[op] = {*now}
        if isinstance(op, dist.WaitOp) and op.started in numbers:
            number = numbers[op.started]
            now[number] -= 1
            if not now[number]:
                del now[number]
    for each in in_flight.values():
        if not each:
            return {*numbers.values()}
        if found.isdisjoint(each):
            found |= each
    return found


def _parts(op: dist.FusibleOp, timeline: Timeline) -> list[list[int]]:
    """Return the numbers of the values of each part into which a bucket is cut; one part is the
    bucket as it is."""
    order = [*range(len(op.values))]
    if len(order) == 1 or op.fusion is not None or grows(op):
        return [order]
    values = together(steps_of(op, timeline.mesh), timeline.mesh)
    form, each = values.fastest
    available = [timeline.available(v) for v in op.values]
    order.sort(key=available.__getitem__)
    runs = timeline.loops.runs(op)
    sending = [runs * (each[i] + values.packing[i]) for i in order]
    cluster = timeline.mesh.cluster_or_default
    ends = cuts(sending, [available[i] for i in order], runs * form.latency, cluster)
    return [order[start:end] for start, end in pairwise([0, *ends])]


def _is_cut(block: Block, costs: Costs) -> bool:
    """Whether a bucket of the block is cut."""
    timeline = Timeline(block, costs)
    return any(len(_parts(op, timeline)) > 1 for op in block.ops if can_start(op, costs.mesh))


def _cut(op: dist.FusibleOp, timeline: Timeline) -> Iterator[dist.FusibleOp]:
    """Yield the parts by which a bucket is replaced; none if it stays as it is."""
    parts = _parts(op, timeline)
    if len(parts) == 1:
        return
    for part in parts:
        outs = [op.outs[i] for i in part]
        new = Rewriter().before(op).create(
            type(op), [op.values[i] for i in part], [v.type for v in outs],
            op.properties, op.attributes, outs,
        )  # fmt: skip
        for old, out in zip(outs, new.outs, strict=True):
            old.replace_all_uses_with(out)
        yield new
    op.detach()  # not erased: it returns if the bucket is not cut after all
    op.operands = ()


def _wait(op: dist.FusibleOp, user: Operation) -> None:
    """Start a collective where it is, and wait for it before the first use of a result."""
    op.properties["started"] = UnitAttr()
    rewriter = Rewriter().before(user)
    rewriter.location = op.location
    wait = rewriter.create(dist.WaitOp, op.outs, [v.type for v in op.outs], names=op.outs)
    for v, out in zip(op.outs, wait.outs, strict=True):
        v.replace_uses_with_if(out, lambda use: use.operation is not wait)
