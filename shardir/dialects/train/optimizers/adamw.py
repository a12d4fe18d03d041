"""AdamW, Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

from shardir.dialects.train.optimizer import Optimizer, adam_hyperparameters, elementwise
from shardir.dialects.train.updates import AdamWOp

OPTIMIZER = Optimizer(adam_hyperparameters(eps=1e-8, weight_decay=0.01), elementwise(AdamWOp))
