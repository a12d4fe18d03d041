"""The loop over equal blocks of a program, such as the layers of a model.

%h = train.carried %x                      the operand of the first block
train.repeat 3
%w = train.item %w0, %w1, %w2              the weight of each block
%y = nn.matmul %h, %w                      the ops of a block, written once
%ys:3 = train.items %y                     the values of all blocks, after the end
%h1 = train.carry %y, %h
train.end_repeat
"""

from collections.abc import Sequence
from typing import ClassVar

from xdsl.dialects.builtin import TensorType
from xdsl.irdl import operand_def, result_def, var_operand_def, var_result_def
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import HandsOn
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.train.loops import AfterLoop, EndLoop, Loop, loop_of


@op_definition
class EndRepeatOp(EndLoop):
    """The end of a repeated block"""

    name = "train.end_repeat"


@op_definition
class RepeatOp(Loop):
    """The beginning of a block that runs `count` times"""

    name = "train.repeat"
    END: ClassVar[type[EndLoop]] = EndRepeatOp


class OfEach(TensorOp, HandsOn):
    """An op between one value in the loop and a value of its type for each run."""

    INFERRED: ClassVar[bool] = False
    FLOPS: ClassVar[int] = 0

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = (*operands, *results)[0].get_shape()
        names = factor_names(len(shape))
        n, m = len(operands), len(results)
        return Factors.of([names] * n, [names] * m, [shape] * (n + m), linear="any")

    @classmethod
    def touched(cls, shapes: Sequence[Shape]) -> Sequence[int]:
        return [0] * len(shapes)

    def verify_each(self, values: int) -> None:
        """Raise VerifyException unless `values` is the number of runs, and all types are equal."""
        loop = loop_of(self)
        if not isinstance(loop, RepeatOp) or loop.runs != values:
            got = "none" if loop is None else f"{loop.name} {loop.runs}"
            message = f"expected train.repeat {values} around {self.name}, got {got}"
            raise VerifyException(coded("G12", message))
        types = list(dict.fromkeys(v.type for v in (*self.operands, *self.results)))
        if len(types) > 1:
            message = f"expected values of one type, got {types[0]} and {types[1]}"
            raise VerifyException(coded("T1", message))


@op_definition
class ItemOp(OfEach):
    """The value of the current run, among one value for each run"""

    name = "train.item"
    values = var_operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$values {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[device.run]

    def verify_(self) -> None:
        self.verify_each(len(self.values))


@op_definition
class ItemsOp(OfEach, AfterLoop):
    """The values of x in all runs, available after the last one"""

    name = "train.items"
    x = operand_def(TensorType)
    outs = var_result_def(TensorType)
    assembly_format = f"$x {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        return tuple(arrays) * len(self.outs)

    def verify_(self) -> None:
        self.verify_each(len(self.outs))
