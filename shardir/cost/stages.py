"""The memory and the time of the ranks of a step in stages.

Memory: a rank has the parameters, states and inputs that its stages read, throughout, and sums over
the microbatches from the first one to the end, in which later products are made. It holds another
value of a microbatch from the function that makes it, or the post of its receive, to the last
function of its own that reads it, and until it has waited for the sends of it: all by the order of
`stage_order.py`. A view that it sends holds all of its storage; where it is received it has its own
bytes. While a function runs, there is what it needs besides.

Time: a rank begins a function when the one before it has ended and what it reads has arrived. A
value of another rank arrives at the end of the function that makes it, and the seconds of its
transfer later. Transfers take no time of ranks, and any number of them can be in flight.
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
"""A storage, by the value that it is made for, of a microbatch; None where it is of all of them."""


class TimedRun(NamedTuple):
    """A run of a function on a rank, with its begin and end in seconds."""

    begin: float
    end: float
    run: StageRun


def memory_of_ranks(f: FuncOp, mesh: Mesh) -> list[MemoryUse]:
    """Return the memory that a step in stages needs on a device of each rank of its schedule.
    Raises ShardirError unless it ends, as the next ones do."""
    step = _StepStorages(f, train.proven_order(f), mesh)
    return [step.memory(rank) for rank in step.order.ranks]


def microbatches_held(f: FuncOp, mesh: Mesh) -> list[dict[SSAValue, int]]:
    """Return of how many microbatches each rank holds the storage of a value at most."""
    step = _StepStorages(f, train.proven_order(f), mesh)
    return [step.held(rank) for rank in step.order.ranks]


def bytes_at_runs(f: FuncOp, mesh: Mesh) -> list[list[int]]:
    """Return the bytes that a device of each rank of its schedule needs at most in each function
    that it runs."""
    step = _StepStorages(f, train.proven_order(f), mesh)
    return [step.needed(rank) for rank in step.order.ranks]


class Arrival(NamedTuple):
    """A value of another rank in transfer, in seconds, and the run that makes it."""

    begin: float
    end: float
    made: StageRun


@dataclass(frozen=True)
class TimedStages:
    """The times of the devices of a step in stages.

    Args:
        ranks: the functions of each rank, with their times.
        ops: the ops of each function, from its begin, and the sums over microbatches of what it
            makes.
        arrivals: by transfer, microbatch (None outside the loop) and receiving rank.
    """

    ranks: list[list[TimedRun]]
    ops: dict[CallOp, tuple[TimedOp, ...]]
    arrivals: dict[tuple[train.TransferOp, int | None, int], Arrival]


def times_of_step(f: FuncOp, mesh: Mesh) -> TimedStages:
    """Return the times of a step in stages on the mesh's cluster. Raises ShardirError unless it
    ends."""
    found = _StepTimes(f, train.proven_order(f).runs, mesh)
    return TimedStages(found.ranks(), found.ops, found.arrivals)


class _StepTimes:
    """The times of the functions of a step."""

    def __init__(self, f: FuncOp, calls: StepRuns, mesh: Mesh):
        self.calls = calls
        self.ops = dict[CallOp, tuple[TimedOp, ...]]()
        self.arrivals = dict[tuple[train.TransferOp, int | None, int], Arrival]()
        self.transfers = dict[train.TransferOp, float]()
        self.carries = dict[SSAValue, SSAValue]()
        """Of what a loop carries the value of the run before."""
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
        """The seconds of a function, and of the sums over microbatches of what it makes."""

    def ranks(self) -> list[list[TimedRun]]:
        todo = [self.calls.runs(rank) for rank in range(self.calls.schedule.ranks)]
        found: list[list[TimedRun]] = [[] for _ in todo]
        while sum(map(len, found)) < sum(map(len, todo)):
            before = sum(map(len, found))
            for rank, runs in enumerate(todo):
                self._advance(rank, runs, found[rank])
            assert sum(map(len, found)) > before, "a step that is proven to end does not"
        return found

    def _advance(self, rank: int, runs: list[StageRun], found: list[TimedRun]) -> None:
        """Run what can begin on a rank."""
        for run in runs[len(found) :]:
            begin = found[-1].end if found else 0.0
            for v in run.op.operands:
                if (there := self._arrival(v, run.microbatch, rank)) is None:
                    return
                begin = max(begin, there)
            end = self.ends[run] = begin + self.seconds[run.op]
            found.append(TimedRun(begin, end, run))

    def _arrival(self, v: SSAValue, microbatch: int | None, rank: int) -> float | None:
        """Return when a rank has a value; None while it is not known."""
        if (read := self.calls.read(v, microbatch)) is None:
            return 0.0
        if not all(run in self.ends for run in read.runs):
            return None
        last = max(read.runs, key=self.ends.__getitem__)
        made = self.ends[last]
        if self.calls.rank(last.op) == rank:
            return made
        end = made + sum(self.transfers[op] for op in read.transfers)
        if read.transfers:
            key = read.transfers[-1], last.microbatch, rank
            self.arrivals[key] = Arrival(made, end, last)
        return end


class _StepStorages:
    """The functions of a step, and the storages of the values between them."""

    def __init__(self, f: FuncOp, order: StageOrder, mesh: Mesh):
        self.order, self.calls = order, order.runs
        calls = order.runs
        args = zip(f.body.block.args, train.arguments(f), strict=True)
        self.parts: dict[SSAValue, str] = {v: f"{argument.role}s" for v, argument in args}
        """The purposes of storages: of arguments and sums, and of what forward parts make."""
        self.arguments = frozenset(self.parts)
        self.sizes = {v: size_of(v) for v in self.parts}
        self.root: dict[SSAValue, SSAValue] = {}
        self.extra: dict[CallOp, tuple[int, int]] = {}
        """The bytes that a function needs besides its arguments: in a run that begins sums, and in
        others, which add products to them."""
        self.added: dict[CallOp, list[SSAValue]] = {}
        """The sums to which the function of a call adds products."""
        self.sums: dict[SSAValue, list[SSAValue]] = {}
        """The sums of a value over the microbatches."""
        self.received: dict[SSAValue, int] = {}
        """The bytes of the values in a storage that are sent to other ranks."""
        added = added_in_place(f.body.block.ops)
        for op in f.body.block.ops:
            if isinstance(op, CallOp) and (callee := calls.callees.get(op)) is not None:
                end = callee.body.block.last_op
                assert isinstance(end, ReturnOp)
                made = zip(op.results, end.operands, strict=True)
                sums = [v for result, v in made if result in added]
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
        """Note a function, with its storages in its first run, and in others if they differ."""
        block, end = callee.body.block, callee.body.block.last_op
        assert isinstance(end, ReturnOp)
        within = dict(zip(block.args, op.operands, strict=True))
        given = sum(map(size_of, block.args))
        first, other = (max(x.needed, default=0) - given for x in (live, later or live))
        self.extra[op] = first, other
        made: dict[SSAValue, SSAValue] = {}
        forward = train.action_of(callee) == "F"
        for v, result in zip(end.operands, op.results, strict=True):
            own = live.root(v)
            if own in within:
                self.root[result] = self.storage(within[own])
            elif own in made:
                self.root[result] = made[own]
            else:
                made[own] = result
                self.sizes[result] = live.sizes.get(own, size_of(v))
                self.parts[result] = "activations" if forward else "temporaries"

    def _unite(self, op: train.EitherOp) -> None:
        """Let what two functions make, each for some microbatches, be in one storage."""
        one, other = map(self.storage, op.operands)
        same = [v for v, root in self.root.items() if root is one]
        self.root |= dict.fromkeys((*same, one, op.out), other)

    def storage(self, v: SSAValue) -> SSAValue:
        """Return the value that the storage of one is made for."""
        return self.root.get(v, v)

    def size(self, root: SSAValue, rank: int) -> int:
        """Return the bytes of a storage on a rank: on another one than makes it, of what it
        receives."""
        makers = self.calls.makers(root)
        made_here = not makers or self.calls.rank(makers[0]) == rank
        return self.sizes[root] if made_here else self.received.get(root, self.sizes[root])

    def memory(self, rank: int) -> MemoryUse:
        """Return the memory of a rank."""
        runs, spans = self.calls.runs(rank), self._spans(rank)
        needed, extra = self.needed(rank), self._extra(runs)
        at = max(range(len(runs)), key=needed.__getitem__)
        there = Counter[SSAValue]()
        for (v, _), (start, end) in spans.items():
            if start <= at <= end:
                there[v] += self.size(v, rank)
        storages = [Storage(v, n, self.parts[v]) for v, n in there.most_common()]
        op: Operation = runs[at].op
        return MemoryUse(needed[at], op, tuple(storages), extra[at])

    def needed(self, rank: int) -> list[int]:
        """Return the bytes that a rank needs in each function that it runs."""
        runs = self.calls.runs(rank)
        change = [0] * (len(runs) + 1)
        for (v, _), (start, end) in self._spans(rank).items():
            size = self.size(v, rank)
            change[start] += size
            change[end + 1] -= size
        held = accumulate(change[:-1])
        return [n + extra for n, extra in zip(held, self._extra(runs), strict=True)]

    def _extra(self, runs: Sequence[StageRun]) -> list[int]:
        """Return the bytes that each run needs besides what its rank holds."""
        begun, found = set[SSAValue](), list[int]()
        for run in runs:
            sums = self.added.get(run.op, [])
            found.append(self.extra[run.op][begun.issuperset(sums)])
            begun.update(sums)
        return found

    def held(self, rank: int) -> dict[SSAValue, int]:
        """Return of how many microbatches a rank holds a storage at most."""
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
        """Return of each storage that a rank holds between functions the first run and the last
        one in which it is there besides what the function makes."""
        spans = _Spans(self, len(self.calls.runs(rank)) - 1)
        for kind, of in self.order.events[rank]:
            if isinstance(of, StageRun):
                spans.run(of)
            elif kind == "receive":
                spans.begin(of.value)
            elif kind == "send":
                spans.sends.add(of)
            elif of.source == rank:
                spans.sends.remove(of)
                spans.hold(of.value, spans.at - 1)
        states = (read.value for read in self.calls.states(rank))
        for value in (*(message.value for message in spans.sends), *states):
            spans.hold(value, spans.end)
        return spans.found


class _Spans:
    """The spans of the storages of a rank, while its events are gone through."""

    def __init__(self, step: _StepStorages, end: int):
        self.step, self.at, self.end = step, 0, end
        self.found: dict[BatchStorage, tuple[int, int]] = {}
        self.starts: dict[BatchStorage, int] = {}
        self.sends: set[StageMessage] = set()
        """The sends that have not been waited for."""
        self.in_loop = {v for op in step.calls.actions.values() for v in op.results}

    def run(self, run: StageRun) -> None:
        """Add what a run reads and makes."""
        for v in run.op.operands:
            root = self.step.storage(v)
            if root in self.step.arguments:
                self.found[root, None] = 0, self.end
            if (read := self.step.calls.read(v, run.microbatch)) is not None:
                self.hold(read.value, self.at)
        self.at += 1
        for v in self.step.calls.results(run.op):
            self.begin(StepValue(v, run.microbatch))
            for total in self.step.sums.get(v, ()):
                self.found.setdefault((total, None), (min(self.at, self.end), self.end))

    def begin(self, value: StepValue) -> None:
        """Let the span of a value begin at the next run."""
        self.starts.setdefault(self._key(value), min(self.at, self.end))

    def hold(self, value: StepValue, last: int) -> None:
        """Let the span of a value end at this run or later."""
        key = root, microbatch = self._key(value)
        if root in self.step.arguments:
            return
        start, end = self.found.get(key, (self.starts.get(key, 0), 0))
        last = self.end if microbatch is None else max(last, end)
        if start <= last:
            self.found[key] = start, last

    def _key(self, value: StepValue) -> BatchStorage:
        root = self.step.storage(value.name)
        return root, value.microbatch if root in self.in_loop else None
