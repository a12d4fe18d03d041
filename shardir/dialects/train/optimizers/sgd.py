"""Stochastic gradient descent."""

from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, elementwise
from shardir.dialects.train.updates import SgdOp

OPTIMIZER = Optimizer({"lr": LR, "weight_decay": DECAY}, elementwise(SgdOp))
