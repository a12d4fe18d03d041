"""The bases of elementwise ops: numpy's broadcasting, every dimension splittable.

A dimension of size 1 that is repeated has no factor: it is replicated. The ops are in
arithmetic.py, elementary.py, logic.py, selection.py and activation.py.
"""

from abc import ABC
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.types import arithmetic_element, float_element, same_element

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

NumpyFunction = Callable[..., Any]
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
            names = [" and ".join(map(str, l)) for l in (map(list, shapes), sorted(sizes))]
            message = (
                f"expected shapes that broadcast, got {names[0]}: sizes {names[1]} in dimension "
            )
            raise ShardirError(coded("T6", f"{message}{-1 - i}"))
        out.append(sizes.pop() if sizes else 1)
    return tuple(reversed(out))


class Elementwise(TensorOp, ABC):
    """Computes each element of the result from the operands' elements at its position."""

    LINEAR: ClassVar[str] = ""
    NUMPY: ClassVar[NumpyFunction]
    """The numpy function that computes the op, if there is one."""

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
        names = factor_names(len(shape))
        dims = []
        for t in operands:
            operand_shape = t.get_shape()
            tail = names[len(shape) - len(operand_shape) :]
            result_shape = shape[len(shape) - len(operand_shape) :]
            dims.append(
                [
                    f if n == m else ""
                    for f, n, m in zip(tail, operand_shape, result_shape, strict=True)
                ]
            )
        return Factors.of(
            dims, [names], [t.get_shape() for t in (*operands, *results)], linear=cls.LINEAR
        )

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        return type(self).NUMPY(*arrays)

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """The operands' cotangents, before the sums over broadcast dimensions.

        Raises:
            ShardirError: the op has no gradient.
        """
        raise self.no_gradient()

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        cotangents = zip(self.partials(b, dy), self.operands, strict=True)
        return [None if d is None else b.sum_to(d, v) for d, v in cotangents]


class Unary(Elementwise, ABC):
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x {STRATEGY}"


class Float(Elementwise, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return float_element(cls.name, operands)


class FloatUnary(Float, Unary, ABC):
    pass


class Binary(Elementwise, ABC):
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$lhs `,` $rhs {STRATEGY}"


class Arithmetic(Elementwise, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return arithmetic_element(cls.name, operands)


class PiecewiseConstant(Elementwise, ABC):
    """Piecewise constant: the gradient is 0."""

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return [None] * len(self.operands)
