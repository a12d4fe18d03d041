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
   all-to-all), or a copy to the host, starts when its operands are available, which frees memory
   early.
3. One whose results are larger (all-gather), or a copy from the host, starts as late as the
   computation before its first use hides it, by the time model of the mesh's cluster. Without
   cluster or rates that is Gloo's.
4. Computation keeps its order. A collective of which less than MIN_HIDDEN would be hidden is
   not started; one that is `async` stays where it is.
5. Peak memory is at most the larger of the peak before and the memory of a device of the cluster,
   or the budget of `choose-recompute`.
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
from shardir.cost.collective_work import collective_work
from shardir.cost.memory import memory_at_ops
from shardir.cost.overlap import Costs, StartSchedule, Timeline, can_start, grows, users
from shardir.cost.schedule import cuts
from shardir.dialects import dist
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.marks import allowed_memory
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
    """A state of a block: its ops in order, each with its operands and whether it is started."""

    def __init__(self, block: Block):
        self.ops = {op: (tuple(op.operands), dist.is_started(op)) for op in block.ops}

    def restore(self, block: Block) -> None:
        """Return the block to this state; ops that are not in it lose their operands. Of its own
        ops only collectives move."""
        for op in list(block.ops):
            if op not in self.ops:
                op.detach()
                op.operands = ()
            elif isinstance(op, dist.AsyncOp):
                op.detach()
        next_op = block.first_op
        for op, (operands, started) in self.ops.items():
            if op is next_op:
                next_op = op.next_op
            elif next_op is None:
                block.add_op(op)
            else:
                block.insert_op_before(op, next_op)
            if tuple(op.operands) != operands:
                op.operands = operands
            if started:
                op.properties["started"] = UnitAttr()
            elif dist.is_started(op):
                del op.properties["started"]


@dataclass
class Attempt:
    """A block with started collectives: its time, its arrangement, the number of each collective
    (`_start`), and whether buckets were cut."""

    seconds: float
    arrangement: Arrangement
    numbers: Mapping[Operation, int]
    cutting: bool = False

    def gains_over(self, other: "Attempt") -> bool:
        return self.seconds < other.seconds * IMPROVEMENT


class Body:
    """The body of a function, which is in one of several arrangements; `given` has no new start."""

    def __init__(self, f: FuncOp, mesh: Mesh):
        self.f, self.mesh, self.block = f, mesh, f.body.block
        self.costs, self._now = Costs(self.block, mesh), Arrangement(self.block)
        self.given = Attempt(self.costs.of_block(self.block), self._now, {})

    def be(self, attempt: Attempt) -> None:
        """Return the block to the arrangement of an attempt."""
        if attempt.arrangement is not self._now:
            self._now = attempt.arrangement
            self._now.restore(self.block)

    def attempt(self, excluded: set[int], *, cutting: bool) -> Attempt:
        """Start the collectives that are not excluded."""
        self.be(self.given)
        numbers = _start(self.block, self.costs, excluded, cutting)
        self._now = Arrangement(self.block)
        return Attempt(self.costs.of_block(self.block), self._now, numbers, cutting)

    def memory(self, attempt: Attempt) -> dict[Operation, int]:
        """Return the bytes that are live at each op."""
        self.be(attempt)
        return memory_at_ops(self.f, self.mesh)


def _overlap(f: FuncOp, mesh: Mesh) -> None:
    """Keep the fastest of the body as it is, with started collectives, and with cut buckets too."""
    body = Body(f, mesh)
    cuttings = (False, True) if _is_cut(body.block, body.costs) else (False,)
    attempts = [body.attempt(set(), cutting=cutting) for cutting in cuttings]
    kept = body.given
    if any(attempt.gains_over(kept) for attempt in attempts):
        peak = max(body.memory(kept).values())
        limit = max(peak, allowed_memory(f, mesh))
        for attempt in sorted(attempts, key=lambda a: a.seconds):
            within = _within(limit, body, attempt) if attempt.gains_over(kept) else None
            if within is not None and within.gains_over(kept):
                kept = within
    body.be(kept)


def _within(limit: int, body: Body, attempt: Attempt) -> Attempt | None:
    """Return an attempt within memory; None if MAX_ATTEMPTS are beyond it.

    The collectives that are in flight where one needs more memory than the limit are excluded from
    the next.
    """
    excluded = set[int]()
    for _ in range(MAX_ATTEMPTS):
        needed = body.memory(attempt)
        over = [op for op, bytes in needed.items() if bytes > limit]
        if not over:
            return attempt
        over.sort(key=needed.__getitem__, reverse=True)
        excluded |= _to_exclude(body.block, over, attempt.numbers)
        attempt = body.attempt(excluded, cutting=attempt.cutting)
    return None


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


def _parts(op: dist.AsyncOp, timeline: Timeline) -> list[list[int]]:
    """Return the numbers of the values of each part into which a bucket is cut; one part is the
    bucket as it is."""
    order = [*range(len(op.values))]
    has_index = isinstance(op, dist.FusibleOp) and op.fusion is not None
    if len(order) == 1 or has_index or grows(op):
        return [order]
    values = collective_work(op, timeline.mesh).together
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


def _cut(op: dist.AsyncOp, timeline: Timeline) -> Iterator[dist.AsyncOp]:
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


def _wait(op: dist.AsyncOp, user: Operation) -> None:
    """Start a collective where it is, and wait for it before the first use of a result."""
    op.properties["started"] = UnitAttr()
    rewriter = Rewriter().before(user)
    rewriter.location = op.location
    wait = rewriter.create(dist.WaitOp, op.outs, [v.type for v in op.outs], names=op.outs)
    for v, out in zip(op.outs, wait.outs, strict=True):
        v.replace_uses_with_if(out, lambda use: use.operation is not wait)
