"""The runs of a step in stages: the calls of each rank in order, and the values that they read.

schedule 0F0,0F1,0B0,0B1          rank 0: @step_forward_0 for microbatches 0 and 1,
         1F0,1B0,1F1,1B1                  @step_backward_0 for 0 and 1, @step_update_0
"""

from collections.abc import Iterable
from typing import NamedTuple

from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.schedules import Action, Schedule
from shardir.backend.torch.shardir_runtime.stages.order import StepValue, part_kinds
from shardir.dialects.train.loops import CarriedOp, CarryOp
from shardir.dialects.train.microbatches import AccumulateOp, MicrobatchesOp, OfMicrobatches
from shardir.dialects.train.stages import (
    EitherOp,
    TransferOp,
    action_of,
    callee_of,
    schedule_of,
    stage_of,
)

BACKWARD = "BIW"
"""The actions of the backward part: B, or I and W."""


class StageRun(NamedTuple):
    """A call of a stage's function: for a microbatch in the loop, with None outside of it."""

    op: CallOp
    microbatch: int | None

    @property
    def stage(self) -> int:
        callee = callee_of(self.op)
        stage = None if callee is None else stage_of(callee)
        assert stage is not None, "a call of a step in stages that is of none"
        return stage

    @property
    def action(self) -> Action | None:
        """The action of the schedule; None before and after the loop."""
        callee = callee_of(self.op)
        kind = None if callee is None else action_of(callee)
        return None if kind is None else Action(self.stage, kind, self.microbatch)

    def __str__(self) -> str:
        return str(self.action or f"@{self.op.callee.string_value()}")


class Read(NamedTuple):
    """A value that a run reads, the runs that make it or its addends, and its transfers.

    The value is the one that is transferred: the result of a run, a sum of results over the
    microbatches, or the result of `train.either` if two functions make it, each for some
    microbatches."""

    value: StepValue
    runs: tuple[StageRun, ...]
    transfers: tuple[TransferOp, ...]


class StepRuns:
    """The calls of a step in stages, and the order in which each rank runs them."""

    def __init__(self, f: FuncOp):
        text = schedule_of(f)
        assert text is not None
        self.f, self.schedule = f, Schedule.parse(text)
        self.callees: dict[CallOp, FuncOp] = {}
        self.stages: dict[CallOp, int] = {}
        self.before: list[CallOp] = []
        """The calls before the loop over the microbatches."""
        self.actions: dict[tuple[int, str], CallOp] = {}
        """The calls in the loop, by stage and action."""
        self.after: list[CallOp] = []
        """The calls after the loop."""
        self.carries: dict[SSAValue, CarryOp] = {}
        """The op that sets each variable of the loop."""
        self.sums: list[OfMicrobatches] = []
        """The sums of the loop, followed by the collected values."""
        self.transfers: dict[SSAValue, list[TransferOp]] = {}
        """The transfers of each value."""
        self.named: dict[SSAValue, SSAValue] = {}
        """The result of `train.either` for each of its operands."""
        self.count = self.schedule.microbatches
        outside = self.before
        for op in f.body.block.ops:
            if isinstance(op, MicrobatchesOp):
                outside, self.count = self.after, op.runs
            elif isinstance(op, CallOp) and (callee := callee_of(op)) is not None:
                self.callees[op], stage = callee, stage_of(callee)
                assert stage is not None
                self.stages[op] = stage
                if (action := action_of(callee)) is None:
                    outside.append(op)
                else:
                    self.actions[stage, action] = op
            elif isinstance(op, CarryOp):
                self.carries[op.carried] = op
            elif isinstance(op, OfMicrobatches):
                self.sums.append(op)
            elif isinstance(op, TransferOp):
                self.transfers.setdefault(op.x, []).append(op)
            elif isinstance(op, EitherOp):
                self.named |= dict.fromkeys(op.operands, op.out)
        self.sums.sort(key=lambda op: not isinstance(op, AccumulateOp))

    def rank(self, op: CallOp) -> int:
        """Return the rank that runs a call."""
        return self.schedule.placement[self.stages[op]]

    def loop(self, rank: int) -> list[StageRun]:
        """Return the runs of a rank in the loop over the microbatches, in order."""
        runs = []
        for stage, kind, microbatch in self.schedule.orders[rank]:
            for part in part_kinds(stage, kind, self.actions):
                runs.append(StageRun(self.actions[stage, part], microbatch))
        return runs

    def is_due(self, op: CallOp, microbatch: int) -> bool:
        """Whether a call runs for a microbatch. Of a stage with functions for B, I and W, the
        schedule runs either B or both I and W."""
        kind, stage = action_of(self.callees[op]), self.stages[op]
        backward = {k for k in BACKWARD if (stage, k) in self.actions}
        if kind not in backward or "B" not in backward or len(backward) == 1:
            return True
        return (kind == "B") != ((stage, microbatch) in self.schedule.splits_backward)

    def results(self, op: CallOp) -> list[SSAValue]:
        """Return the results of a call, replaced by those of `train.either` where they are its
        operands."""
        return [self.named.get(v, v) for v in op.results]

    def runs(self, rank: int) -> list[StageRun]:
        """Return all runs of a rank, in order."""
        before, after = (
            [StageRun(op, None) for op in calls if self.rank(op) == rank]
            for calls in (self.before, self.after)
        )
        return [*before, *self.loop(rank), *after]

    def makers(self, v: SSAValue) -> list[CallOp]:
        """Return the calls that make a value, or the addends of a sum, looking through transfers:
        one call, both of `train.either`, or none for an argument or a part of one."""
        while isinstance(v.owner, TransferOp | OfMicrobatches):
            v = v.owner.x
        sources = v.owner.operands if isinstance(v.owner, EitherOp) else [v]
        return [x.owner for x in sources if isinstance(x.owner, CallOp)]

    def read(self, v: SSAValue, microbatch: int | None) -> Read | None:
        """Return the read of an operand by a run, for a microbatch or outside of the loop (None);
        None for an argument of the step or a part of one."""
        transfers: list[TransferOp] = []
        microbatches: Iterable[int | None] = [microbatch]
        total: SSAValue | None = None
        while isinstance(op := v.owner, Operation):
            if isinstance(op, CallOp | EitherOp):
                if isinstance(op, CallOp) and self.is_outside(op):
                    microbatches = [None]
                runs = tuple(StageRun(self._maker(v, k), k) for k in microbatches)
                value = self.named.get(v, v)
                if total is not None:
                    return Read(StepValue(total, None), runs, tuple(transfers))
                return Read(StepValue(value, runs[0].microbatch), runs, tuple(transfers))
            if isinstance(op, TransferOp):
                transfers.append(op)
            elif isinstance(op, OfMicrobatches):
                total, microbatches = v, range(self.count)
            elif isinstance(op, CarryOp):  # after the loop: the value of the last microbatch
                microbatch = self.count - 1
                microbatches = [microbatch]
            elif isinstance(op, CarriedOp) and microbatch and v in self.carries:
                v = self.carries[v].x
                microbatch -= 1
                microbatches = [microbatch]
                continue
            if not op.operands:
                break
            v = op.operands[0]
        return None

    def _maker(self, v: SSAValue, microbatch: int | None) -> CallOp:
        """Return the call that makes a value for a microbatch."""
        first, *others = self.makers(v)
        return next(op for op in (*others, first) if not others or self.is_due(op, microbatch or 0))

    def is_outside(self, op: CallOp) -> bool:
        """Whether a call is before or after the loop."""
        return action_of(self.callees[op]) is None

    def reads(self, run: StageRun) -> list[Read]:
        """Return the reads of a run from other runs."""
        reads = (self.read(v, run.microbatch) for v in run.op.operands)
        return [read for read in reads if read is not None]

    def targets(self, v: SSAValue) -> list[int]:
        """Return the ranks that read a value, other than the rank that makes it."""
        placement = self.schedule.placement
        transfers = self.transfers.get(v, ())
        ranks = {placement[stage] for op in transfers for stage in op.targets.data}
        return sorted(ranks - {placement[op.source.value.data] for op in transfers})

    def edges(self) -> list[tuple[int, int]]:
        """Return the pairs of a sending and a receiving rank, sorted."""
        makers = {v: self.makers(v) for v in self.transfers}
        sources = {v: self.rank(ops[0]) for v, ops in makers.items() if ops}
        return sorted({(rank, t) for v, rank in sources.items() for t in self.targets(v)})

    def states(self, rank: int) -> list[Read]:
        """Return the states that a rank has after the loop: the states that its functions read,
        with their values after the last microbatch."""
        operands = {v for op in self.callees if self.rank(op) == rank for v in op.operands}
        reads = []
        for carried, carry in self.carries.items():
            first = carried.owner
            argument = first.x if isinstance(first, CarriedOp) else carried
            if not operands.isdisjoint((carried, argument, carry.out)):
                reads.append(self.read(carry.out, None))
        return [read for read in reads if read is not None]
