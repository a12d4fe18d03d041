"""Elementwise arithmetic: the operations, powers and logarithms, angles, rounding."""

import math
from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, result_def

from shardir.algebra.errors import ShardirError
from shardir.dialects.nn.base import STRATEGY, Array, Place
from shardir.dialects.nn.creation import ConstantOp, dense_values
from shardir.dialects.nn.elementwise import (
    Arithmetic,
    Binary,
    Float,
    FloatUnary,
    Function,
    Step,
    Unary,
)
from shardir.dialects.nn.logic import AndOp

if TYPE_CHECKING:
    from shardir.dialects.builder import Builder

LN_2 = math.log(2)


@irdl_op_definition
class AddOp(Arithmetic, Binary):
    """x + y"""

    name = "nn.add"
    LINEAR: ClassVar[str] = "sum"
    NUMPY: ClassVar[Function] = np.add

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return dy, dy


@irdl_op_definition
class SubOp(Arithmetic, Binary):
    """x - y"""

    name = "nn.sub"
    LINEAR: ClassVar[str] = "sum"
    NUMPY: ClassVar[Function] = np.subtract

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return dy, b.neg(dy)


@irdl_op_definition
class MulOp(Arithmetic, Binary):
    """x y"""

    name = "nn.mul"
    MULTILINEAR: ClassVar[bool] = True
    NUMPY: ClassVar[Function] = np.multiply

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return b.mul(dy, self.rhs), b.mul(dy, self.lhs)


@irdl_op_definition
class DivOp(Float, Binary):
    """x / y"""

    name = "nn.div"
    NUMPY: ClassVar[Function] = np.divide

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        dx = b.div(dy, self.rhs)
        return dx, b.neg(b.mul(dx, self.out))


class Extreme(Binary, ABC):
    """One of x and y; where they are equal, each gets half of the cotangent."""

    WORSE: ClassVar[tuple[str, str]]
    """How x stands to y where it is not the one, and where y is not."""

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        zero = b.number(0.0, dy)
        shared = b.select(b.compare("eq", self.lhs, self.rhs), b.scale(dy, 0.5), dy)
        return [b.select(b.compare(how, self.lhs, self.rhs), zero, shared) for how in self.WORSE]


@irdl_op_definition
class MaxOp(Extreme):
    """The greater of x and y; where they are equal, each gets half of the cotangent."""

    name = "nn.max"
    NUMPY: ClassVar[Function] = np.maximum
    WORSE: ClassVar[tuple[str, str]] = ("lt", "gt")


@irdl_op_definition
class MinOp(Extreme):
    """The lesser of x and y; where they are equal, each gets half of the cotangent."""

    name = "nn.min"
    NUMPY: ClassVar[Function] = np.minimum
    WORSE: ClassVar[tuple[str, str]] = ("gt", "lt")


@irdl_op_definition
class RemainderOp(Arithmetic, Binary):
    """x - floor(x / y) y: what division leaves over, with the sign of y"""

    name = "nn.remainder"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        x, y = arrays
        if y.dtype.kind == "i" and not y.all():
            raise ShardirError("an integer is divided by 0; there is no remainder")
        return np.remainder(x, y)

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        quotient = b.value(RoundOp, b.div(b.sub(self.lhs, self.out), self.rhs))
        return dy, b.neg(b.mul(dy, quotient))


@irdl_op_definition
class PowOp(Float, Binary):
    """x to the power of y"""

    name = "nn.pow"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.power

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """y x^(y - 1), which is 0 for y = 0 whatever x is; and x^y ln(x), which is 0 for x = 0 and
        y >= 0."""
        x, y, zero = self.lhs, self.rhs, b.number(0.0, dy)
        known = splat(y)
        if known is not None:
            slope = b.value(PowOp, x, b.number(known - 1, y))
            return (b.mul(dy, b.scale(slope, known)) if known else None), None
        power = b.mul(y, b.value(PowOp, x, b.sub(y, b.number(1.0, y))))
        dx = b.select(b.compare("eq", y, zero), zero, b.mul(dy, power))
        at_0 = b.compare("eq", x, zero)
        flat = b.value(AndOp, at_0, b.compare("ge", y, zero))
        return dx, b.select(flat, zero, b.mul(dy, b.mul(self.out, b.value(LogOp, x))))


def splat(v: SSAValue) -> float | None:
    """The number that a value has everywhere, where it is a constant."""
    if not isinstance(v.owner, ConstantOp) or not v.owner.value.is_splat():
        return None
    return float(dense_values(v.owner.value).flat[0])


@irdl_op_definition
class LerpOp(Float):
    """x + weight (y - x)"""

    name = "nn.lerp"
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    weight = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$lhs `,` $rhs `,` $weight {STRATEGY}"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        x, y, weight = arrays
        return x + weight * (y - x)

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        dz = b.mul(dy, self.weight)
        return b.sub(dy, dz), dz, b.mul(dy, b.sub(self.rhs, self.lhs))


@irdl_op_definition
class NegOp(Arithmetic, Unary):
    """-x"""

    name = "nn.neg"
    LINEAR: ClassVar[str] = "sum"
    NUMPY: ClassVar[Function] = np.negative

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.neg(dy),)


@irdl_op_definition
class ExpOp(FloatUnary):
    """e^x"""

    name = "nn.exp"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.exp

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, self.out),)


@irdl_op_definition
class LogOp(FloatUnary):
    """The natural logarithm"""

    name = "nn.log"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.log

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.div(dy, self.x),)


@irdl_op_definition
class SqrtOp(FloatUnary):
    """The square root"""

    name = "nn.sqrt"
    NUMPY: ClassVar[Function] = np.sqrt

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.scale(b.div(dy, self.out), 0.5),)


@irdl_op_definition
class RsqrtOp(FloatUnary):
    """1 / sqrt(x)"""

    name = "nn.rsqrt"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = lambda x: 1 / np.sqrt(x)

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        cube = b.mul(self.out, b.value(SquareOp, self.out))
        return (b.scale(b.mul(dy, cube), -0.5),)


@irdl_op_definition
class ReciprocalOp(FloatUnary):
    """1 / x"""

    name = "nn.reciprocal"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.reciprocal

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.neg(b.mul(dy, b.value(SquareOp, self.out))),)


@irdl_op_definition
class SquareOp(Arithmetic, Unary):
    """x x"""

    name = "nn.square"
    NUMPY: ClassVar[Function] = np.square

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, b.scale(self.x, 2.0)),)


@irdl_op_definition
class AbsOp(Arithmetic, Unary):
    """x without its sign; at 0 the derivative is 0"""

    name = "nn.abs"
    NUMPY: ClassVar[Function] = np.abs

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, b.value(SignOp, self.x)),)


@irdl_op_definition
class Exp2Op(FloatUnary):
    """2^x"""

    name = "nn.exp2"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.exp2

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.scale(b.mul(dy, self.out), LN_2),)


@irdl_op_definition
class Expm1Op(FloatUnary):
    """e^x - 1, precise near 0"""

    name = "nn.expm1"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.expm1

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, b.add(self.out, b.number(1.0, self.out))),)


@irdl_op_definition
class Log1pOp(FloatUnary):
    """ln(1 + x), precise near 0"""

    name = "nn.log1p"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.log1p

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.div(dy, b.add(self.x, b.number(1.0, self.x))),)


@irdl_op_definition
class Log2Op(FloatUnary):
    """The logarithm to base 2"""

    name = "nn.log2"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.log2

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.div(dy, b.scale(self.x, LN_2)),)


@irdl_op_definition
class SinOp(FloatUnary):
    """The sine"""

    name = "nn.sin"
    NUMPY: ClassVar[Function] = np.sin

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, b.value(CosOp, self.x)),)


@irdl_op_definition
class CosOp(FloatUnary):
    """The cosine"""

    name = "nn.cos"
    NUMPY: ClassVar[Function] = np.cos

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.neg(b.mul(dy, b.value(SinOp, self.x))),)


@irdl_op_definition
class TanOp(FloatUnary):
    """The tangent"""

    name = "nn.tan"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[Function] = np.tan

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.add(dy, b.mul(dy, b.value(SquareOp, self.out))),)


@irdl_op_definition
class AtanOp(FloatUnary):
    """The arc tangent"""

    name = "nn.atan"
    NUMPY: ClassVar[Function] = np.arctan

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        squared = b.value(SquareOp, self.x)
        return (b.div(dy, b.add(squared, b.number(1.0, squared))),)


def erf(x: Array) -> Array:
    """2 / sqrt(pi) times the integral of e^-t^2 from 0 to x; numpy has none."""
    return np.asarray(_erf(x), dtype=x.dtype)


_erf = np.vectorize(math.erf, otypes=[np.float64])


@irdl_op_definition
class ErfOp(FloatUnary):
    """The error function"""

    name = "nn.erf"
    NUMPY: ClassVar[Function] = erf

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        bell = b.value(ExpOp, b.neg(b.value(SquareOp, self.x)))
        return (b.scale(b.mul(dy, bell), 2 / math.sqrt(math.pi)),)


# ---- constant between jumps: no cotangent goes through ----


@irdl_op_definition
class SignOp(Arithmetic, Step, Unary):
    """-1, 0 or 1; 0 for NaN"""

    name = "nn.sign"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        (x,) = arrays
        return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


@irdl_op_definition
class FloorOp(Step, FloatUnary):
    """The greatest whole number that is not above x"""

    name = "nn.floor"
    NUMPY: ClassVar[Function] = np.floor


@irdl_op_definition
class CeilOp(Step, FloatUnary):
    """The least whole number that is not below x"""

    name = "nn.ceil"
    NUMPY: ClassVar[Function] = np.ceil


@irdl_op_definition
class RoundOp(Step, FloatUnary):
    """The nearest whole number; halves go to the even one"""

    name = "nn.round"
    NUMPY: ClassVar[Function] = np.rint


@irdl_op_definition
class TruncOp(Step, FloatUnary):
    """x without what is behind the point"""

    name = "nn.trunc"
    NUMPY: ClassVar[Function] = np.trunc
