"""The bytes of a step in stages, as the search counts them: on each rank those of its stages.

The ops of the step are counted once for each rank, one rank after the other. An argument is held by
the ranks of the stages that read it; another value by those that make or read it, and of what the
forward part saves for the backward part as many times as the schedule has microbatches in flight on
the rank's stages. The memory of a plan is that of its lowered program; these bytes decide which
plan is tried next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.schedules import Schedule
from shardir.analysis.in_flight import in_flight, named_or_smallest
from shardir.analysis.storages import Span
from shardir.dialects import train
from shardir.dialects.blocks import ops_of
from shardir.rewriting.stages import stages_of
from shardir.search.problem.memory import LiveBytes


class RankBytes:
    """The ranks that hold the values of a step, and how many times."""

    def __init__(self, block: Block, schedule: Schedule):
        self.ops = ops_of(block)
        self.stages = stages_of(self.ops)
        at = {op: i for i, op in enumerate(self.ops)}
        loop = next((at[o] for o in self.ops if isinstance(o, train.MicrobatchesOp)), -1)
        self.backward = next(
            (at[o] for o in self.ops if isinstance(o, train.BackwardOp)), len(self.ops)
        )
        self.forward = set(self.ops[loop + 1 : self.backward])
        self.placement = schedule.placement
        self.counts = {
            stage: max(moment[index] for moment in moments)
            for rank, moments in enumerate(in_flight(schedule))
            for index, stage in enumerate(s for s, r in enumerate(self.placement) if r == rank)
        }
        """The microbatches in flight on each stage, at most."""

    @staticmethod
    def of(block: Block) -> "RankBytes | None":
        """Return that of a block; None unless it is of a step that is to be in stages."""
        f = block.parent_op()
        pipeline = train.pipeline_of(f) if isinstance(f, FuncOp) else None
        loop = next((o for o in block.ops if isinstance(o, train.MicrobatchesOp)), None)
        if pipeline is None or loop is None:
            return None
        return RankBytes(block, named_or_smallest(pipeline, loop.runs)[1])

    def of_value(self, v: SSAValue, held: Iterable[LiveBytes]) -> Iterator[LiveBytes]:
        """Yield the bytes of a value on each rank that holds it."""
        known = {self.stages.get(use.operation) for use in v.uses}
        if isinstance(v.owner, Operation):
            known.add(self.stages.get(v.owner))
        stages = sorted(s for s in known if s is not None) or [0]
        for h in held:
            for rank in dict.fromkeys(self.placement[s] for s in stages):
                times = 1
                if v.owner in self.forward and h.span.end > self.backward:
                    times = max(self.counts[s] for s in stages if self.placement[s] == rank)
                yield self._on(rank, replace(h, bytes=times * h.bytes))

    def at_op(self, h: LiveBytes) -> LiveBytes:
        """Return bytes that are held while one op runs, on the rank of its stage."""
        return self._on(self.placement[self.stages.get(self.ops[h.span.start], 0)], h)

    def _on(self, rank: int, h: LiveBytes) -> LiveBytes:
        shift = rank * (len(self.ops) + 1)
        return replace(h, span=Span(h.span.start + shift, h.span.end + shift))
