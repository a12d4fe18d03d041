"""Gradient descent with Nesterov's momentum."""

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, elementwise
from shardir.dialects.train.updates import WithVelocity


@op_definition
class NesterovOp(WithVelocity):
    """u = g + weight_decay w; v' = momentum v + u; w' = w - lr (u + momentum v')"""

    name = "train.nesterov"

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, v, lr = arrays
        u, momentum = self.decayed(w, g), float_of(self, "momentum")
        v = momentum * v + u
        return w - lr * (u + momentum * v), v


OPTIMIZER = Optimizer(
    {"lr": LR, "momentum": OptionSpec(float, minimum=0.0), "weight_decay": DECAY},
    elementwise(NesterovOp),
)
