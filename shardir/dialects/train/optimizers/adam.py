"""Adam (Kingma and Ba, 2015)."""

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.train.optimizer import Optimizer, adam_hyperparameters, elementwise
from shardir.dialects.train.updates import Adams


@op_definition
class AdamOp(Adams):
    """u = g + weight_decay w; m' = beta1 m + (1 - beta1) u; v' = beta2 v + (1 - beta2) u^2;
    w' = w - lr (m' / correction1) / (sqrt(v' / correction2) + eps) (Kingma and Ba, 2015)"""

    name = "train.adam"

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, m, v, correction1, correction2, lr = arrays
        m, v = self.moments(g + float_of(self, "weight_decay") * w, m, v)
        return w - lr * self.direction(m, v, correction1, correction2), m, v


OPTIMIZER = Optimizer(adam_hyperparameters(eps=1e-8, weight_decay=0.0), elementwise(AdamOp))
