"""Stages of a pipelined step: the stage of each op, and the transfers of values between stages.

    train.step @step of @loss <adamw, lr = 0.001>
        accumulate <mean, microbatches = 8> pipeline <1f1b, ranks = 4>

    %h = nn.matmul %x, %w {train.stage = 0 : i64}
    %h_1 = train.transfer %h from 0 to <1>                 %h, on stage 1 too
    %y = nn.relu %h_1 {train.stage = 1 : i64}

`assign-stages` gives each op of the function a stage, derived from the marked ops; an op of the
backward part gets the stage of the op that it transposes. `split-stages` makes functions of the ops
of each stage, and writes the schedule on the step: a line for each rank, in torch's grammar.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, StringAttr, TensorType, i64
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import irdl_attr_definition, operand_def, prop_def, result_def
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.notation import NamedOptions, parse_options
from shardir.algebra.schedules import NAMES, Schedule
from shardir.diagnostics import NotationError, coded, did_you_mean
from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device
from shardir.dialects.nn.elementwise import Binary, Unary
from shardir.dialects.nn.properties import DimsAttr
from shardir.dialects.symbols import find_symbol
from shardir.dialects.text import Kinds, OptionsAttr, OptionSpec, complete

STAGE, ACTION = "train.stage", "train.action"
PIPELINE, SCHEDULE = "train.pipeline", "train.schedule"
SEARCH = "search"
"""The name that requests a search for a schedule."""
STAGE_AXIS = "stage"
"""The mesh axis of the pipeline's ranks."""


@irdl_attr_definition
class PipelineAttr(OptionsAttr):
    """The schedule of a pipelined step (its name, or `search`), the number of ranks of the
    pipeline, and the number of stages on each rank."""

    name = "train.pipeline"
    OPTIONS: ClassVar[Kinds] = {
        "schedule": {
            "ranks": OptionSpec(int, minimum=1), "chunks": OptionSpec(int, 1, minimum=1),
        },
    }  # fmt: skip

    @classmethod
    def from_text(cls, text: str) -> NamedOptions:
        schedule, comma, options = text.partition(",")
        known = (*NAMES, SEARCH)
        if (name := schedule.strip()) not in known:
            hint = did_you_mean(name, known) or f"; use {', '.join(known)}"
            raise NotationError(f"expected the name of a schedule, got {name!r}{hint}")
        try:
            text = f"schedule{comma}{options}"
            _, pairs = complete(cls.name, cls.OPTIONS, parse_options(text), text)
        except NotationError as e:
            offset = e.offset + len(schedule) - len("schedule")
            raise NotationError(e.message, max(offset, 0)) from None
        return name, pairs

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.values["ranks"] * self.values["chunks"]


@op_definition
class TransferOp(Unary):
    """x, on the stages `to` as well as on its own stage"""

    name = "train.transfer"
    LINEAR: ClassVar[str] = "any"
    FLOPS: ClassVar[int] = 0
    x = operand_def(TensorType)
    source = prop_def(IntegerAttr.constr(type=i64))
    targets = prop_def(DimsAttr)
    out = result_def(TensorType)
    assembly_format = f"$x `from` $source `to` $targets {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0]

    def verify_(self) -> None:
        super().verify_()
        source, targets = self.source.value.data, self.targets.data
        if min(source, *targets) < 0 or source in targets or not targets:
            raise VerifyException(
                coded(
                    "G14",
                    f"expected a transfer to other stages than {source}, got {list(targets)}",
                    use="name the stages that read the value",
                )
            )


@op_definition
class EitherOp(Binary):
    """x for microbatches whose backward part is the action B, y for those with the actions I and
    W"""

    name = "train.either"
    LINEAR: ClassVar[str] = "sum"
    FLOPS: ClassVar[int] = 0
    assembly_format = f"$lhs `or` $rhs {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, y = arrays
        same = np.array_equal(x, y, equal_nan=True)
        return x if same else x + np.nan  # one of the two functions is wrong


def stage_of(op: Operation) -> int | None:
    """The stage of an op or a function, or None."""
    return stage_in(op.attributes)


def stage_in(attributes: Mapping[str, Attribute]) -> int | None:
    """The stage in the attributes of an op, or None."""
    stage = attributes.get(STAGE)
    return stage.value.data if isinstance(stage, IntegerAttr) else None


def stage_attrs(stage: int | None) -> dict[str, Attribute]:
    """The attributes of an op of a stage."""
    return {} if stage is None else {STAGE: IntegerAttr(stage, i64)}


def action_of(f: FuncOp) -> str | None:
    """The action of a schedule that runs a stage's function: F, B, I or W; None for a function that
    runs before or after the loop over the microbatches."""
    action = f.attributes.get(ACTION)
    return action.data if isinstance(action, StringAttr) else None


def action_attrs(action: str | None) -> dict[str, Attribute]:
    """The attributes of a function that an action runs."""
    return {} if action is None else {ACTION: StringAttr(action)}


def callee_of(op: CallOp) -> FuncOp | None:
    """The stage's function that a call in a step runs; None if the module has no such function."""
    parent = op.parent_op()
    module = None if parent is None else parent.parent_op()
    callee = None if module is None else find_symbol(module, FuncOp, op.callee.string_value())
    return callee if callee is not None and stage_of(callee) is not None else None


def pipeline_of(f: FuncOp) -> PipelineAttr | None:
    """The requested pipeline of a step; `split-stages` removes it."""
    pipeline = f.attributes.get(PIPELINE)
    return pipeline if isinstance(pipeline, PipelineAttr) else None


def schedule_of(f: FuncOp) -> str | None:
    """The schedule of a step in stages: the actions of one rank per line; None without one."""
    lines = f.attributes.get(SCHEDULE)
    if not isinstance(lines, ArrayAttr):
        return None
    return "\n".join(line.data for line in lines if isinstance(line, StringAttr))


def set_schedule(f: FuncOp, schedule: Schedule) -> None:
    f.attributes[SCHEDULE] = ArrayAttr(StringAttr(line) for line in str(schedule).splitlines())


def check_stages(f: FuncOp) -> None:
    """Raises VerifyException if a stage of a step reads a value that it does not have, or a value
    is transferred twice."""
    if SCHEDULE not in f.attributes:
        return
    places: dict[SSAValue, set[int]] = {}
    sent: set[SSAValue] = set()
    for op in f.body.block.ops:
        if isinstance(op, TransferOp):
            stages = places.get(op.x, set())
            if (source := op.source.value.data) not in stages:
                raise VerifyException(_unknown(op.x, source, stages))
            if op.x in sent:
                message = f"expected one transfer of %{op.x.name_hint}, got another"
                raise VerifyException(coded("G14", message, use="name all stages in the first one"))
            places[op.out] = {*stages, *op.targets.data}
            sent |= {op.x, op.out}
        elif isinstance(op, CallOp):
            if (callee := callee_of(op)) is None or (stage := stage_of(callee)) is None:
                continue
            for v in op.operands:
                if stage not in places.get(v, {stage}):
                    raise VerifyException(_unknown(v, stage, places[v]))
            places |= {v: {stage} for v in op.results}
        elif isinstance(op, EitherOp):
            x_stages, y_stages = (places.get(v, set()) for v in op.operands)
            if x_stages != y_stages or len(x_stages) != 1:
                message = (
                    f"expected two results of functions of a stage, got {x_stages} and {y_stages}"
                )
                raise VerifyException(coded("G14", message))
            places[op.out] = x_stages
        elif len(op.operands) == 1 and (v := op.operands[0]) in places:
            maker = v.owner  # a sum is on the stage of its addends
            stages = {maker.source.value.data} if isinstance(maker, TransferOp) else places[v]
            places |= {v: stages for v in op.results}


def _unknown(v: SSAValue, stage: int, known: Iterable[int]) -> str:
    stages = ", ".join(map(str, sorted(known))) or "none"
    message = f"expected %{v.name_hint} on stage {stage}, which reads it, got it on {stages}"
    return coded("G14", message, use="transfer it")
