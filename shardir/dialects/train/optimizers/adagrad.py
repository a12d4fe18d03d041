"""Adagrad (Duchi, Hazan and Singer, 2011), as torch.optim.Adagrad."""

from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType, f64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, ParameterStep, as_generator
from shardir.dialects.train.updates import FLOAT, Update


@op_definition
class AdagradOp(Update):
    """u = g + weight_decay w; s' = s + u^2; w' = w - lr u / (sqrt(s') + eps) (Duchi, Hazan and
    Singer, 2011)"""

    name = "train.adagrad"
    FLOPS: ClassVar[int] = 8
    STATES: ClassVar[tuple[str, ...]] = ("sum",)
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    s = operand_def(TensorType)
    lr = operand_def(TensorType)
    eps = prop_def(FLOAT)
    weight_decay = prop_def(FLOAT)
    new_w = result_def(TensorType)
    new_s = result_def(TensorType)
    assembly_format = "$w `,` $g `,` $s `,` $lr `eps` $eps `weight_decay` $weight_decay " + STRATEGY

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, s, lr = arrays
        u = g + float_of(self, "weight_decay") * w
        s = s + u * u
        return w - lr * u / (np.sqrt(s) + float_of(self, "eps")), s


def update(p: ParameterStep) -> list[SSAValue]:
    """The rate of step t is lr / (1 + (t - 1) lr_decay)."""
    b, decay, rate = p.b, p.hyperparameters["lr_decay"], p.lr
    s = p.state("sum", first=p.hyperparameters["initial"])
    if decay:
        rate = p.scalars.once(
            "decayed_lr", p.lr,
            lambda: b.div(p.lr, b.add(
                b.constant(1.0, f64), b.scale(p.scalars.done_as_float, decay)
            )),
        )  # fmt: skip
    return p.apply(AdagradOp, p.w, p.g, s, rate)


OPTIMIZER = Optimizer(
    {
        "lr": LR,
        "lr_decay": OptionSpec(float, 0.0, minimum=0.0),
        "initial": OptionSpec(float, 0.0, minimum=0.0),
        "eps": OptionSpec(float, 1e-10, minimum=0.0),
        "weight_decay": DECAY,
    },
    as_generator(update),
)
