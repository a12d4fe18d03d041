"""The memory of the ranks of a step in stages.

A rank has the parameters, states and inputs that its stages read, throughout, and sums over the
microbatches from the first one to the end. It holds another value of a microbatch from the function
that makes it to the last one of its own that reads it; one that it receives, from the function
before the one that first reads it. While a function runs, there is what it needs besides. Not
counted are values that are sent, until they have arrived, and the next state of a microbatch.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Schedule
from shardir.cost.memory import LiveStorages, MemoryUse, Storage
from shardir.dialects import train
from shardir.dialects.nn.types import size_of

HALVES = {"B": "IW"}
"""The actions that one is, of a stage without a function of its own for it."""

BatchStorage = tuple[SSAValue, int | None]
"""A storage, by the value that it is made for, of a microbatch; None where it is of all of them."""


class StageRun(NamedTuple):
    """A call of a function of a stage, with the microbatch, in the loop over them."""

    op: CallOp
    microbatch: int | None


def memory_of_ranks(f: FuncOp, mesh: Mesh) -> list[MemoryUse]:
    """Return the memory that a step in stages needs on a device of each rank of its schedule."""
    text = train.schedule_of(f)
    assert text is not None
    schedule, step = Schedule.parse(text), _StepStorages(f, mesh)
    return [step.memory(list(step.runs(schedule, rank))) for rank in range(schedule.ranks)]


class _StepStorages:
    """The functions of a step, and the storages of the values between them."""

    def __init__(self, f: FuncOp, mesh: Mesh):
        args = zip(f.body.block.args, train.arguments(f), strict=True)
        self.parts: dict[SSAValue, str] = {v: f"{argument.role}s" for v, argument in args}
        """The purposes of storages: of arguments and sums, and of what forward parts make."""
        self.arguments = frozenset(self.parts)
        self.sizes = {v: size_of(v) for v in self.parts}
        self.root: dict[SSAValue, SSAValue] = {}
        self.extra: dict[CallOp, int] = {}
        """The bytes that a function needs besides its arguments."""
        self.before: list[CallOp] = []
        """The calls before the loop over the microbatches, in it by their actions, and after it."""
        self.actions: dict[tuple[int, str], CallOp] = {}
        self.after: list[CallOp] = []
        self.sums: dict[SSAValue, list[SSAValue]] = {}
        """The sums of a value over the microbatches."""
        outside = self.before
        for op in f.body.block.ops:
            if isinstance(op, train.MicrobatchesOp):
                outside = self.after
            elif isinstance(op, CallOp) and (callee := train.callee_of(op)) is not None:
                stage, action = train.stage_of(callee), train.action_of(callee)
                assert stage is not None
                if action is None:
                    outside.append(op)
                else:
                    self.actions[stage, action] = op
                self._call(op, callee, LiveStorages(callee, mesh))
            elif isinstance(op, train.AccumulateOp):
                self.sums.setdefault(op.operands[0], []).append(op.out)
                self.parts[op.out], self.sizes[op.out] = "gradients", size_of(op.out)
            elif isinstance(op, train.TransferOp | train.MicrobatchOp | train.CarriedOp):
                self.root[op.out] = self.storage(op.x)

    def _call(self, op: CallOp, callee: FuncOp, live: LiveStorages) -> None:
        block, end = callee.body.block, callee.body.block.last_op
        assert isinstance(end, ReturnOp)
        within = dict(zip(block.args, op.operands, strict=True))
        self.extra[op] = max(live.needed, default=0) - sum(map(size_of, block.args))
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

    def storage(self, v: SSAValue) -> SSAValue:
        """Return the value that the storage of one is made for."""
        return self.root.get(v, v)

    def runs(self, schedule: Schedule, rank: int) -> Iterator[StageRun]:
        """Yield the functions that a rank runs, in their order."""

        def own(ops: list[CallOp]) -> Iterator[StageRun]:
            for op in ops:
                callee = train.callee_of(op)
                stage = None if callee is None else train.stage_of(callee)
                if stage is not None and schedule.placement[stage] == rank:
                    yield StageRun(op, None)

        yield from own(self.before)
        for stage, kind, microbatch in schedule.orders[rank]:
            one = (stage, kind) in self.actions
            for part in kind if one else HALVES.get(kind, ""):
                if (op := self.actions.get((stage, part))) is not None:
                    yield StageRun(op, microbatch)
        yield from own(self.after)

    def memory(self, runs: list[StageRun]) -> MemoryUse:
        """Return the memory of a rank that runs these functions."""
        spans = self._spans(runs)
        needed = [self.extra[run.op] for run in runs]
        for (v, _), (start, end) in spans.items():
            for i in range(start, end + 1):
                needed[i] += self.sizes[v]
        at = max(range(len(runs)), key=needed.__getitem__)
        held = Counter[SSAValue]()
        for (v, _), (start, end) in spans.items():
            if start <= at <= end:
                held[v] += self.sizes[v]
        storages = [Storage(v, n, self.parts[v]) for v, n in held.most_common()]
        op: Operation = runs[at].op
        return MemoryUse(needed[at], op, tuple(storages), self.extra[runs[at].op])

    def _spans(self, runs: list[StageRun]) -> dict[BatchStorage, tuple[int, int]]:
        """Return of each storage that a rank holds between functions the first run and the last
        one in which it is there besides what the function makes."""
        in_loop = {v for op in self.actions.values() for v in op.results}
        found: dict[BatchStorage, tuple[int, int]] = {}
        made: dict[BatchStorage, int] = {}
        end = len(runs) - 1
        for i, (op, microbatch) in enumerate(runs):
            for v in dict.fromkeys(map(self.storage, op.operands)):
                if v in self.arguments:
                    found[v, None] = 0, end
                    continue
                key = v, microbatch if v in in_loop else None
                start, _ = found.get(key, (made.get(key, max(i - 1, 0)), i))
                found[key] = start, i if v in in_loop else end
            for v in op.results:
                made.setdefault((self.storage(v), microbatch), i + 1)
                for total in self.sums.get(v, ()):
                    found.setdefault((total, None), (min(i + 1, end), end))
        return found
