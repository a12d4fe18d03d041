"""Adam (Kingma and Ba, 2015)."""

from shardir.dialects.train.optimizer import Optimizer, adam_hyperparameters, elementwise
from shardir.dialects.train.updates import AdamOp

OPTIMIZER = Optimizer(adam_hyperparameters(eps=1e-8, weight_decay=0.0), elementwise(AdamOp))
