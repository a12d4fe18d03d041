"""The loop over the microbatches of a training step or of a forward part alone.

train.microbatches 4                       the ops up to the end run four times
%x = train.microbatch %xs                  a slice of the batches: its index in dimension 0
%y = ...
%d = train.accumulate %d_k                 the sum over all microbatches, after the end
%ys = train.collect %y of 4                the values of all microbatches, in a new dimension 0
train.end_microbatches
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.irdl import operand_def, prop_def, result_def
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import WaitOp, is_started, tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementwise import Unary
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train.loops import AfterLoop, EndLoop, Loop, loop_of


@op_definition
class EndMicrobatchesOp(EndLoop):
    """The end of the ops that run once for each microbatch"""

    name = "train.end_microbatches"


@op_definition
class MicrobatchesOp(Loop):
    """The beginning of the ops that run once for each of `count` microbatches"""

    name = "train.microbatches"
    END: ClassVar[type[EndLoop]] = EndMicrobatchesOp

    def verify_(self) -> None:
        super().verify_()
        if loop_of(self) is not None:
            raise VerifyException(coded("G12", f"expected no loop around {self.name}, got one"))
        body = dict.fromkeys(self.body())
        for op in body:
            if isinstance(op, WaitOp) and op.started not in body:
                message = (
                    "expected dist.wait in the loop in which its collective starts, got another"
                )
                raise VerifyException(coded("G12", message))
            users = {use.operation for v in op.results for use in v.uses}
            if is_started(op) and not users <= body.keys():
                message = "expected dist.wait in the loop in which its collective starts, got none"
                raise VerifyException(coded("G12", message))


@op_definition
class MicrobatchOp(TensorOp):
    """The microbatch of the run: x at the index of the run in dimension 0"""

    name = "train.microbatch"
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = operands[0].get_shape()
        if not shape:
            message = "expected a dimension of microbatches, got a scalar"
            raise ShardirError(coded("T10", message, use="stack the microbatches in dimension 0"))
        return [tensor(operands[0].element_type, shape[1:])]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = operands[0].get_shape()
        names = factor_names(len(shape))
        return Factors.of(
            [names], [names[1:]], [shape, shape[1:]], replicate=names[:1], linear="any"
        )

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0][device.run]

    def verify_(self) -> None:
        super().verify_()
        loop, count = loop_of(self), unsharded_type(self.x).get_shape()[0]
        if not isinstance(loop, MicrobatchesOp) or loop.runs != count:
            got = "none" if loop is None else f"{loop.name} {loop.runs}"
            message = f"expected a loop over {count} microbatches around {self.name}, got {got}"
            raise VerifyException(coded("G12", message))


class OfMicrobatches(TensorOp, AfterLoop, ABC):
    """A value with a part from each microbatch, available after the last one."""

    x = operand_def(TensorType)
    out = result_def(TensorType)

    @abstractmethod
    def with_part(self, before: Array | None, x: Array, run: int) -> Array:
        """Return the value after a microbatch from the value before it; None before the first."""

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return self.with_part(None, arrays[0], device.run)

    def verify_(self) -> None:
        super().verify_()
        if not isinstance(loop_of(self), MicrobatchesOp):
            message = f"expected a loop over microbatches around {self.name}, got none"
            raise VerifyException(coded("G12", message))


@op_definition
class AccumulateOp(OfMicrobatches, Unary):
    """The sum over all microbatches, after the last"""

    name = "train.accumulate"
    LINEAR: ClassVar[str] = "sum"

    @classmethod
    def touched(cls, shapes: Sequence[Shape]) -> Sequence[int]:
        return [prod(shapes[0]), 2 * prod(shapes[1])]

    def with_part(self, before: Array | None, x: Array, run: int) -> Array:
        return x if before is None else before + x


@op_definition
class CollectOp(OfMicrobatches):
    """The values of all microbatches, in a new dimension 0, after the last"""

    name = "train.collect"
    FLOPS: ClassVar[int] = 0
    count = prop_def(IntegerAttr.constr(type=i64))
    assembly_format = f"$x `of` $count {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        count = props["count"]
        assert isinstance(count, IntegerAttr)
        shape = (count.value.data, *operands[0].get_shape())
        return [tensor(operands[0].element_type, shape)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = results[0].get_shape()
        names = factor_names(len(shape))
        return Factors.of(
            [names[1:]], [names], [shape[1:], shape], replicate=names[:1], linear="any"
        )

    @classmethod
    def touched(cls, shapes: Sequence[Shape]) -> Sequence[int]:
        return [prod(shapes[0]), prod(shapes[0])]

    def with_part(self, before: Array | None, x: Array, run: int) -> Array:
        collected = (
            np.zeros((self.count.value.data, *x.shape), x.dtype) if before is None else before
        )
        collected[run] = x
        return collected

    def verify_(self) -> None:
        super().verify_()
        loop, count = loop_of(self), self.count.value.data
        if isinstance(loop, MicrobatchesOp) and loop.runs != count:
            message = (
                f"expected {self.name} of the {loop.runs} microbatches of its loop, got {count}"
            )
            raise VerifyException(coded("G12", message, use=f"write of {loop.runs}"))
