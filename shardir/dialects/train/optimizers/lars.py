"""LARS: momentum, scaled by a trust ratio (You, Gitman and Ginsburg, 2017)."""

from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, ParameterStep, Updated, trusted
from shardir.dialects.train.updates import LarsOp


def update(p: ParameterStep) -> Updated:
    v = p.state("momentum")
    w, g = p.squares(p.w), p.squares(p.g)
    yield
    rate = trusted(p, w, g, p.hyperparameters["coefficient"], p.hyperparameters["weight_decay"])
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
