"""Elementwise ops: numpy's broadcasting, every dimension splittable.

A dimension of size 1 that is repeated has no factor: it is whole on every device.
"""

import math
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    AnyFloat,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    TensorType,
    UnitAttr,
    f64,
    i1,
    i64,
)
from xdsl.ir import SSAValue
from xdsl.irdl import (
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import (
    STRATEGY,
    Array,
    Place,
    Props,
    TensorOp,
    Types,
    float_of,
    int_of,
    letters,
    needs_numbers,
    plain,
    same_element,
)
from shardir.dialects.nn.creation import ConstantOp, dense_values
from shardir.dialects.text import WordAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import Builder


LN_2 = math.log(2)

Function = Callable[..., Any]
"""Arrays in, an array out."""


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """The common shape of numpy's broadcasting.

    Raises:
        ShardirError: two sizes differ and neither is 1.
    """
    out: list[int] = []
    for i in range(max(map(len, shapes))):
        sizes = {s[-1 - i] for s in shapes if i < len(s)} - {1}
        if len(sizes) > 1:
            raise ShardirError(
                f"[T6] shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast: "
                f"sizes {' and '.join(map(str, sorted(sizes)))} in dimension {-1 - i}"
            )
        out.append(sizes.pop() if sizes else 1)
    return tuple(reversed(out))


class Elementwise(TensorOp, ABC):
    """One result element from the operands' elements at the same place."""

    LINEAR: ClassVar[str] = ""
    NUMPY: ClassVar[Function]
    """The meaning, where numpy has a function for it."""

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        """The result's element type."""
        return same_element(operands)

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = broadcast_shape([t.get_shape() for t in operands])
        return [tensor(cls.element(operands, props), shape)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = results[0].get_shape()
        names = letters(len(shape))
        dims = []
        for t in operands:
            mine = t.get_shape()
            tail = names[len(shape) - len(mine) :]
            whole = shape[len(shape) - len(mine) :]
            dims.append([f if n == m else "" for f, n, m in zip(tail, mine, whole, strict=True)])
        return Factors.of(
            dims, [names], [t.get_shape() for t in (*operands, *results)], linear=cls.LINEAR
        )

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return type(self).NUMPY(*arrays)

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """The operands' cotangents, before they are summed to the operands' shapes.

        Raises:
            ShardirError: the op has no gradient.
        """
        raise ShardirError(f"{self.name} has no gradient")

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        dy = cotangents[0]
        assert dy is not None
        found = zip(self.partials(b, dy), self.operands, strict=True)
        return [None if d is None else b.sum_to(d, v) for d, v in found]


def needs_float(op: str, operands: Types) -> Any:
    element = same_element(operands)
    if not isinstance(element, AnyFloat):
        raise ShardirError(f"[T5] {op} wants floats, not {element}; nn.convert it")
    return element


class Unary(Elementwise, ABC):
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x {STRATEGY}"


class Float(Elementwise, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return needs_float(cls.name, operands)


class FloatUnary(Float, Unary, ABC):
    pass


class Binary(Elementwise, ABC):
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$lhs `,` $rhs {STRATEGY}"


# ---- arithmetic ----


class Arithmetic(Elementwise, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return needs_numbers(cls.name, operands)


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


class Step(Elementwise, ABC):
    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return [None] * len(self.operands)


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


class FloatTest(Step, Unary, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        needs_float(cls.name, operands)
        return i1


@irdl_op_definition
class IsnanOp(FloatTest):
    """i1 elements: whether x is NaN"""

    name = "nn.isnan"
    NUMPY: ClassVar[Function] = np.isnan


@irdl_op_definition
class IsinfOp(FloatTest):
    """i1 elements: whether x is infinite"""

    name = "nn.isinf"
    NUMPY: ClassVar[Function] = np.isinf


@irdl_op_definition
class IsfiniteOp(FloatTest):
    """i1 elements: whether x is neither infinite nor NaN"""

    name = "nn.isfinite"
    NUMPY: ClassVar[Function] = np.isfinite


class Bitwise(Step, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        element = same_element(operands)
        if not isinstance(element, IntegerType):
            raise ShardirError(
                f"[T5] {cls.name} wants i1 or integers, not {element}; nn.compare gives i1"
            )
        return element


@irdl_op_definition
class AndOp(Bitwise, Binary):
    """x and y: of i1 whether both hold, of integers bit by bit"""

    name = "nn.and"
    NUMPY: ClassVar[Function] = np.bitwise_and


@irdl_op_definition
class OrOp(Bitwise, Binary):
    """x or y: of i1 whether one or both hold, of integers bit by bit"""

    name = "nn.or"
    NUMPY: ClassVar[Function] = np.bitwise_or


@irdl_op_definition
class XorOp(Bitwise, Binary):
    """x or y but not both: of i1, or of integers bit by bit"""

    name = "nn.xor"
    NUMPY: ClassVar[Function] = np.bitwise_xor


@irdl_op_definition
class NotOp(Bitwise, Unary):
    """Not x: of i1, or of integers bit by bit"""

    name = "nn.not"
    NUMPY: ClassVar[Function] = np.invert


# ---- bounds ----


@irdl_op_definition
class ClampOp(FloatUnary):
    """x brought into min to max; at the ends the cotangent still goes through."""

    name = "nn.clamp"
    min = opt_prop_def(FloatAttr.constr(type=f64))
    max = opt_prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x (`min` $min^)? (`max` $max^)? {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        if "min" not in props and "max" not in props:
            raise ShardirError("[T10] nn.clamp wants a min, a max, or both")
        return super().element(operands, props)

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        low, high = (None if p is None else p.value.data for p in (self.min, self.max))
        return np.clip(arrays[0], low, high)

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        for how, end in (("ge", self.min), ("le", self.max)):
            if end is not None:
                inside = b.compare(how, self.x, b.number(end.value.data, self.x))
                dy = b.select(inside, dy, b.number(0.0, dy))
        return (dy,)


@irdl_op_definition
class NanToNumOp(FloatUnary):
    """x, with these numbers in the place of NaN and the infinities."""

    name = "nn.nan_to_num"
    nan = prop_def(FloatAttr.constr(type=f64))
    posinf = prop_def(FloatAttr.constr(type=f64))
    neginf = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x `nan` $nan `posinf` $posinf `neginf` $neginf {STRATEGY}"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        nan, posinf, neginf = (float_of(self, n) for n in ("nan", "posinf", "neginf"))
        return np.nan_to_num(arrays[0], nan=nan, posinf=posinf, neginf=neginf)

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.select(b.value(IsfiniteOp, self.x), dy, b.number(0.0, dy)),)


# ---- by place: the part above or below a diagonal of the last two dimensions ----


class Triangle(Unary, ABC):
    LINEAR: ClassVar[str] = "any"
    diagonal = prop_def(IntegerAttr.constr(type=i64))
    assembly_format = f"$x `diagonal` $diagonal {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        if len(operands[0].get_shape()) < 2:
            raise ShardirError(f"[T4] {cls.name} wants two dimensions or more")
        return super().element(operands, props)

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        (x,) = arrays
        rows, columns = (
            place.start(self.x, d) + np.arange(x.shape[d]) for d in (x.ndim - 2, x.ndim - 1)
        )
        above = columns - rows[:, None] - int_of(self.properties, "diagonal")
        return np.where(type(self).NUMPY(above, 0), x, np.zeros((), x.dtype))

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.value(type(self), dy, props={"diagonal": self.diagonal}),)


@irdl_op_definition
class TrilOp(Triangle):
    """x on and below the diagonal (0: the main one, 1: the next above it), 0 elsewhere."""

    name = "nn.tril"
    NUMPY: ClassVar[Function] = np.less_equal


@irdl_op_definition
class TriuOp(Triangle):
    """x on and above the diagonal (0: the main one, 1: the next above it), 0 elsewhere."""

    name = "nn.triu"
    NUMPY: ClassVar[Function] = np.greater_equal


# ---- comparison, choice, type ----

COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@irdl_attr_definition
class ComparisonAttr(WordAttr):
    """`<eq>`, `<ne>`, `<lt>`, `<le>`, `<gt>` or `<ge>`."""

    name = "nn.comparison"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return tuple(COMPARISONS)


@irdl_op_definition
class CompareOp(Elementwise):
    """i1 elements: whether x stands in the relation to y."""

    name = "nn.compare"
    how = prop_def(ComparisonAttr)
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$how $lhs `,` $rhs {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        same_element(operands)
        return i1

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return COMPARISONS[self.how.data](arrays[0], arrays[1])

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return None, None


@irdl_op_definition
class SelectOp(Elementwise):
    """x where the condition holds, else y."""

    name = "nn.select"
    condition = operand_def(TensorType)
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$condition `,` $lhs `,` $rhs {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        if operands[0].element_type != i1:
            raise ShardirError(f"[T5] the condition is i1, not {operands[0].element_type}")
        return same_element(operands[1:])

    NUMPY: ClassVar[Function] = np.where

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        zero = b.number(0.0, dy)
        return None, b.select(self.condition, dy, zero), b.select(self.condition, zero, dy)


@irdl_op_definition
class ConvertOp(Unary):
    """The same numbers in the result's element type. `partial` passes a partial sum on, so that it
    is reduced in that type; without it the sum is reduced before."""

    name = "nn.convert"
    FLOPS: ClassVar[int] = 0
    partial = opt_prop_def(UnitAttr)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"(`partial` $partial^)? $x {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        raise ShardirError(f"{cls.name} states its result types")  # not that of its operand

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        if operands[0].get_shape() != results[0].get_shape():
            raise ShardirError("[T1] nn.convert keeps the shape")
        if "partial" in props:
            needs_float("nn.convert partial", operands)
            needs_float("nn.convert partial", results)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        factors = super().rule(operands, results, props)
        return replace(factors, linear="sum") if "partial" in props else factors

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[0]  # the interpreter brings every result to its type

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        element = plain(self.x).element_type
        if isinstance(element, IntegerType):
            return (None,)
        props = {"partial": self.partial} if self.partial is not None else {}
        type = tensor(element, plain(dy).get_shape())
        return (b.value(ConvertOp, dy, props=props, result=type),)


@irdl_op_definition
class StopGradientOp(Unary):
    """x, through which no cotangent goes."""

    name = "nn.stop_gradient"
    FLOPS: ClassVar[int] = 0
    LINEAR: ClassVar[str] = "any"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[0]

    def partials(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (None,)


OPS = [
    AddOp, SubOp, MulOp, DivOp, RemainderOp, PowOp, LerpOp, MaxOp, MinOp, NegOp, AbsOp, SignOp,
    ReciprocalOp, SquareOp, SqrtOp, RsqrtOp, ExpOp, Exp2Op, Expm1Op, LogOp, Log2Op, Log1pOp, SinOp,
    CosOp, TanOp, AtanOp, ErfOp, FloorOp, CeilOp, RoundOp, TruncOp, ClampOp, NanToNumOp, TrilOp,
    TriuOp, AndOp, OrOp, XorOp, NotOp, IsnanOp, IsinfOp, IsfiniteOp, CompareOp, SelectOp, ConvertOp,
    StopGradientOp,
]  # fmt: skip
ATTRS = [ComparisonAttr]
