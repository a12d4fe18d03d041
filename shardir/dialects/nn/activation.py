"""Activations: elementwise ops of floats. Where torch has a kernel for the derivative, the gradient
is one op.
"""

import math
from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, TensorType, UnitAttr, f64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, opt_prop_def, prop_def, result_def

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device
from shardir.dialects.nn.elementary import erf
from shardir.dialects.nn.elementwise import Float, FloatUnary
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.types import unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

SQRT_2_OVER_PI = 0.7978845608028654
GELU_CUBIC = 0.044715


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


class ActivationGrad(Float, ABC):
    """The cotangent of an activation's operand, from the `saved` operand or result. It has the
    activation's properties."""

    saved = operand_def(TensorType)
    dy = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$saved `,` $dy {STRATEGY}"

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        props = {name: p for name, p in self.properties.items() if name != "strategy"}
        return self.curvature(b, dy), b.value(type(self), self.saved, dy, props=props)

    def curvature(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        """The cotangent of `saved`; None where it is 0."""
        raise self.no_gradient()


Grad = type[ActivationGrad]


class Activation(FloatUnary, ABC):
    GRAD: ClassVar[Grad]
    SAVES_RESULT: ClassVar[bool] = False

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        saved = self.out if self.SAVES_RESULT else self.x
        props = {name: p for name, p in self.properties.items() if name != "strategy"}
        return (b.value(self.GRAD, saved, dy, props=props),)


@op_definition
class ReluGradOp(ActivationGrad):
    """0 where x <= 0, else dy"""

    name = "nn.relu_grad"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.where(arrays[0] <= 0, 0, arrays[1]).astype(arrays[1].dtype)

    def curvature(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        return None


@op_definition
class ReluOp(Activation):
    """max(x, 0)"""

    name = "nn.relu"
    GRAD: ClassVar[Grad] = ReluGradOp

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.maximum(arrays[0], 0)


@op_definition
class TanhGradOp(ActivationGrad):
    """dy (1 - tanh(x)^2), from the result"""

    name = "nn.tanh_grad"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[1] * (1 - arrays[0] ** 2)

    def curvature(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        return b.mul(b.scale(self.saved, -2.0), b.mul(self.dy, dy))


@op_definition
class TanhOp(Activation):
    """The hyperbolic tangent"""

    name = "nn.tanh"
    GRAD: ClassVar[Grad] = TanhGradOp
    SAVES_RESULT: ClassVar[bool] = True

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.tanh(arrays[0])


@op_definition
class SigmoidGradOp(ActivationGrad):
    """dy s (1 - s), from the result s"""

    name = "nn.sigmoid_grad"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[1] * arrays[0] * (1 - arrays[0])

    def curvature(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        one = b.constant(1.0, unsharded_type(dy).element_type)
        return b.mul(b.sub(one, b.scale(self.saved, 2.0)), b.mul(self.dy, dy))


@op_definition
class SigmoidOp(Activation):
    """1 / (1 + e^-x)"""

    name = "nn.sigmoid"
    GRAD: ClassVar[Grad] = SigmoidGradOp
    SAVES_RESULT: ClassVar[bool] = True

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return sigmoid(arrays[0])


@op_definition
class SiluGradOp(ActivationGrad):
    """dy times the derivative of silu, s (1 + x (1 - s)) with s = sigmoid(x)"""

    name = "nn.silu_grad"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, dy = arrays
        s = sigmoid(x)
        return dy * s * (1 + x * (1 - s))


@op_definition
class SiluOp(Activation):
    """x sigmoid(x), also called swish"""

    name = "nn.silu"
    GRAD: ClassVar[Grad] = SiluGradOp

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0] * sigmoid(arrays[0])


@op_definition
class GeluGradOp(ActivationGrad):
    """dy times the derivative of gelu"""

    name = "nn.gelu_grad"
    exact = opt_prop_def(UnitAttr)
    assembly_format = f"$saved `,` $dy (`exact` $exact^)? {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, dy = arrays
        if self.exact is not None:
            bell = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
            return dy * (0.5 * (1 + erf(x / math.sqrt(2))) + x * bell)
        t = np.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))
        inner = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x**2)
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * inner)


@op_definition
class GeluOp(Activation):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): the tanh form of gelu; `exact` is
    0.5 x (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel, 2016)"""

    name = "nn.gelu"
    GRAD: ClassVar[Grad] = GeluGradOp
    exact = opt_prop_def(UnitAttr)
    assembly_format = f"$x (`exact` $exact^)? {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x = arrays[0]
        if self.exact is not None:
            return 0.5 * x * (1 + erf(x / math.sqrt(2)))
        return 0.5 * x * (1 + np.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)))


@op_definition
class SoftplusOp(FloatUnary):
    """ln(1 + e^x); x itself beyond 20, as in torch"""

    name = "nn.softplus"
    PRECISION: ClassVar[str] = "wide"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        (x,) = arrays
        return np.where(x > 20, x, np.logaddexp(x, np.zeros((), x.dtype)))

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        beyond = b.compare("gt", self.x, b.scalar(20.0, self.x))
        return (b.select(beyond, dy, b.mul(dy, b.value(SigmoidOp, self.x))),)


@op_definition
class LeakyReluOp(FloatUnary):
    """x where x > 0, else slope x"""

    name = "nn.leaky_relu"
    slope = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x `slope` $slope {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        (x,) = arrays
        return np.where(x > 0, x, float_of(self, "slope") * x)

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        above = b.compare("gt", self.x, b.scalar(0.0, self.x))
        return (b.select(above, dy, b.scale(dy, float_of(self, "slope"))),)


@op_definition
class EluOp(FloatUnary):
    """x where x > 0, else alpha (e^x - 1)"""

    name = "nn.elu"
    alpha = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x `alpha` $alpha {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        (x,) = arrays
        return np.where(x > 0, x, float_of(self, "alpha") * np.expm1(x))

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        above = b.compare("gt", self.x, b.scalar(0.0, self.x))
        slope = b.add(self.out, b.scalar(float_of(self, "alpha"), dy))
        return (b.select(above, dy, b.mul(dy, slope)),)


@op_definition
class HardtanhOp(FloatUnary):
    """x clipped to min..max (0 to 6: relu6); the gradient is 0 at the ends and beyond."""

    name = "nn.hardtanh"
    min = prop_def(FloatAttr.constr(type=f64))
    max = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x `min` $min `max` $max {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.clip(arrays[0], float_of(self, "min"), float_of(self, "max"))

    def partials(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        for how, end in (("gt", "min"), ("lt", "max")):
            inside = b.compare(how, self.x, b.scalar(float_of(self, end), self.x))
            dy = b.select(inside, dy, b.scalar(0.0, dy))
        return (dy,)
