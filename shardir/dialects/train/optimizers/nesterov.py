"""Gradient descent with Nesterov's momentum."""

from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, elementwise
from shardir.dialects.train.updates import NesterovOp

OPTIMIZER = Optimizer(
    {"lr": LR, "momentum": OptionSpec(float, minimum=0.0), "weight_decay": DECAY},
    elementwise(NesterovOp),
)
