"""The memory and the time of the ranks of a step in stages.

What a rank holds, in the order of `stage_order.py`:

    parameters, states, inputs of its stages    throughout
    sums over the microbatches                  from the first microbatch to the end
    other values of a microbatch                from the function that makes it, or the post of its
                                                receive, to its last reader on the rank and to the
                                                waits for its sends
    the memory of a function itself             while it runs

A view that is sent keeps all of its storage alive on the sender, and only its own bytes on the
receiver.

A rank begins a function when the function before it has ended and all operands have arrived. A
value of another rank arrives the seconds of its transfer after the function that makes it. Any
number of transfers can be in flight; they take no time of ranks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.accumulation import added_in_place
from shardir.cost.memory import LiveStorages, MemoryUse, Storage
from shardir.cost.schedule import TimedOp, makespan, schedule
from shardir.cost.seconds import OpCost, cost_of, works_of
from shardir.dialects import train
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.types import size_of
from shardir.dialects.train import StageMessage, StageOrder, StageRun, StepRuns, StepValue

BatchStorage = tuple[SSAValue, int | None]
"""A storage, by the value that it is made for, and its microbatch; None if it serves all."""


class TimedRun(NamedTuple):
    """A run of a function on a rank, with its begin and end in seconds."""

    begin: float
    end: float
    run: StageRun


def memory_of_ranks(f: FuncOp, mesh: Mesh) -> list[MemoryUse]:
    """Return the peak memory of a device of each rank of a step in stages.

    Raises:
        ShardirError: the step does not end; so for the other functions of this module.
    """
    step = _StepStorages(f, train.proven_order(f), mesh)
    return [step.memory(rank) for rank in step.order.ranks]


def microbatches_held(f: FuncOp, mesh: Mesh) -> list[dict[SSAValue, int]]:
    """Return, for each rank, the maximum number of microbatches of which it holds a storage."""
    step = _StepStorages(f, train.proven_order(f), mesh)
    return [step.held(rank) for rank in step.order.ranks]


def bytes_at_runs(f: FuncOp, mesh: Mesh) -> list[list[int]]:
    """Return, for each rank, the peak bytes of a device in each function that the rank runs."""
    step = _StepStorages(f, train.proven_order(f), mesh)
    return [step.needed(rank) for rank in step.order.ranks]


class Arrival(NamedTuple):
    """The transfer of a value from another rank, in seconds, and the run that makes the value."""

    begin: float
    end: float
    made: StageRun


@dataclass(frozen=True)
class TimedStages:
    """The times of the devices of a step in stages.

    Attributes:
        ranks: the runs of each rank.
        ops: the ops of each function and the sums over microbatches of its results, in seconds from
            its begin.
        arrivals: by transfer, microbatch (None outside the loop) and receiving rank.
    """

    ranks: list[list[TimedRun]]
    ops: dict[CallOp, tuple[TimedOp, ...]]
    arrivals: dict[tuple[train.TransferOp, int | None, int], Arrival]


def times_of_step(f: FuncOp, mesh: Mesh) -> TimedStages:
    """Return the times of a step in stages on the mesh's cluster."""
    step = _StepTimes(f, train.proven_order(f).runs, mesh)
    return TimedStages(step.run_ranks(), step.ops, step.arrivals)


class _StepTimes:
    """The times of the functions of a step."""

    def __init__(self, f: FuncOp, calls: StepRuns, mesh: Mesh):
        self.calls = calls
        self.ops = dict[CallOp, tuple[TimedOp, ...]]()
        self.arrivals = dict[tuple[train.TransferOp, int | None, int], Arrival]()
        self.transfers = dict[train.TransferOp, float]()
        self.carries = dict[SSAValue, SSAValue]()
        """By carried value, its value of the microbatch before."""
        self.ends = dict[StageRun, float]()
        sums: dict[CallOp, list[OpCost]] = {op: [] for op in calls.callees}
        for op in f.body.block.ops:
            if isinstance(op, train.CarryOp):
                self.carries[op.carried] = op.x
            elif isinstance(op, train.TransferOp | train.OfMicrobatches):
                cost = cost_of(op, mesh)
                assert cost is not None
                if isinstance(op, train.TransferOp):
                    self.transfers[op] = cost.seconds
                else:
                    for maker in self.calls.makers(op.x):
                        sums[maker].append(cost)
        for op, callee in calls.callees.items():
            works = works_of(ops_of(callee.body.block), mesh)
            self.ops[op] = tuple(schedule([*(w.cost(mesh) for w in works), *sums[op]], mesh))
        self.seconds = {op: makespan(times) for op, times in self.ops.items()}
        """The seconds of a function, and of the sums over microbatches of its results."""

    def run_ranks(self) -> list[list[TimedRun]]:
        """Return the runs of each rank, with their times."""
        todo = [self.calls.runs(rank) for rank in range(self.calls.schedule.ranks)]
        timed: list[list[TimedRun]] = [[] for _ in todo]
        while sum(map(len, timed)) < sum(map(len, todo)):
            before = sum(map(len, timed))
            for rank, runs in enumerate(todo):
                self._advance(rank, runs, timed[rank])
            assert sum(map(len, timed)) > before, "a step that is proven to end does not"
        return timed

    def _advance(self, rank: int, runs: list[StageRun], timed: list[TimedRun]) -> None:
        """Time the next runs of a rank, up to the first whose operands have no known arrival."""
        for run in runs[len(timed) :]:
            begin = timed[-1].end if timed else 0.0
            for v in run.op.operands:
                if (arrival := self._arrival(v, run.microbatch, rank)) is None:
                    return
                begin = max(begin, arrival)
            end = self.ends[run] = begin + self.seconds[run.op]
            timed.append(TimedRun(begin, end, run))

    def _arrival(self, v: SSAValue, microbatch: int | None, rank: int) -> float | None:
        """Return when a rank has a value, in seconds; None while that is not known."""
        if (read := self.calls.read(v, microbatch)) is None:
            return 0.0
        if not all(run in self.ends for run in read.runs):
            return None
        last = max(read.runs, key=self.ends.__getitem__)
        begin = self.ends[last]
        if self.calls.rank(last.op) == rank:
            return begin
        end = begin + sum(self.transfers[op] for op in read.transfers)
        if read.transfers:
            key = read.transfers[-1], last.microbatch, rank
            self.arrivals[key] = Arrival(begin, end, last)
        return end


class _StepStorages:
    """The functions of a step, and the storages of the values between them."""

    def __init__(self, f: FuncOp, order: StageOrder, mesh: Mesh):
        self.order, self.calls = order, order.runs
        calls = order.runs
        args = zip(f.body.block.args, train.arguments(f), strict=True)
        self.parts: dict[SSAValue, str] = {v: f"{argument.role}s" for v, argument in args}
        """The purpose of each storage (`memory.PARTS`)."""
        self.arguments = frozenset(self.parts)
        self.sizes = {v: size_of(v) for v in self.parts}
        self.root: dict[SSAValue, SSAValue] = {}
        self.extra: dict[CallOp, tuple[int, int]] = {}
        """The bytes that a function needs besides its arguments: in its first run, which makes its
        sums, and in later runs, which add products to them."""
        self.added: dict[CallOp, list[SSAValue]] = {}
        """The sums to which a call's function adds products."""
        self.sums: dict[SSAValue, list[SSAValue]] = {}
        """The sums of a value over the microbatches."""
        self.received: dict[SSAValue, int] = {}
        """By storage, the bytes of its values that are sent to other ranks."""
        added = added_in_place(f.body.block.ops)
        for op in f.body.block.ops:
            if isinstance(op, CallOp) and (callee := calls.callees.get(op)) is not None:
                end = callee.body.block.last_op
                assert isinstance(end, ReturnOp)
                results = zip(op.results, end.operands, strict=True)
                sums = [v for result, v in results if result in added]
                later = LiveStorages(callee, mesh, elsewhere=sums) if sums else None
                self._call(op, callee, LiveStorages(callee, mesh), later)
                self.added[op] = [added[v].out for v in op.results if v in added]
            elif isinstance(op, train.EitherOp):
                self._unite(op)
            elif isinstance(op, train.OfMicrobatches):
                self.sums.setdefault(op.x, []).append(op.out)
                is_sum = isinstance(op, train.AccumulateOp)
                self.parts[op.out] = "gradients" if is_sum else "activations"
                self.sizes[op.out] = size_of(op.out)
            elif isinstance(op, train.TransferOp | train.MicrobatchOp | train.CarriedOp):
                self.root[op.out] = root = self.storage(op.x)
                if isinstance(op, train.TransferOp):
                    self.received[root] = self.received.get(root, 0) + size_of(op.out)

    def _call(
        self, op: CallOp, callee: FuncOp, live: LiveStorages, later: LiveStorages | None
    ) -> None:
        """Record a call: the bytes of its function, and the storages of its results.

        Args:
            live: the storages of the function in its first run.
            later: in its later runs; None if they are equal.
        """
        block, end = callee.body.block, callee.body.block.last_op
        assert isinstance(end, ReturnOp)
        operands = dict(zip(block.args, op.operands, strict=True))
        arguments = sum(map(size_of, block.args))
        first, other = (max(x.needed, default=0) - arguments for x in (live, later or live))
        self.extra[op] = first, other
        storages: dict[SSAValue, SSAValue] = {}
        forward = train.action_of(callee) == "F"
        for v, result in zip(end.operands, op.results, strict=True):
            root = live.root(v)
            if root in operands:
                self.root[result] = self.storage(operands[root])
            elif root in storages:
                self.root[result] = storages[root]
            else:
                storages[root] = result
                self.sizes[result] = live.sizes.get(root, size_of(v))
                self.parts[result] = "activations" if forward else "temporaries"

    def _unite(self, op: train.EitherOp) -> None:
        """Put the operands of an op, which two functions make for different microbatches, and its
        result into one storage."""
        one, other = map(self.storage, op.operands)
        members = [v for v, root in self.root.items() if root is one]
        self.root |= dict.fromkeys((*members, one, op.out), other)

    def storage(self, v: SSAValue) -> SSAValue:
        """Return the storage of a value, as the value that it is made for."""
        return self.root.get(v, v)

    def size(self, root: SSAValue, rank: int) -> int:
        """Return the bytes of a storage on a rank: the received bytes if another rank makes it."""
        makers = self.calls.makers(root)
        made_here = not makers or self.calls.rank(makers[0]) == rank
        return self.sizes[root] if made_here else self.received.get(root, self.sizes[root])

    def memory(self, rank: int) -> MemoryUse:
        """Return the memory of a rank."""
        runs, spans = self.calls.runs(rank), self._spans(rank)
        needed, extra = self.needed(rank), self._extra(runs)
        at = max(range(len(runs)), key=needed.__getitem__)
        sizes = Counter[SSAValue]()
        for (v, _), (start, end) in spans.items():
            if start <= at <= end:
                sizes[v] += self.size(v, rank)
        storages = [Storage(v, n, self.parts[v]) for v, n in sizes.most_common()]
        op: Operation = runs[at].op
        return MemoryUse(needed[at], op, tuple(storages), extra[at])

    def needed(self, rank: int) -> list[int]:
        """Return the peak bytes of a rank in each function that it runs."""
        runs = self.calls.runs(rank)
        change = [0] * (len(runs) + 1)
        for (v, _), (start, end) in self._spans(rank).items():
            size = self.size(v, rank)
            change[start] += size
            change[end + 1] -= size
        held = accumulate(change[:-1])
        return [n + extra for n, extra in zip(held, self._extra(runs), strict=True)]

    def _extra(self, runs: Sequence[StageRun]) -> list[int]:
        """Return the bytes that each run needs besides the storages that its rank holds."""
        begun, extra = set[SSAValue](), list[int]()
        for run in runs:
            sums = self.added.get(run.op, [])
            extra.append(self.extra[run.op][begun.issuperset(sums)])
            begun.update(sums)
        return extra

    def held(self, rank: int) -> dict[SSAValue, int]:
        """Return, by storage, the maximum number of microbatches of which a rank holds it."""
        changes: dict[SSAValue, Counter[int]] = {}
        for (v, microbatch), (start, end) in self._spans(rank).items():
            if microbatch is not None:
                change = changes.setdefault(v, Counter())
                change[start] += 1
                change[end + 1] -= 1
        return {
            v: max(accumulate(change[i] for i in sorted(change))) for v, change in changes.items()
        }

    def _spans(self, rank: int) -> dict[BatchStorage, tuple[int, int]]:
        """Return, by storage that a rank holds between functions, the first and the last run during
        which it is held."""
        spans = _Spans(self, len(self.calls.runs(rank)) - 1)
        for kind, subject in self.order.events[rank]:
            if isinstance(subject, StageRun):
                spans.run(subject)
            elif kind == "receive":
                spans.begin(subject.value)
            elif kind == "send":
                spans.sends.add(subject)
            elif subject.source == rank:
                spans.sends.remove(subject)
                spans.hold(subject.value, spans.at - 1)
        states = (read.value for read in self.calls.states(rank))
        for value in (*(message.value for message in spans.sends), *states):
            spans.hold(value, spans.end)
        return spans.spans


class _Spans:
    """The spans of the storages of a rank, built event by event.

    Attributes:
        at: the index of the next run.
        end: the index of the last run.
        spans: by storage, the first and last run during which it is held.
        starts: by storage, the run after the function that makes it, or after its receive.
        sends: pending sends.
    """

    def __init__(self, step: _StepStorages, end: int):
        self.step, self.at, self.end = step, 0, end
        self.spans: dict[BatchStorage, tuple[int, int]] = {}
        self.starts: dict[BatchStorage, int] = {}
        self.sends: set[StageMessage] = set()
        self.in_loop = {v for op in step.calls.actions.values() for v in op.results}

    def run(self, run: StageRun) -> None:
        """Add the storages that a run reads and makes."""
        for v in run.op.operands:
            root = self.step.storage(v)
            if root in self.step.arguments:
                self.spans[root, None] = 0, self.end
            if (read := self.step.calls.read(v, run.microbatch)) is not None:
                self.hold(read.value, self.at)
        self.at += 1
        for v in self.step.calls.results(run.op):
            self.begin(StepValue(v, run.microbatch))
            for total in self.step.sums.get(v, ()):
                self.spans.setdefault((total, None), (min(self.at, self.end), self.end))

    def begin(self, value: StepValue) -> None:
        """Begin the span of a value at the next run."""
        self.starts.setdefault(self._key(value), min(self.at, self.end))

    def hold(self, value: StepValue, last: int) -> None:
        """Extend the span of a value to the run `last` at least."""
        key = root, microbatch = self._key(value)
        if root in self.step.arguments:
            return
        start, end = self.spans.get(key, (self.starts.get(key, 0), 0))
        last = self.end if microbatch is None else max(last, end)
        if start <= last:
            self.spans[key] = start, last

    def _key(self, value: StepValue) -> BatchStorage:
        root = self.step.storage(value.name)
        return root, value.microbatch if root in self.in_loop else None
