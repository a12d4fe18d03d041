"""Gradient descent with momentum."""

from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, elementwise
from shardir.dialects.train.updates import MomentumOp

OPTIMIZER = Optimizer(
    {"lr": LR, "momentum": OptionSpec(float, minimum=0.0), "weight_decay": DECAY},
    elementwise(MomentumOp),
)
