"""The update of each parameter is a function of the module: its `train.rule`."""

from shardir.dialects.train.optimizer import LR, Optimizer, as_generator

OPTIMIZER = Optimizer({"lr": LR}, as_generator(lambda p: p.by_rule()))
