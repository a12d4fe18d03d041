"""The body of a step in stages: calls of the functions of its stages, and transfers of what they
make."""

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
    """The ops of a stage in a part, which become a function; `level`: the times that a value of the
    part has passed between stages before it."""

    part: str
    stage: int
    level: int
    ops: list[Operation] = field(default_factory=list)
    inputs: list[SSAValue] = field(default_factory=list)
    outputs: list[SSAValue] = field(default_factory=list)
    """The values that the ops read of others, and those that others read."""
    function: FuncOp | None = None


StageTransfers = dict[SSAValue, tuple[int, list[int]]]
"""Of values the stage that makes each, and the others that read it."""


class StepBody:
    """The body of a step in stages under construction."""

    def __init__(
        self, block: Block, transfers: StageTransfers, copies: Mapping[SSAValue, SSAValue]
    ):
        self.block, self.transfers, self.copies = block, transfers, copies
        self.values: dict[SSAValue, SSAValue] = {}
        """The values of the step that functions make: results of calls, or of transfers."""
        self.joined: dict[SSAValue, SSAValue] = {}
        """Those of them that a function makes for some microbatches."""

    def call(self, group: StageOps) -> None:
        """Call the function of a group, and transfer what it makes."""
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
                self.either(v, op)
            self.transfer(v)

    def either(self, v: SSAValue, call: CallOp) -> None:
        """Let a value, the result of a call, be what one of two functions makes."""
        op = train.EitherOp.create(operands=[self.joined[v], self.values[v]], result_types=[v.type])
        op.location, op.out.name_hint = call.location, v.name_hint
        self.block.add_op(op)
        self.values[v] = op.out

    def add(self, op: Operation) -> None:
        """Add an op that stays."""
        op.operands = [self.values.get(v, v) for v in op.operands]
        self.block.add_op(op)

    def transfer(self, v: SSAValue) -> None:
        """Transfer a value to the stages that read it, if others do."""
        if v not in self.transfers:
            return
        source, targets = self.transfers[v]
        made = self.values.get(v, v)
        op = train.TransferOp.create(
            operands=[made], result_types=[v.type],
            properties={"source": IntegerAttr(source, i64), "targets": dims_attr(*targets)},
        )  # fmt: skip
        if isinstance(made.owner, Operation):
            op.location = made.owner.location
        op.out.name_hint = v.name_hint
        self.block.add_op(op)
        self.values[v] = op.out
