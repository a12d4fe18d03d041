"""LARS: momentum, scaled by a trust ratio (You, Gitman and Ginsburg, 2017)."""

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import (
    DECAY,
    LR,
    Optimizer,
    ParameterStep,
    Updated,
    trust_scaled_rate,
)
from shardir.dialects.train.updates import WithVelocity


@op_definition
class LarsOp(WithVelocity):
    """v' = momentum v + lr (g + weight_decay w); w' = w - v': the velocity includes the layer's own
    rate (You, Gitman and Ginsburg, 2017)"""

    name = "train.lars"

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, v, lr = arrays
        v = float_of(self, "momentum") * v + lr * self.decayed(w, g)
        return w - v, v


def update(p: ParameterStep) -> Updated:
    v = p.state("momentum")
    w, g = p.squares(p.w), p.squares(p.g)
    yield
    rate = trust_scaled_rate(
        p, w, g, p.hyperparameters["coefficient"], p.hyperparameters["weight_decay"]
    )
    return p.apply(LarsOp, p.w, p.g, v, rate)


OPTIMIZER = Optimizer(
    {
        "lr": LR,
        "momentum": OptionSpec(float, 0.9, minimum=0.0),
        "weight_decay": DECAY,
        "coefficient": OptionSpec(float, 0.001, minimum=0.0),
    },
    update,
)
