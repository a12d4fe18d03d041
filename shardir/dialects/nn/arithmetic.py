"""Elementwise arithmetic: the operations, minimum and maximum, sign and rounding."""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, result_def

from shardir.diagnostics import ShardirError
from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, Types
from shardir.dialects.nn.elementwise import (
    Arithmetic,
    Binary,
    Float,
    FloatUnary,
    NumpyFunction,
    PiecewiseConstant,
    Unary,
)
from shardir.dialects.nn.types import integer_element

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


@op_definition
class AddOp(Arithmetic, Binary):
    """x + y"""

    name = "nn.add"
    LINEAR: ClassVar[str] = "sum"
    NUMPY: ClassVar[NumpyFunction] = np.add

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return dy, dy


@op_definition
class SubOp(Arithmetic, Binary):
    """x - y"""

    name = "nn.sub"
    LINEAR: ClassVar[str] = "sum"
    NUMPY: ClassVar[NumpyFunction] = np.subtract

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return dy, b.neg(dy)


@op_definition
class MulOp(Arithmetic, Binary):
    """x y"""

    name = "nn.mul"
    MULTILINEAR: ClassVar[bool] = True
    NUMPY: ClassVar[NumpyFunction] = np.multiply

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return b.mul(dy, self.rhs), b.mul(dy, self.lhs)


@op_definition
class DivOp(Float, Binary):
    """x / y"""

    name = "nn.div"
    NUMPY: ClassVar[NumpyFunction] = np.divide

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        # Not dy / y * out: dy / y overflows where out is 0 (as in torch).
        return b.div(dy, self.rhs), b.neg(b.mul(dy, b.div(self.out, self.rhs)))


class Extreme(Binary, ABC):
    """One of x and y; where they are equal, each gets half of the cotangent."""

    WORSE: ClassVar[tuple[str, str]]
    """The comparison of x with y if x is not selected, and if y is not."""

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        zero = b.scalar(0.0, dy)
        shared = b.select(b.compare("eq", self.lhs, self.rhs), b.scale(dy, 0.5), dy)
        return [b.select(b.compare(how, self.lhs, self.rhs), zero, shared) for how in self.WORSE]


@op_definition
class MaxOp(Extreme):
    """The greater of x and y; where they are equal, each gets half of the cotangent."""

    name = "nn.max"
    NUMPY: ClassVar[NumpyFunction] = np.maximum
    WORSE: ClassVar[tuple[str, str]] = ("lt", "gt")


@op_definition
class MinOp(Extreme):
    """The lesser of x and y; where they are equal, each gets half of the cotangent."""

    name = "nn.min"
    NUMPY: ClassVar[NumpyFunction] = np.minimum
    WORSE: ClassVar[tuple[str, str]] = ("gt", "lt")


@op_definition
class RemainderOp(Arithmetic, Binary):
    """x - floor(x / y) y: the remainder of a division, with the sign of y. The derivative by an
    infinite y or 0 is NaN; of integers, y = 0 is an error"""

    name = "nn.remainder"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, y = arrays
        if y.dtype.kind == "i" and not y.all():
            raise ShardirError("expected integer divisors other than 0, got 0; use floats")
        return np.remainder(x, y)

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        quotient = b.value(RoundOp, b.div(b.sub(self.lhs, self.out), self.rhs))
        return dy, b.neg(b.mul(dy, quotient))


@op_definition
class QuotientOp(PiecewiseConstant, Binary):
    """The quotient of integers, rounded towards 0; y = 0 is an error"""

    name = "nn.quotient"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return integer_element(cls.name, operands)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, y = arrays
        if not y.all():
            raise ShardirError("expected integer divisors other than 0, got 0; use floats")
        down = np.floor_divide(x, y)
        return down + ((down < 0) & (down * y != x))


@op_definition
class LerpOp(Float):
    """x + weight (y - x)"""

    name = "nn.lerp"
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    weight = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$lhs `,` $rhs `,` $weight {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, y, weight = arrays
        return x + weight * (y - x)

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        dz = b.mul(dy, self.weight)
        return b.sub(dy, dz), dz, b.mul(dy, b.sub(self.rhs, self.lhs))


@op_definition
class NegOp(Arithmetic, Unary):
    """-x"""

    name = "nn.neg"
    LINEAR: ClassVar[str] = "sum"
    NUMPY: ClassVar[NumpyFunction] = np.negative

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.neg(dy),)


@op_definition
class AbsOp(Arithmetic, Unary):
    """x without its sign; at 0 the derivative is 0"""

    name = "nn.abs"
    NUMPY: ClassVar[NumpyFunction] = np.abs

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, b.value(SignOp, self.x)),)


# ---- piecewise constant: the gradient is 0 ----


@op_definition
class SignOp(Arithmetic, PiecewiseConstant, Unary):
    """-1, 0 or 1; 0 for NaN"""

    name = "nn.sign"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        (x,) = arrays
        return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


@op_definition
class FloorOp(PiecewiseConstant, FloatUnary):
    """The largest integer that is at most x"""

    name = "nn.floor"
    NUMPY: ClassVar[NumpyFunction] = np.floor


@op_definition
class CeilOp(PiecewiseConstant, FloatUnary):
    """The smallest integer that is x or more"""

    name = "nn.ceil"
    NUMPY: ClassVar[NumpyFunction] = np.ceil


@op_definition
class RoundOp(PiecewiseConstant, FloatUnary):
    """The nearest integer; halves round to even"""

    name = "nn.round"
    NUMPY: ClassVar[NumpyFunction] = np.rint


@op_definition
class TruncOp(PiecewiseConstant, FloatUnary):
    """x rounded towards 0"""

    name = "nn.trunc"
    NUMPY: ClassVar[NumpyFunction] = np.trunc
