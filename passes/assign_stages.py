"""assign-stages: some ops of a function in stages are marked -> each op has a stage.

    train.step @step of @loss <sgd, lr = 0.1>
        accumulate <mean, microbatches = 4> pipeline <1f1b, ranks = 2>
    %h = nn.matmul %x, %w1                              {train.stage = 0}
    %a = nn.relu %h                                     {train.stage = 0}
    %y = nn.matmul %a, %w2 {train.stage = 1 : i64}  ->  {train.stage = 1}
    %l = nn.reduce <mean> %y dims <0, 1>                {train.stage = 1}

A `train.step` or a `train.forward` with a pipeline requests the function.

1. An op without a mark runs on the last of its operands' stages, so it is enough to mark the first
   ops of each stage. Ops before all marks that depend on an input and a parameter are of stage 0.
2. An op that depends on parameters, inputs or constants alone runs on each stage that reads it.
3. Without any mark, the ops of rule 1 are split in the order of the program. The slowest stage is
   as fast as possible, within 2%; among such splits, the fewest bytes are transferred. The seconds
   cover the forward and the backward part, with propagated layouts or, with `search`, layouts of a
   short search. Cuts are between repeated blocks and around them, if there are enough; otherwise
   anywhere. At most 1,024 cuts are considered (96 or less with several stages on each rank),
   crossed by the fewest bytes.
4. Where a schedule is searched for and ranks have several stages, splits with shorter first stages
   are tried too, each with a short search (shardir/search/stages/chunk_shares.py).
5. In such a split each rank keeps to the memory of a device: the bytes that its stages hold
   throughout, and the bytes of a microbatch times the microbatches in flight there. For a searched
   schedule, that number is taken from the named schedule with the fewest in flight.
6. An op whose operand is of a later stage, and a stage without ops, are errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Schedule, schedule
from shardir.analysis.functions import mesh_of, name_of, named
from shardir.analysis.in_flight import in_flight, named_or_smallest
from shardir.diagnostics import Failure, Located, ShardirError, coded
from shardir.dialects import train
from shardir.dialects.blocks import ops_of
from shardir.dialects.train import stage_attrs, stage_of
from shardir.rewriting.options import Bytes, PassOptions
from shardir.rewriting.stages import assign_unmarked, clone_into_readers, last_stage, ops_of_model
from shardir.search.stages.chunk_shares import searched_split
from shardir.search.stages.stage_costs import UNLIMITED, UnitCosts, costs_in_memory, unit_costs
from shardir.search.stages.stages import Segments, StageSplit, candidate_cuts, split

StagedRequest = train.StepOp | train.ForwardOp
"""The requests whose ops may have stages."""


@dataclass(frozen=True)
class AssignStages(PassOptions):
    """Gives a stage to each op of a step in stages, or of a forward part alone."""

    name = "assign-stages"
    search: bool = False
    """Whether layouts are decided by a search, not by propagation."""
    schedule: str = ""
    """The file with the order of each rank, as of split-stages."""
    memory: Bytes = 0
    """The memory of a device in bytes; 0: of the cluster's devices, if known."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        errors: list[Located] = []
        for request in op.body.ops:
            if isinstance(request, StagedRequest) and request.pipeline is not None:
                f = request.find()
                ops = ops_of(f.body.block)[:-1]
                own = list(ops_of_model(f))
                if len(own) >= request.pipeline.stages and not any(
                    stage_of(op) is not None for op in ops
                ):
                    self.split(op, request, f, own)
                errors += _assign_unmarked(f, own, request.pipeline.stages)
        if errors:
            raise Failure(errors)

    def split(
        self, module: ModuleOp, request: StagedRequest, f: FuncOp, ops: Sequence[Operation]
    ) -> None:
        """Give the ops of a model the stages of the best split.

        Raises:
            Failure: no split keeps to the memory, or the step can't be lowered.
        """
        schedule = self.schedule_of(request)
        assert request.pipeline is not None
        stages, chunks = request.pipeline.stages, request.pipeline.values["chunks"]
        name, cuts = request.sym_name.data, candidate_cuts(ops, stages, chunks)
        mesh = mesh_of(f, module) or Mesh("one", (("d", 1),))
        limit = self.memory or mesh.cluster_or_default.memory or inf

        def costs(memory: int) -> UnitCosts:
            return unit_costs(module, f, name, ops, self.search, memory)[0]

        is_searched = request.pipeline.kind == train.SEARCH and not self.schedule

        def split_by(costs: UnitCosts) -> StageSplit:
            if is_searched and isinstance(request, train.StepOp):
                return searched_split(costs, mesh, cuts, schedule, limit)
            segments = Segments.of(costs, cuts)
            return split(segments, schedule.placement, in_flight(schedule), limit)

        if self.search:
            best = split_by(costs_in_memory(costs, lambda c: split_by(c).need, limit))
        else:
            best = split_by(costs(UNLIMITED))
        if best.cuts is None:
            message = (
                f"expected stages within {limit} B on a device, got {best.need:.0f} B in the "
                "smallest split found; use more ranks or devices, more and smaller microbatches, "
                "or a schedule with fewer of them in flight"
            )
            raise Failure([(request, message)])
        for stage, (begin, end) in enumerate(pairwise(cuts[i] for i in best.cuts)):
            for op in ops[begin:end]:
                op.attributes |= stage_attrs(stage)

    def schedule_of(self, request: StagedRequest) -> Schedule:
        """Return the schedule of a request, or the named one with the fewest microbatches in
        flight. A forward part alone holds no microbatches in flight, so any schedule serves.

        Raises:
            Failure: no schedule has these numbers.
        """
        assert request.pipeline is not None
        try:
            if self.schedule:
                return Schedule.parse(Path(self.schedule).read_text(encoding="utf-8"))
            if isinstance(request, train.ForwardOp) and request.pipeline.kind == train.SEARCH:
                numbers = request.pipeline.values
                sizes = numbers["ranks"], request.microbatches, numbers["chunks"]
                return schedule("looped-bfs", *sizes)
            return named_or_smallest(request.pipeline, request.microbatches)[1]
        except ShardirError as e:
            raise Failure([(request, str(e))]) from None


def _assign_unmarked(f: FuncOp, of_model: Sequence[Operation], stages: int) -> list[Located]:
    """Give stages to the unmarked ops of a function; return the errors."""
    ops = ops_of(f.body.block)[:-1]
    own = {*of_model}
    errors = list(_later_operands(ops, stages))
    if errors:
        return errors
    first = next((i for i, op in enumerate(ops) if op in own), 0)
    for op in ops[first:]:
        if op in own and stage_of(op) is None and not any(map(_stage, op.operands)):
            op.attributes |= stage_attrs(0)
        assign_unmarked([op], _stage, last_stage)
    errors = list(_later_operands(ops, stages))
    clone_into_readers(ops)
    missing = sorted({*range(stages)} - {stage_of(op) for op in ops if op in own})
    if missing and not errors:
        message = f"expected ops of {stages} stages in @{name_of(f)}, got none of {missing}"
        errors.append((f, coded("G14", message, use="mark the first op of each stage")))
    return errors


def _stage(v: SSAValue) -> int | None:
    return stage_of(v.owner) if isinstance(v.owner, Operation) else None


def _later_operands(ops: Sequence[Operation], stages: int) -> Iterator[Located]:
    """Yield an error for each op that reads a value of a later stage, and for each stage out of
    range."""
    for op in ops:
        if (stage := stage_of(op)) is None:
            continue
        if not 0 <= stage < stages:
            message = f"expected a stage from 0 to {stages - 1}, got {stage}"
            yield op, coded("G14", message, use="correct it, or use more ranks or chunks")
        for v in op.operands:
            if (before := _stage(v)) is not None and before > stage:
                message = (
                    f"expected {named(v)}, which is of stage {before}, to be of {stage} or before"
                )
                yield op, coded("G14", message)
