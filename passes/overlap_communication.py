"""overlap-communication: collectives are in flight while devices compute.

    %y = nn.matmul %a, %b
    %g1 = dist.all_reduce <sum> %g over <dp>
    %w1 = train.sgd %w, %g1, %lr
 -> %g1 = dist.all_reduce <sum> %g over <dp> async
    %y = nn.matmul %a, %b
    %g2 = dist.wait %g1
    %w1 = train.sgd %w, %g2, %lr

1. A bucket (of `fuse-communication`) without a `fusion` index is cut, in the order in which its
   values become available, so that the last part ends earlier than the whole bucket would. Each
   part costs a latency and an op's overhead.
2. A collective whose results are no larger than its operands (all-reduce, reduce-scatter,
   all-to-all), or a copy to the host, starts when its operands are available, which frees memory
   early. The wait of a copy stands where the copy has ended, which frees its operand; the wait of a
   collective stands before the first use of its results.
3. A collective with larger results (all-gather), or a copy from the host, starts as late as the
   computation before its first use still hides it, by the time model of the mesh's cluster (without
   cluster or rates: Gloo's).
4. Computation keeps its order. A collective is not started if less than MIN_HIDDEN of its time
   would be hidden; an `async` one stays where it is.
5. Peak memory is at most the larger of the peak before and the memory of a device of the cluster,
   or the budget of `choose-recompute`. Collectives in flight at an op that exceeds it are not
   started.
6. The estimated time does not increase; a function that gains nothing does not change.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.mesh import Mesh
from shardir.analysis.storages import live_ops
from shardir.cost.collective_work import collective_work
from shardir.cost.moved_memory import MovedMemory
from shardir.cost.overlap import (
    Costs,
    StartSchedule,
    Timeline,
    grows,
    hideable_collectives,
    startable_ops,
    users,
)
from shardir.cost.schedule import cut_points
from shardir.dialects import dist
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn import UNIT
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.marks import allowed_memory
from shardir.rewriting.rewriter import Rewriter, erase

MAX_ATTEMPTS = 20
"""Bounds the attempts to start fewer collectives; after the last one none is started. Each excludes
the collectives at all ops beyond the limit, so a few attempts suffice; see `_to_exclude`."""


@dataclass(frozen=True)
class OverlapCommunication(LocalPass):
    """Starts collectives early, and waits for them before their first use."""

    name = "overlap-communication"

    def rewrite(self, f: Function) -> None:
        if f.mesh is not None:
            _overlap(f.op, f.ops, f.mesh)


@dataclass
class Attempt:
    """A block with started collectives.

    Attributes:
        seconds: estimated time of the block.
        excluded: numbers of the collectives that are not started.
        numbers: number of each op that may start (`Body._start`).
        cutting: whether buckets are cut.
    """

    seconds: float
    excluded: frozenset[int] = frozenset()
    numbers: Mapping[Operation, int] = field(default_factory=dict)
    cutting: bool = False

    def gains_over(self, other: "Attempt") -> bool:
        return self.seconds < other.seconds * IMPROVEMENT


class BlockChanges:
    """The changes of a block by one attempt, undone together. Operands are restored all at once,
    since a return has many."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._operands: dict[Operation, tuple[SSAValue, ...]] = {}

    def move(self, op: Operation, to: Operation) -> None:
        """Move an op before another op."""
        self.leave(op)
        Rewriter().before(to).insert(op)

    def leave(self, op: Operation) -> None:
        """Take an op out of the block."""
        block, following = op.parent, op.next_op
        assert block is not None

        def put_back() -> None:
            if op.parent is not None:
                op.detach()
            if following is None:
                block.add_op(op)
            else:
                block.insert_op_before(op, following)

        self._steps.append(put_back)
        op.detach()

    def start(self, op: dist.AsyncOp) -> None:
        op.properties["started"] = UNIT
        self._steps.append(lambda: op.properties.pop("started"))

    def use(self, new: Operation, values: Sequence[SSAValue]) -> None:
        """Let all ops except `new` use the results of `new` in place of values."""
        self._steps.append(lambda: erase(new))
        for v, out in zip(values, new.results, strict=True):
            for use in v.uses:
                self.keep_operands(use.operation)
            v.replace_uses_with_if(out, lambda use: use.operation is not new)

    def keep_operands(self, op: Operation) -> None:
        """Record the operands of an op before they change."""
        self._operands.setdefault(op, tuple(op.operands))

    def take_back(self) -> None:
        for op, operands in reversed(self._operands.items()):  # uses in their order before
            op.operands = operands
        for undo in reversed(self._steps):
            undo()


class Body:
    """The body of a function, on which attempts are made one at a time; `given` is the attempt that
    starts no collective.

    Data that attempts share is computed once. `limit` is the number of bytes that an attempt may
    need: the allowed memory, if known, raised to the peak of `given` when an op needs more.
    """

    def __init__(
        self,
        f: FuncOp,
        ops: Sequence[Operation],
        candidates: Sequence[dist.AsyncOp],
        mesh: Mesh,
    ):
        """`candidates`: the ops that can start."""
        self.f, self.mesh, self.block = f, mesh, f.body.block
        self.candidates = candidates
        self.ops = self._given = ops
        """The present ops, in order; and the ops before all attempts."""
        self._dead = {*ops}.difference(live_ops(ops))
        """Ops whose results have no use; attempts do not change them."""
        self._changes = BlockChanges()
        self.costs = Costs(self.ops, mesh)
        self.timeline = Timeline(self.ops, self.costs)
        self._hideable = hideable_collectives(self.ops, candidates, self.timeline)
        self.given = self._now = Attempt(self.costs.of_ops(self.ops))
        self.limit, self._is_final = allowed_memory(f, mesh), False
        if not self.limit:
            self._raise_limit()

    def is_cut(self) -> bool:
        """Whether a bucket is cut."""
        return any(len(_parts(op, self.timeline)) > 1 for op in self.candidates)

    def switch_to(self, attempt: Attempt) -> None:
        """Bring the block to the state of an attempt."""
        if attempt is self._now:
            return
        self._take_back()
        if attempt is not self.given:
            attempt.numbers = self._start(attempt.excluded, attempt.cutting)
        self._now = attempt

    def attempt(self, excluded: frozenset[int], *, cutting: bool) -> Attempt:
        """Start the collectives that are not excluded."""
        self._take_back()
        numbers = self._start(excluded, cutting)
        self._now = Attempt(self.costs.of_ops(self.ops), excluded, numbers, cutting)
        return self._now

    def exceeding_ops(self, attempt: Attempt) -> list[Operation]:
        """Return the ops that need more than the limit, by decreasing need."""
        memory = self._memory
        self.switch_to(attempt)
        bytes_at = memory.at_ops(self._live())
        exceeding = [op for op, bytes in bytes_at.items() if bytes > self.limit]
        if exceeding and not self._is_final:
            self._raise_limit()
            return self.exceeding_ops(attempt)
        return sorted(exceeding, key=bytes_at.__getitem__, reverse=True)

    def _raise_limit(self) -> None:
        self.limit = max(self.limit, *self._memory.given.values())
        self._is_final = True

    @cached_property
    def _memory(self) -> MovedMemory:
        """The memory of `given` and of attempts."""
        self.switch_to(self.given)
        return MovedMemory(self.f, self._live(), self.mesh)

    def _live(self) -> Sequence[Operation]:
        return [op for op in self.ops if op not in self._dead] if self._dead else self.ops

    def _take_back(self) -> None:
        self._changes.take_back()
        self._changes, self.ops = BlockChanges(), self._given

    def _start(self, excluded: Container[int], cutting: bool) -> dict[Operation, int]:
        """Start the collectives that are not excluded, and return the number of each.

        Collectives are numbered in the order of the block; the parts of a bucket share its number.
        """
        changes, timeline, hideable_costs = self._changes, self.timeline, self._hideable
        numbers: dict[Operation, int] = {op: i for i, op in enumerate(self.candidates)}
        if cutting:
            timeline = Timeline(self.ops, self.costs)  # parts are available at other times
            for bucket in self.candidates:
                if numbers[bucket] not in excluded:
                    for part in _cut(bucket, timeline, changes):
                        numbers[part] = numbers[bucket]
            self.ops = ops_of(self.block)
            hideable_costs = hideable_collectives(
                self.ops, startable_ops(self.ops, self.mesh), timeline
            )
        starting = {op: cost for op, cost in hideable_costs.items() if numbers[op] not in excluded}
        schedule = StartSchedule(self.ops, timeline, starting)
        for op in schedule.in_order():
            changes.move(op, schedule.others[schedule.starts[op]])
        at = {op: i for i, op in enumerate(ops_of(self.block))}
        for op in schedule.costs:
            if schedule.hides(op):
                user = min(users(op, schedule.loops), key=at.__getitem__)
                _wait(op, min(user, schedule.freed(op) or user, key=at.__getitem__), changes)
        self.ops = ops_of(self.block)
        return numbers


def _overlap(f: FuncOp, ops: Sequence[Operation], mesh: Mesh) -> None:
    """Keep the fastest form of the body: unchanged, with started collectives, or with cut buckets
    too."""
    candidates = startable_ops(ops, mesh)
    if not candidates:
        return
    body = Body(f, ops, candidates, mesh)
    cuttings = (False, True) if body.is_cut() else (False,)
    attempts = [body.attempt(frozenset(), cutting=cutting) for cutting in cuttings]
    best = body.given
    for attempt in sorted(attempts, key=lambda a: a.seconds):
        within = _within(body, attempt) if attempt.gains_over(best) else None
        if within is not None and within.gains_over(best):
            best = within
    body.switch_to(best)


def _within(body: Body, attempt: Attempt) -> Attempt | None:
    """Return an attempt within memory; None if MAX_ATTEMPTS exceed it.

    The collectives in flight at an op that exceeds the limit are excluded from the next attempt.
    """
    excluded = frozenset[int]()
    for _ in range(MAX_ATTEMPTS):
        over = body.exceeding_ops(attempt)
        if not over:
            return attempt
        excluded |= _to_exclude(body.ops, over, attempt.numbers)
        attempt = body.attempt(excluded, cutting=attempt.cutting)
    return None


def _to_exclude(
    ops: Iterable[Operation], over: Sequence[Operation], numbers: Mapping[Operation, int]
) -> set[int]:
    """Return the numbers of the collectives to exclude, given the ops that exceed the limit.

    Takes the ops of `over` in order, and excludes all collectives in flight at an op unless one of
    them is excluded already. So the number of attempts does not depend on the number of layers. If
    an op has no collective in flight, all collectives are excluded.
    """
    in_flight = dict.fromkeys(over, frozenset[int]())
    parts, to_exclude = Counter[int](), set[int]()  # a bucket may have several parts in flight
    now = frozenset[int]()
    for op in ops:
        if op in numbers and dist.is_started(op):
            parts[numbers[op]] += 1
            now |= {numbers[op]}
        if op in in_flight:
            in_flight[op] = now
        if type(op) is dist.WaitOp and op.started in numbers:
            number = numbers[op.started]
            parts[number] -= 1
            if not parts[number]:
                now -= {number}
    for numbers_there in in_flight.values():
        if not numbers_there:
            return {*numbers.values()}
        if to_exclude.isdisjoint(numbers_there):
            to_exclude |= numbers_there
    return to_exclude


def _parts(op: dist.AsyncOp, timeline: Timeline) -> list[list[int]]:
    """Return the indices of the values of each part into which a bucket is cut; a single part
    leaves the bucket uncut."""
    order = [*range(len(op.values))]
    has_index = isinstance(op, dist.FusibleOp) and op.fusion is not None
    if len(order) == 1 or has_index or grows(op):
        return [order]
    values = collective_work(op, timeline.mesh).times
    form, seconds = values.fastest
    available = [timeline.available(v) for v in op.values]
    order.sort(key=available.__getitem__)
    runs = timeline.loops.runs(op)
    sending = [runs * (seconds[i] + values.packing[i]) for i in order]
    cluster = timeline.mesh.cluster_or_default
    ends = cut_points(sending, [available[i] for i in order], runs * form.latency, cluster)
    return [order[start:end] for start, end in pairwise([0, *ends])]


def _cut(op: dist.AsyncOp, timeline: Timeline, changes: BlockChanges) -> Iterator[dist.AsyncOp]:
    """Yield the parts that replace a bucket; none if it stays whole."""
    parts = _parts(op, timeline)
    if len(parts) == 1:
        return
    for part in parts:
        outs = [op.outs[i] for i in part]
        new = Rewriter().before(op).create(
            type(op), [op.values[i] for i in part], [v.type for v in outs],
            op.properties, op.attributes, outs,
        )  # fmt: skip
        changes.use(new, outs)
        yield new
    changes.keep_operands(op)
    changes.leave(op)  # not erased: undoing the attempt puts it back
    op.operands = ()


def _wait(op: dist.AsyncOp, user: Operation, changes: BlockChanges) -> None:
    """Start a collective where it stands, and wait for it before the first use of a result."""
    changes.start(op)
    rewriter = Rewriter().before(user)
    rewriter.location = op.location
    wait = rewriter.create(dist.WaitOp, op.outs, [v.type for v in op.outs], names=op.outs)
    changes.use(wait, op.outs)
