"""Adamax, Adam with the infinity norm (Kingma and Ba, 2015), as torch.optim.Adamax."""

from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.train.optimizer import Optimizer, adam_hyperparameters, elementwise
from shardir.dialects.train.updates import FLOAT, Update


@op_definition
class AdamaxOp(Update):
    """u = g + weight_decay w; m' = beta1 m + (1 - beta1) u; n' = max(beta2 n, |u| + eps);
    w' = w - lr (m' / correction1) / n' (Kingma and Ba, 2015)"""

    name = "train.adamax"
    FLOPS: ClassVar[int] = 11
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_inf")
    SCALARS: ClassVar[tuple[str, ...]] = ("correction1", "lr")
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    m = operand_def(TensorType)
    n = operand_def(TensorType)
    correction1 = operand_def(TensorType)
    lr = operand_def(TensorType)
    beta1 = prop_def(FLOAT)
    beta2 = prop_def(FLOAT)
    eps = prop_def(FLOAT)
    weight_decay = prop_def(FLOAT)
    new_w = result_def(TensorType)
    new_m = result_def(TensorType)
    new_n = result_def(TensorType)
    assembly_format = (
        "$w `,` $g `,` $m `,` $n `,` $correction1 `,` $lr `beta1` $beta1 `beta2` $beta2 "
        "`eps` $eps `weight_decay` $weight_decay " + STRATEGY
    )

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, m, n, correction1, lr = arrays
        beta1, beta2 = float_of(self, "beta1"), float_of(self, "beta2")
        u = g + float_of(self, "weight_decay") * w
        m = beta1 * m + (1 - beta1) * u
        n = np.maximum(beta2 * n, np.abs(u) + float_of(self, "eps"))
        return w - lr * (m / correction1) / n, m, n


OPTIMIZER = Optimizer(adam_hyperparameters(eps=1e-8, weight_decay=0.0), elementwise(AdamaxOp))
