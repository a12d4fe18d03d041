"""assign-stages: some ops of a pipelined step with a stage -> a stage of each op.

    train.step @step of @loss <sgd, lr = 0.1>
        accumulate <mean, microbatches = 4> pipeline <1f1b, ranks = 2>
    %h = nn.matmul %x, %w1                              {train.stage = 0}
    %a = nn.relu %h                                     {train.stage = 0}
    %y = nn.matmul %a, %w2 {train.stage = 1 : i64}  ->  {train.stage = 1}
    %l = nn.reduce <mean> %y dims <0, 1>                {train.stage = 1}

1. An op without a mark runs on the last of its operands' stages, so it is enough to mark the first
   ops of each stage. Those before all marks, which depend on an input and a parameter, are of
   stage 0.
2. An op that depends on parameters, inputs or constants alone runs on each stage that reads it.
3. Without any mark, the ops of 1 are split in the order of the program: the slowest stage is as
   fast as it can be, within 2%, by the seconds of each op on one device; of such splits the one
   that transfers the fewest bytes. Of more than 1,024 cuts those that the fewest bytes cross count.
4. An op whose operand is of a later stage, and a stage without ops, are errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import name_of, named
from shardir.cost.seconds import op_seconds
from shardir.diagnostics import Failure, Located, coded
from shardir.dialects import train
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import stage_attrs, stage_of
from shardir.rewriting.options import PassOptions
from shardir.rewriting.stages import complete, copy_to_readers, last
from shardir.search.stages import balanced


@dataclass(frozen=True)
class AssignStages(PassOptions):
    """Gives each op of a pipelined step a stage."""

    name = "assign-stages"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        errors: list[Located] = []
        for request in op.body.ops:
            if isinstance(request, train.StepOp) and request.pipeline is not None:
                errors += _assign(request.find(), request.pipeline.stages)
        if errors:
            raise Failure(errors)


def _assign(f: FuncOp, stages: int) -> list[Located]:
    """Give the ops of a function stages; return the errors."""
    ops = list(f.body.block.ops)[:-1]
    own = set(_of_model(f, ops))
    if not any(stage_of(op) is not None for op in ops):
        _split([op for op in ops if op in own], stages)
    errors = list(_later_operands(ops, stages))
    if errors:
        return errors
    first = next((i for i, op in enumerate(ops) if op in own), 0)
    for op in ops[first:]:
        if op in own and stage_of(op) is None and not any(map(_stage, op.operands)):
            op.attributes |= stage_attrs(0)
        complete([op], _stage, last)
    errors = list(_later_operands(ops, stages))
    copy_to_readers(ops)
    missing = sorted({*range(stages)} - {stage_of(op) for op in ops if op in own})
    if missing and not errors:
        found = f"expected ops of {stages} stages in @{name_of(f)}, got none of {missing}"
        errors.append((f, coded("G14", found, use="mark the first op of each stage")))
    return errors


def _stage(v: SSAValue) -> int | None:
    return stage_of(v.owner) if isinstance(v.owner, Operation) else None


def _of_model(f: FuncOp, ops: Sequence[Operation]) -> Iterator[Operation]:
    """Yield the ops that depend on an input and on a parameter."""
    roles = zip(f.body.block.args, train.arguments(f), strict=True)
    found: dict[SSAValue, set[train.Role]] = {v: {a.role} for v, a in roles}
    for op in ops:
        kinds = {kind for v in op.operands for kind in found.get(v, ())}
        found |= dict.fromkeys(op.results, kinds)
        if {train.Role.INPUT, train.Role.PARAMETER} <= kinds:
            yield op


def _later_operands(ops: Sequence[Operation], stages: int) -> Iterator[Located]:
    """Yield the errors of ops that read a value of a later stage, and of stages beyond the last."""
    for op in ops:
        if (stage := stage_of(op)) is None:
            continue
        if not 0 <= stage < stages:
            found = f"expected a stage from 0 to {stages - 1}, got {stage}"
            yield op, coded("G14", found, use="correct it, or use more ranks or chunks")
        for v in op.operands:
            if (before := _stage(v)) is not None and before > stage:
                found = (
                    f"expected {named(v)}, which is of stage {before}, to be of {stage} or before"
                )
                yield op, coded("G14", found)


def _split(ops: Sequence[Operation], stages: int) -> None:
    """Give ops of one device stages of about equal seconds."""
    mesh = Mesh("one", (("d", 1),))
    for stage, part in enumerate(balanced(ops, [_seconds(op, mesh) for op in ops], stages)):
        for op in part:
            op.attributes |= stage_attrs(stage)


def _seconds(op: Operation, mesh: Mesh) -> float:
    if not isinstance(op, TensorOp):
        return 0.0
    types = [unsharded_type(v) for v in (*op.operands, *op.results)]
    return op_seconds(type(op), op.factors(), {}, types, mesh)
