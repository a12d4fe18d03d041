"""Elementwise ops that select elements by a condition, by bounds or by position; and ops that keep
all elements, but convert the type or stop the gradient."""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
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
from xdsl.irdl import operand_def, opt_prop_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, Types
from shardir.dialects.nn.elementwise import (
    Elementwise,
    Float,
    FloatUnary,
    NumpyFunction,
    PiecewiseConstant,
    Unary,
)
from shardir.dialects.nn.logic import IsfiniteOp
from shardir.dialects.nn.properties import float_of, int_of
from shardir.dialects.nn.types import element_name, float_element, same_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


@op_definition
class SelectOp(Elementwise):
    """x where the condition holds, else y."""

    name = "nn.select"
    condition = operand_def(TensorType)
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    out = result_def(TensorType)
    NUMPY: ClassVar[NumpyFunction] = np.where
    assembly_format = f"$condition `,` $lhs `,` $rhs {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        if operands[0].element_type != i1:
            raise ShardirError(
                coded("T5", f"expected a condition of i1, got {operands[0].element_type}")
            )
        return same_element(operands[1:])

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        zero = b.scalar(0.0, dy)
        return None, b.select(self.condition, dy, zero), b.select(self.condition, zero, dy)


@op_definition
class ClampOp(FloatUnary):
    """x clamped to min and max; the gradient passes at the bounds."""

    name = "nn.clamp"
    min = opt_prop_def(FloatAttr.constr(type=f64))
    max = opt_prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x (`min` $min^)? (`max` $max^)? {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        if "min" not in props and "max" not in props:
            raise ShardirError(coded("T10", "expected min, max, or both, got neither"))
        return super().element(operands, props)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        low, high = (None if p is None else p.value.data for p in (self.min, self.max))
        return np.clip(arrays[0], low, high)

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        for how, end in (("ge", self.min), ("le", self.max)):
            if end is not None:
                inside = b.compare(how, self.x, b.scalar(end.value.data, self.x))
                dy = b.select(inside, dy, b.scalar(0.0, dy))
        return (dy,)


@op_definition
class NanToNumOp(FloatUnary):
    """x, with NaN and the infinities replaced."""

    name = "nn.nan_to_num"
    nan = prop_def(FloatAttr.constr(type=f64))
    posinf = prop_def(FloatAttr.constr(type=f64))
    neginf = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x `nan` $nan `posinf` $posinf `neginf` $neginf {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        nan, posinf, neginf = (float_of(self, n) for n in ("nan", "posinf", "neginf"))
        return np.nan_to_num(arrays[0], nan=nan, posinf=posinf, neginf=neginf)

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.select(b.value(IsfiniteOp, self.x), dy, b.scalar(0.0, dy)),)


# ---- by position: the part above or below a diagonal of the last two dimensions ----


class Triangle(Unary, ABC):
    LINEAR: ClassVar[str] = "any"
    diagonal = prop_def(IntegerAttr.constr(type=i64))
    assembly_format = f"$x `diagonal` $diagonal {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        if len(operands[0].get_shape()) < 2:
            raise ShardirError(
                coded(
                    "T4",
                    f"expected at least two dimensions, got {list(operands[0].get_shape())}",
                    use="nn.reshape it",
                )
            )
        return super().element(operands, props)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        (x,) = arrays
        rows, columns = (
            device.start(self.x, d) + np.arange(x.shape[d]) for d in (x.ndim - 2, x.ndim - 1)
        )
        above = columns - rows[:, None] - int_of(self.properties, "diagonal")
        return np.where(type(self).NUMPY(above, 0), x, np.zeros((), x.dtype))

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.value(type(self), dy, props={"diagonal": self.diagonal}),)


@op_definition
class TrilOp(Triangle):
    """x on and below the diagonal (0: main diagonal, 1: the next above it), 0 elsewhere."""

    name = "nn.tril"
    NUMPY: ClassVar[NumpyFunction] = np.less_equal


@op_definition
class TriuOp(Triangle):
    """x on and above the diagonal (0: main diagonal, 1: the next above it), 0 elsewhere."""

    name = "nn.triu"
    NUMPY: ClassVar[NumpyFunction] = np.greater_equal


# ---- all elements ----


BITS: Mapping[str, tuple[str, type, type]] = {
    "f64": ("i64", np.float64, np.int64),
    "f32": ("i32", np.float32, np.int32),
    "f16": ("i32", np.float16, np.uint16),
    "bf16": ("i32", np.float32, np.uint32),
}
"""Of each float type, the integers that have its bits, and both in numpy. bf16 is the upper half of
f32."""


@op_definition
class BitcastOp(PiecewiseConstant, Unary):
    """The bits of floats as integers of the result's element type, or integers' bits as floats: f64
    and i64, f32 and i32; those of f16 and bf16 are the lower half of an i32, whose upper half is
    0."""

    name = "nn.bitcast"
    FLOPS: ClassVar[int] = 0
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$x {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        raise ShardirError(f"expected explicit result types of {cls.name}, got none")

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        x, out = operands[0], results[0]
        if x.get_shape() != out.get_shape():
            message = f"expected a result of shape {list(x.get_shape())}, got {out}"
            raise ShardirError(coded("T1", message))
        names = [element_name(t.element_type) for t in (x, out)]
        if not any(BITS.get(a, ("",))[0] == b for a, b in (names, names[::-1])):
            message = f"expected floats and integers of as many bits, got {names[0]} and {names[1]}"
            raise ShardirError(coded("T5", message))

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        source, target = (element_name(unsharded_type(v).element_type) for v in (self.x, self.out))
        half = 16 if "bf16" in (source, target) else 0
        if source in BITS:
            _, kind, bits = BITS[source]
            return (np.ascontiguousarray(arrays[0], kind).view(bits) >> half).reshape(
                arrays[0].shape
            )
        _, kind, bits = BITS[target]
        return (arrays[0].astype(bits) << half).astype(bits).view(kind)


@op_definition
class ConvertOp(Unary):
    """x in the result's element type. With `partial` a partial sum stays partial, and is reduced in
    the new type; without it the sum is reduced first."""

    name = "nn.convert"
    FLOPS: ClassVar[int] = 0
    partial = opt_prop_def(UnitAttr)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"(`partial` $partial^)? $x {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        raise ShardirError(f"expected explicit result types of {cls.name}, got none")

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        if operands[0].get_shape() != results[0].get_shape():
            raise ShardirError(
                coded(
                    "T1",
                    f"expected a result of shape {list(operands[0].get_shape())}, got "
                    f"{list(results[0].get_shape())}",
                )
            )
        if "partial" in props:
            float_element("nn.convert partial", operands)
            float_element("nn.convert partial", results)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        factors = super().rule(operands, results, props)
        return replace(factors, linear="sum") if "partial" in props else factors

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0]  # the interpreter converts every result to its type

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        element = unsharded_type(self.x).element_type
        if isinstance(element, IntegerType):
            return (None,)
        props = {"partial": self.partial} if self.partial is not None else {}
        type = tensor(element, unsharded_type(dy).get_shape())
        return (b.value(ConvertOp, dy, props=props, result=type),)


@op_definition
class StopGradientOp(Unary):
    """x, without a gradient."""

    name = "nn.stop_gradient"
    FLOPS: ClassVar[int] = 0
    LINEAR: ClassVar[str] = "any"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0]

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (None,)


@op_definition
class StraightThroughOp(Float):
    """x, whose cotangent passes to `history`: x was written without a gradient."""

    name = "nn.straight_through"
    x = operand_def(TensorType)
    history = operand_def(TensorType)
    out = result_def(TensorType)
    FLOPS: ClassVar[int] = 0
    assembly_format = f"$x `,` $history {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, history = (t.get_shape() for t in operands)
        if x != history:
            raise ShardirError(coded("T6", f"expected a history of shape {x}, got {history}"))
        return super().infer(operands, props)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0]

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return None, dy
