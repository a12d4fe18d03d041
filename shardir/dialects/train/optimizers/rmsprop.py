"""RMSprop (Hinton, 2012), centered and with momentum (Graves, 2013), as torch.optim.RMSprop."""

from abc import ABC
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, ParameterStep, as_generator
from shardir.dialects.train.optimizers.momentum import MomentumOp
from shardir.dialects.train.updates import FLOAT, Update

_FORMAT = "`alpha` $alpha `eps` $eps `weight_decay` $weight_decay " + STRATEGY


class RmsDirections(Update, ABC):
    """The gradient divided by the root of v, the running mean of its square."""

    FLOPS: ClassVar[int] = 10
    STATES: ClassVar[tuple[str, ...]] = ("square_avg",)
    SCALARS: ClassVar[tuple[str, ...]] = ()
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    v = operand_def(TensorType)
    alpha = prop_def(FLOAT)
    eps = prop_def(FLOAT)
    weight_decay = prop_def(FLOAT)
    new_w = result_def(TensorType)
    new_v = result_def(TensorType)

    def mean(self, old: Array, new: Array) -> Array:
        alpha = float_of(self, "alpha")
        return alpha * old + (1 - alpha) * new


class WithMean(Update, ABC):
    """A direction with the running mean of the gradient. It must be the last base of a class:
    operands are in the order of the bases."""

    m = operand_def(TensorType)
    new_m = result_def(TensorType)


@op_definition
class RmsDirectionOp(RmsDirections):
    """u = g + weight_decay w; v' = alpha v + (1 - alpha) u^2; and the direction
    u / (sqrt(v') + eps) (Hinton, 2012)"""

    name = "train.rms_direction"
    assembly_format = "$w `,` $g `,` $v " + _FORMAT

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, v = arrays
        u = g + float_of(self, "weight_decay") * w
        v = self.mean(v, u * u)
        return u / (np.sqrt(v) + float_of(self, "eps")), v


@op_definition
class CenteredRmsDirectionOp(RmsDirections, WithMean):
    """As train.rms_direction, with m' = alpha m + (1 - alpha) u, and the root of v' - m'^2
    (Graves, 2013)"""

    name = "train.centered_rms_direction"
    FLOPS: ClassVar[int] = 14
    STATES: ClassVar[tuple[str, ...]] = ("square_avg", "grad_avg")
    assembly_format = "$w `,` $g `,` $v `,` $m " + _FORMAT

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, v, m = arrays
        u = g + float_of(self, "weight_decay") * w
        v, m = self.mean(v, u * u), self.mean(m, u)
        return u / (np.sqrt(v - m * m) + float_of(self, "eps")), v, m


def update(p: ParameterStep) -> list[SSAValue]:
    kind = CenteredRmsDirectionOp if p.hyperparameters["centered"] else RmsDirectionOp
    direction, *states = p.apply(kind, p.w, p.g, *[p.state(n) for n in kind.STATES])
    direction.name_hint = "direction"
    if not p.hyperparameters["momentum"]:
        return [*p.descend(p.w, direction, p.lr), *states]
    velocity = p.state("momentum_buffer")
    w, velocity = p.without_decay().apply(MomentumOp, p.w, direction, velocity, p.lr)
    return [w, *states, velocity]


OPTIMIZER = Optimizer(
    {
        "lr": LR,
        "alpha": OptionSpec(float, 0.99, minimum=0.0, maximum=1.0, ends="[)"),
        "eps": OptionSpec(float, 1e-8, minimum=0.0),
        "momentum": OptionSpec(float, 0.0, minimum=0.0),
        "centered": OptionSpec(int, 0, minimum=0, maximum=1),
        "weight_decay": DECAY,
    },
    as_generator(update),
)
