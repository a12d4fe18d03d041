"""The order of a step in stages on each rank, for the calls and transfers of the IR.

The ranks themselves follow the same rules: `stages/order.py` of the runtime.
"""

from shardir.backend.torch.shardir_runtime.stages.order import (
    Event,
    PartRun,
    StageMessage,
    StepOrder,
    StepValue,
)
from shardir.dialects.train.stage_runs import Read, StageRun, StepRuns

__all__ = ["Event", "StageMessage", "StageOrder", "StepValue"]


class StageOrder(StepOrder):
    """The events of each rank of a step in stages. Runs are `StageRun`s, names of values are SSA
    values."""

    def __init__(self, runs: StepRuns, in_flight: int):
        self.runs = runs
        self._reads: dict[StageRun, list[Read]] = {}
        ranks = range(runs.schedule.ranks)
        before, after = (
            [self._part_run(StageRun(op, None)) for op in calls]
            for calls in (runs.before, runs.after)
        )
        totals = [
            (StepValue(op.out, None), runs.rank(makers[0]))
            for op in runs.sums if (makers := runs.makers(op.out))
        ]  # fmt: skip
        super().__init__(
            before,
            [[self._part_run(run) for run in runs.loop(rank)] for rank in ranks],
            after,
            totals,
            [[read.value for read in runs.states(rank)] for rank in ranks],
            {v: runs.targets(v) for v in runs.transfers},
            in_flight,
        )

    def reads(self, run: StageRun) -> list[Read]:
        """Return the reads of a run from other runs."""
        if run not in self._reads:
            self._reads[run] = self.runs.reads(run)
        return self._reads[run]

    def _part_run(self, run: StageRun) -> PartRun:
        reads = [read.value for read in self.reads(run)]
        makes = [StepValue(v, run.microbatch) for v in self.runs.results(run.op)]
        return PartRun(run, self.runs.rank(run.op), reads, makes)
