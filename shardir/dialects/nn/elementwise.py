"""Elementwise ops: numpy's broadcasting, every dimension splittable.

A dimension of size 1 that is repeated has no factor: it is whole on every device.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import AnyFloat, IntegerType, TensorType, i1
from xdsl.ir import SSAValue
from xdsl.irdl import irdl_attr_definition, irdl_op_definition, operand_def, prop_def, result_def

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
    letters,
    needs_numbers,
    plain,
    same_element,
)
from shardir.dialects.text import WordAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import Builder


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


def needs_float(op: str, operands: Types) -> Any:
    element = same_element(operands)
    if not isinstance(element, AnyFloat):
        raise ShardirError(f"[T5] {op} wants floats, not {element}; nn.convert it")
    return element


class Unary(Elementwise, ABC):
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x {STRATEGY}"


class FloatUnary(Unary, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return needs_float(cls.name, operands)


class Binary(Elementwise, ABC):
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$lhs `,` $rhs {STRATEGY}"

    @abstractmethod
    def partials(self, b: "Builder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        """The operands' cotangents, before they are summed to the operands' shapes."""

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        dy = cotangents[0]
        assert dy is not None
        dx, dz = self.partials(b, dy)
        return b.sum_to(dx, self.lhs), b.sum_to(dz, self.rhs)


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

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[0] + arrays[1]

    def partials(self, b: "Builder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        return dy, dy


@irdl_op_definition
class SubOp(Arithmetic, Binary):
    """x - y"""

    name = "nn.sub"
    LINEAR: ClassVar[str] = "sum"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[0] - arrays[1]

    def partials(self, b: "Builder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        return dy, b.neg(dy)


@irdl_op_definition
class MulOp(Arithmetic, Binary):
    """x y"""

    name = "nn.mul"
    MULTILINEAR: ClassVar[bool] = True

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[0] * arrays[1]

    def partials(self, b: "Builder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        return b.mul(dy, self.rhs), b.mul(dy, self.lhs)


@irdl_op_definition
class DivOp(Binary):
    """x / y"""

    name = "nn.div"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return needs_float(cls.name, operands)

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[0] / arrays[1]

    def partials(self, b: "Builder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        dx = b.div(dy, self.rhs)
        return dx, b.neg(b.mul(dx, self.out))


@irdl_op_definition
class MaxOp(Binary):
    """The greater of x and y; where they are equal, each gets half of the cotangent."""

    name = "nn.max"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.maximum(arrays[0], arrays[1])

    def partials(self, b: "Builder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        element = plain(dy).element_type
        more = b.convert(b.compare("gt", self.lhs, self.rhs), element)
        even = b.convert(b.compare("eq", self.lhs, self.rhs), element)
        dx = b.mul(dy, b.add(more, b.scale(even, 0.5)))
        return dx, b.sub(dy, dx)


@irdl_op_definition
class NegOp(Arithmetic, Unary):
    """-x"""

    name = "nn.neg"
    LINEAR: ClassVar[str] = "sum"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return -arrays[0]

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        assert cotangents[0] is not None
        return (b.neg(cotangents[0]),)


@irdl_op_definition
class ExpOp(FloatUnary):
    """e^x"""

    name = "nn.exp"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.exp(arrays[0])

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        assert cotangents[0] is not None
        return (b.mul(cotangents[0], self.out),)


@irdl_op_definition
class LogOp(FloatUnary):
    """The natural logarithm"""

    name = "nn.log"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.log(arrays[0])

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        assert cotangents[0] is not None
        return (b.div(cotangents[0], self.x),)


@irdl_op_definition
class SqrtOp(FloatUnary):
    """The square root"""

    name = "nn.sqrt"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.sqrt(arrays[0])

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        assert cotangents[0] is not None
        return (b.scale(b.div(cotangents[0], self.out), 0.5),)


# ---- activations: each with its gradient as one op ----

SQRT_2_OVER_PI = 0.7978845608028654
GELU_CUBIC = 0.044715


class ActivationGrad(Elementwise, ABC):
    """The cotangent of an activation's operand, from its `saved` value (operand or result)."""

    saved = operand_def(TensorType)
    dy = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$saved `,` $dy {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return needs_float(cls.name, operands)


class Activation(FloatUnary, ABC):
    GRAD: ClassVar[type[ActivationGrad]]
    SAVES_RESULT: ClassVar[bool] = False

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        assert cotangents[0] is not None
        saved = self.out if self.SAVES_RESULT else self.x
        return (b.value(self.GRAD, saved, cotangents[0]),)


@irdl_op_definition
class ReluGradOp(ActivationGrad):
    """dy where x > 0, else 0"""

    name = "nn.relu_grad"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.where(arrays[0] > 0, arrays[1], 0).astype(arrays[1].dtype)


@irdl_op_definition
class ReluOp(Activation):
    """max(x, 0)"""

    name = "nn.relu"
    GRAD: ClassVar[type[ActivationGrad]] = ReluGradOp

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.maximum(arrays[0], 0)


@irdl_op_definition
class TanhGradOp(ActivationGrad):
    """dy (1 - tanh(x)^2), from the result"""

    name = "nn.tanh_grad"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[1] * (1 - arrays[0] ** 2)


@irdl_op_definition
class TanhOp(Activation):
    """The hyperbolic tangent"""

    name = "nn.tanh"
    GRAD: ClassVar[type[ActivationGrad]] = TanhGradOp
    SAVES_RESULT: ClassVar[bool] = True

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.tanh(arrays[0])


@irdl_op_definition
class SigmoidGradOp(ActivationGrad):
    """dy s (1 - s), from the result s"""

    name = "nn.sigmoid_grad"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[1] * arrays[0] * (1 - arrays[0])


@irdl_op_definition
class SigmoidOp(Activation):
    """1 / (1 + e^-x)"""

    name = "nn.sigmoid"
    GRAD: ClassVar[type[ActivationGrad]] = SigmoidGradOp
    SAVES_RESULT: ClassVar[bool] = True

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return 0.5 * (1 + np.tanh(0.5 * arrays[0]))


@irdl_op_definition
class GeluGradOp(ActivationGrad):
    """dy times the derivative of the tanh form of gelu"""

    name = "nn.gelu_grad"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        x, dy = arrays
        t = np.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3))
        inner = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x**2)
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * inner)


@irdl_op_definition
class GeluOp(Activation):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): the tanh form of gelu (Hendrycks and
    Gimpel, 2016)"""

    name = "nn.gelu"
    GRAD: ClassVar[type[ActivationGrad]] = GeluGradOp

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        x = arrays[0]
        return 0.5 * x * (1 + np.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3)))


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

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
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

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.where(*arrays)

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        dy = cotangents[0]
        assert dy is not None
        zero = b.constant(0.0, plain(dy).element_type)
        dx = b.value(SelectOp, self.condition, dy, zero)
        dz = b.value(SelectOp, self.condition, zero, dy)
        return None, b.sum_to(dx, self.lhs), b.sum_to(dz, self.rhs)


@irdl_op_definition
class ConvertOp(Unary):
    """The same numbers in the result's element type."""

    name = "nn.convert"
    INFERRED: ClassVar[bool] = False

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        if operands[0].get_shape() != results[0].get_shape():
            raise ShardirError("[T1] nn.convert keeps the shape")

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        raise ShardirError("nn.convert states its result type")

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[0]  # the interpreter brings every result to its type

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        element = plain(self.x).element_type
        if isinstance(element, IntegerType):
            return (None,)
        assert cotangents[0] is not None
        return (b.convert(cotangents[0], element),)


@irdl_op_definition
class StopGradientOp(Unary):
    """x, through which no cotangent goes."""

    name = "nn.stop_gradient"
    LINEAR: ClassVar[str] = "any"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return arrays[0]

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        return (None,)


OPS = [
    AddOp, SubOp, MulOp, DivOp, MaxOp, NegOp, ExpOp, LogOp, SqrtOp, ReluOp, ReluGradOp, TanhOp,
    TanhGradOp, SigmoidOp, SigmoidGradOp, GeluOp, GeluGradOp, CompareOp, SelectOp, ConvertOp,
    StopGradientOp,
]  # fmt: skip
ATTRS = [ComparisonAttr]
