"""The dialect acme."""

from collections.abc import Sequence

import numpy as np
from xdsl.dialects.builtin import FloatAttr, f64
from xdsl.ir import Dialect, SSAValue
from xdsl.irdl import prop_def

from shardir.extend import STRATEGY, Array, Device, FloatUnary, OpBuilder, nn, op_definition


@op_definition
class SwishOp(FloatUnary):
    """x sigmoid(beta x)"""

    name = "acme.swish"
    beta = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x `beta` $beta {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        (x,) = arrays
        return x / (1 + np.exp(-self.beta.value.data * x))

    def partials(self, b: OpBuilder, dy: SSAValue) -> Sequence[SSAValue | None]:
        # s + beta x s (1 - s), where s is the sigmoid
        beta = self.beta.value.data
        s = b.value(nn.SigmoidOp, b.scale(self.x, beta))
        slope = b.mul(b.scale(self.x, beta), b.mul(s, b.sub(b.scalar(1.0, s), s)))
        return (b.mul(dy, b.add(s, slope)),)


ACME = Dialect("acme", [SwishOp])
