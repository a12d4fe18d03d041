"""Elementary functions of one element, and powers: exponentials, logarithms, roots, angles."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.ir import SSAValue

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.creation import ConstantOp, dense_values
from shardir.dialects.nn.elementwise import (
    Arithmetic,
    Binary,
    Float,
    FloatUnary,
    NumpyFunction,
    Unary,
)
from shardir.dialects.nn.logic import AndOp

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


LN_2 = math.log(2)


@op_definition
class PowOp(Float, Binary):
    """x to the power of y"""

    name = "nn.pow"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.power

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """y x^(y - 1), with 0 for y = 0 and any x; and x^y ln(x), with 0 for x = 0 and y >= 0."""
        x, y, zero = self.lhs, self.rhs, b.scalar(0.0, dy)
        exponent = splat(y)
        if exponent is not None:
            slope = b.value(PowOp, x, b.scalar(exponent - 1, y))
            return (b.mul(dy, b.scale(slope, exponent)) if exponent else None), None
        power = b.mul(y, b.value(PowOp, x, b.sub(y, b.scalar(1.0, y))))
        dx = b.select(b.compare("eq", y, zero), zero, b.mul(dy, power))
        at_0 = b.compare("eq", x, zero)
        flat = b.value(AndOp, at_0, b.compare("ge", y, zero))
        return dx, b.select(flat, zero, b.mul(dy, b.mul(self.out, b.value(LogOp, x))))


def splat(v: SSAValue) -> float | None:
    """The number of a constant value with equal elements; else None."""
    if isinstance(v.owner, ConstantOp) and len(v.owner.value) and v.owner.value.is_splat():
        return float(dense_values(v.owner.value).flat[0])
    return None


@op_definition
class ExpOp(FloatUnary):
    """e^x"""

    name = "nn.exp"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.exp

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, self.out),)


@op_definition
class LogOp(FloatUnary):
    """The natural logarithm"""

    name = "nn.log"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.log

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.div(dy, self.x),)


@op_definition
class SqrtOp(FloatUnary):
    """The square root"""

    name = "nn.sqrt"
    NUMPY: ClassVar[NumpyFunction] = np.sqrt

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.scale(b.div(dy, self.out), 0.5),)


@op_definition
class RsqrtOp(FloatUnary):
    """1 / sqrt(x)"""

    name = "nn.rsqrt"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = lambda x: 1 / np.sqrt(x)

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        cube = b.mul(self.out, b.value(SquareOp, self.out))
        return (b.scale(b.mul(dy, cube), -0.5),)


@op_definition
class ReciprocalOp(FloatUnary):
    """1 / x"""

    name = "nn.reciprocal"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.reciprocal

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.neg(b.mul(dy, b.value(SquareOp, self.out))),)


@op_definition
class SquareOp(Arithmetic, Unary):
    """x x"""

    name = "nn.square"
    NUMPY: ClassVar[NumpyFunction] = np.square

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, b.scale(self.x, 2.0)),)


@op_definition
class Exp2Op(FloatUnary):
    """2^x"""

    name = "nn.exp2"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.exp2

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.scale(b.mul(dy, self.out), LN_2),)


@op_definition
class Expm1Op(FloatUnary):
    """e^x - 1, precise near 0"""

    name = "nn.expm1"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.expm1

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, b.add(self.out, b.scalar(1.0, self.out))),)


@op_definition
class Log1pOp(FloatUnary):
    """ln(1 + x), precise near 0"""

    name = "nn.log1p"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.log1p

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.div(dy, b.add(self.x, b.scalar(1.0, self.x))),)


@op_definition
class Log2Op(FloatUnary):
    """The logarithm to base 2"""

    name = "nn.log2"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.log2

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.div(dy, b.scale(self.x, LN_2)),)


@op_definition
class SinOp(FloatUnary):
    """The sine"""

    name = "nn.sin"
    NUMPY: ClassVar[NumpyFunction] = np.sin

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.mul(dy, b.value(CosOp, self.x)),)


@op_definition
class CosOp(FloatUnary):
    """The cosine"""

    name = "nn.cos"
    NUMPY: ClassVar[NumpyFunction] = np.cos

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.neg(b.mul(dy, b.value(SinOp, self.x))),)


@op_definition
class TanOp(FloatUnary):
    """The tangent"""

    name = "nn.tan"
    PRECISION: ClassVar[str] = "wide"
    NUMPY: ClassVar[NumpyFunction] = np.tan

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.add(dy, b.mul(dy, b.value(SquareOp, self.out))),)


@op_definition
class AtanOp(FloatUnary):
    """The arc tangent"""

    name = "nn.atan"
    NUMPY: ClassVar[NumpyFunction] = np.arctan

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        squared = b.value(SquareOp, self.x)
        return (b.div(dy, b.add(squared, b.scalar(1.0, squared))),)


def erf(x: Array) -> Array:
    """The error function, 2 / sqrt(pi) times the integral of e^-t^2 from 0 to x; numpy lacks it."""
    return np.asarray(_erf(x), dtype=x.dtype)


_erf = np.vectorize(math.erf, otypes=[np.float64])


def erfc(x: Array) -> Array:
    """1 - erf(x), precise where it is small."""
    return np.asarray(_erfc(x), dtype=x.dtype)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@op_definition
class ErfcOp(FloatUnary):
    """1 - erf(x), precise where it is small"""

    name = "nn.erfc"
    NUMPY: ClassVar[NumpyFunction] = erfc

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        bell = b.value(ExpOp, b.neg(b.value(SquareOp, self.x)))
        return (b.scale(b.mul(dy, bell), -2 / math.sqrt(math.pi)),)


@op_definition
class ErfOp(FloatUnary):
    """The error function"""

    name = "nn.erf"
    NUMPY: ClassVar[NumpyFunction] = erf

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        bell = b.value(ExpOp, b.neg(b.value(SquareOp, self.x)))
        return (b.scale(b.mul(dy, bell), 2 / math.sqrt(math.pi)),)
