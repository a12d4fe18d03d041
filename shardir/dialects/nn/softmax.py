"""Softmax and log-softmax along a dimension.

Along a split dimension they decompose into reductions, and partial maxima and sums are
communicated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementary import ExpOp, LogOp
from shardir.dialects.nn.properties import axis_of
from shardir.dialects.nn.selection import StopGradientOp
from shardir.dialects.nn.types import float_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


class _RowOp(TensorOp, ABC):
    """An op with operands and result of one shape, whose dimension `axis` is unsharded."""

    FLOPS: ClassVar[int] = 5
    PRECISION: ClassVar[str] = "wide"
    axis = prop_def(IntegerAttr.constr(type=i64))

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element = float_element(cls.name, operands)
        shape = operands[0].get_shape()
        axis_of(props, "axis", len(shape))
        for t in operands:
            if t.get_shape() != shape:
                raise ShardirError(
                    coded(
                        "T6",
                        f"expected operands of one shape, {list(shape)}, got {list(t.get_shape())}",
                    )
                )
        return [tensor(element, shape)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = results[0].get_shape()
        names = factor_names(len(shape))
        return Factors.of(
            [names] * len(operands), [names], [shape] * (len(operands) + 1),
            replicate=[names[axis_of(props, "axis", len(shape))]],
        )  # fmt: skip


class _RowGrad(_RowOp, ABC):
    """The cotangent of x, from the result y and its cotangent."""

    y = operand_def(TensorType)
    dy = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$y `,` $dy `axis` $axis {STRATEGY}"

    def sum(self, b: "OpBuilder", x: SSAValue) -> SSAValue:
        """The sum along the axis."""
        axis = axis_of(self.properties, "axis", len(unsharded_type(x).get_shape()))
        return b.reduce(x, "sum", [axis], keep=True)


class _SoftmaxForm(_RowOp, ABC):
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x `axis` $axis {STRATEGY}"
    GRAD: ClassVar[type[_RowGrad]]

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.value(self.GRAD, self.out, dy, props={"axis": self.axis}),)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        axis = axis_of(self.properties, "axis", len(unsharded_type(self.x).get_shape()))
        shifted, exps, total = shifted_exp(b, self.x, axis)
        return (self.finish(b, shifted, exps, total),)

    @abstractmethod
    def finish(
        self, b: "OpBuilder", shifted: SSAValue, exps: SSAValue, total: SSAValue
    ) -> SSAValue:
        """The result, from x - max, exp(x - max), and the sum of the exponentials."""


def shifted_exp(b: "OpBuilder", x: SSAValue, axis: int) -> tuple[SSAValue, SSAValue, SSAValue]:
    """x - max, exp(x - max), and the sum of the exponentials along `axis`.

    The maximum only prevents overflow: results do not depend on it, so it gets no gradient.
    """
    top = b.value(StopGradientOp, b.reduce(x, "max", [axis], keep=True))
    shifted = b.sub(x, top)
    exps = b.value(ExpOp, shifted)
    return shifted, exps, b.reduce(exps, "sum", [axis], keep=True)


def softmax(x: Array, axis: int) -> Array:
    """e^x over its sum along `axis`."""
    e = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    return e / e.sum(axis=axis, keepdims=True)


@op_definition
class SoftmaxGradOp(_RowGrad):
    """(dy - sum(y dy)) y"""

    name = "nn.softmax_grad"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        y, dy = arrays
        axis = axis_of(self.properties, "axis", y.ndim)
        return (dy - (y * dy).sum(axis=axis, keepdims=True)) * y

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        # out = y d - y sum(y d), where d is self.dy
        d_y = b.sub(b.mul(dy, self.dy), b.mul(dy, self.sum(b, b.mul(self.y, self.dy))))
        d_y = b.sub(d_y, b.mul(self.dy, self.sum(b, b.mul(dy, self.y))))
        return d_y, b.value(SoftmaxGradOp, self.y, dy, props={"axis": self.axis})

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        total = self.sum(b, b.mul(self.y, self.dy))
        return (b.mul(b.sub(self.dy, total), self.y),)


@op_definition
class SoftmaxOp(_SoftmaxForm):
    """e^x over its sum along `axis`"""

    name = "nn.softmax"
    GRAD: ClassVar[type[_RowGrad]] = SoftmaxGradOp

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return softmax(arrays[0], axis_of(self.properties, "axis", arrays[0].ndim))

    def finish(
        self, b: "OpBuilder", shifted: SSAValue, exps: SSAValue, total: SSAValue
    ) -> SSAValue:
        return b.div(exps, total)


@op_definition
class LogSoftmaxGradOp(_RowGrad):
    """dy - e^y sum(dy)"""

    name = "nn.log_softmax_grad"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        y, dy = arrays
        axis = axis_of(self.properties, "axis", y.ndim)
        return dy - np.exp(y) * dy.sum(axis=axis, keepdims=True)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        return (b.sub(self.dy, b.mul(b.value(ExpOp, self.y), self.sum(b, self.dy))),)


@op_definition
class LogSoftmaxOp(_SoftmaxForm):
    """The logarithm of softmax"""

    name = "nn.log_softmax"
    GRAD: ClassVar[type[_RowGrad]] = LogSoftmaxGradOp

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x = arrays[0]
        axis = axis_of(self.properties, "axis", x.ndim)
        z = x - x.max(axis=axis, keepdims=True, initial=-np.inf)
        return z - np.log(np.exp(z).sum(axis=axis, keepdims=True))

    def finish(
        self, b: "OpBuilder", shifted: SSAValue, exps: SSAValue, total: SSAValue
    ) -> SSAValue:
        return b.sub(shifted, b.value(LogOp, total))
