"""Gradient descent with momentum."""

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, elementwise
from shardir.dialects.train.updates import WithVelocity


@op_definition
class MomentumOp(WithVelocity):
    """v' = momentum v + g + weight_decay w; w' = w - lr v'"""

    name = "train.momentum"

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, v, lr = arrays
        v = float_of(self, "momentum") * v + self.decayed(w, g)
        return w - lr * v, v


OPTIMIZER = Optimizer(
    {"lr": LR, "momentum": OptionSpec(float, minimum=0.0), "weight_decay": DECAY},
    elementwise(MomentumOp),
)
