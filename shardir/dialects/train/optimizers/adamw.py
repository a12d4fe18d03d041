"""AdamW, Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.train.optimizer import Optimizer, adam_hyperparameters, elementwise
from shardir.dialects.train.updates import Adams


@op_definition
class AdamWOp(Adams):
    """As train.adam with u = g, from (1 - lr weight_decay) w (Loshchilov and Hutter, 2019)"""

    name = "train.adamw"

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, m, v, correction1, correction2, lr = arrays
        m, v = self.moments(g, m, v)
        w = w - lr * float_of(self, "weight_decay") * w
        return w - lr * self.direction(m, v, correction1, correction2), m, v


OPTIMIZER = Optimizer(adam_hyperparameters(eps=1e-8, weight_decay=0.01), elementwise(AdamWOp))
