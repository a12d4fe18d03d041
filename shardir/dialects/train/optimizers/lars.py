"""LARS: momentum, scaled by a trust ratio (You, Gitman and Ginsburg, 2017)."""

from shardir.dialects.text import Option
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, Target, Updated, trusted
from shardir.dialects.train.updates import LarsOp


def update(p: Target) -> Updated:
    v = p.state("momentum")
    w, g = p.squares(p.w), p.squares(p.g)
    yield
    rate = trusted(p, w, g, p.numbers["coefficient"], p.numbers["weight_decay"])
    return p.apply(LarsOp, p.w, p.g, v, rate)


OPTIMIZER = Optimizer(
    {
        "lr": LR,
        "momentum": Option(float, 0.9, least=0.0),
        "weight_decay": DECAY,
        "coefficient": Option(float, 0.001, least=0.0),
    },
    update,
)
