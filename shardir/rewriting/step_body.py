"""The body of a step in stages: calls of the functions of its stages, and transfers of their
results."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from xdsl.dialects.builtin import IntegerAttr, i64
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.analysis.functions import name_of
from shardir.dialects import train
from shardir.dialects.nn.properties import dims_attr


@dataclass
class StageOps:
    """The ops of a stage in one part, which become a function.

    Attributes:
        level: the number of transfers between stages, in the part, before the ops.
        inputs: values that the ops read and do not make.
        outputs: values that the ops make and the rest of the step reads.
    """

    part: str
    stage: int
    level: int
    ops: list[Operation] = field(default_factory=list)
    inputs: list[SSAValue] = field(default_factory=list)
    outputs: list[SSAValue] = field(default_factory=list)
    function: FuncOp | None = None


StageTransfers = dict[SSAValue, tuple[int, list[int]]]
"""For each transferred value the stage that makes it, and the stages that read it."""


class StepBody:
    """The body of a step in stages under construction."""

    def __init__(
        self, block: Block, transfers: StageTransfers, copies: Mapping[SSAValue, SSAValue]
    ):
        self.block, self.transfers, self.copies = block, transfers, copies
        self.values: dict[SSAValue, SSAValue] = {}
        """The values of the step that functions make: results of calls, or of transfers."""
        self.joined: dict[SSAValue, SSAValue] = {}
        """Values that a function makes for some microbatches, and two functions for the remaining
        ones."""

    def call(self, group: StageOps) -> None:
        """Call the function of a group, and transfer its results."""
        assert group.function is not None
        operands = [self.values.get(v, v) for v in group.inputs]
        op = CallOp(name_of(group.function), operands, [v.type for v in group.outputs])
        op.location = group.function.location
        self.block.add_op(op)
        for v, result in zip(group.outputs, op.results, strict=True):
            result.name_hint = v.name_hint
            if v in self.copies:
                self.joined[self.copies[v]] = result
            else:
                self.values[v] = result
        for v in group.outputs:
            if v in self.joined:
                self.add_either(v, op)
            self.transfer(v)

    def add_either(self, v: SSAValue, call: CallOp) -> None:
        """Let a value be the result of whichever of two functions ran."""
        op = train.EitherOp.create(operands=[self.joined[v], self.values[v]], result_types=[v.type])
        op.location, op.out.name_hint = call.location, v.name_hint
        self.block.add_op(op)
        self.values[v] = op.out

    def add(self, op: Operation) -> None:
        """Add an op that stays in the step."""
        op.operands = [self.values.get(v, v) for v in op.operands]
        self.block.add_op(op)

    def transfer(self, v: SSAValue) -> None:
        """Transfer a value to the stages that read it, if there are any."""
        if v not in self.transfers:
            return
        source, targets = self.transfers[v]
        value = self.values.get(v, v)
        op = train.TransferOp.create(
            operands=[value], result_types=[v.type],
            properties={"source": IntegerAttr(source, i64), "targets": dims_attr(*targets)},
        )  # fmt: skip
        if isinstance(value.owner, Operation):
            op.location = value.owner.location
        op.out.name_hint = v.name_hint
        self.block.add_op(op)
        self.values[v] = op.out
