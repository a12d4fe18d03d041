"""NAdam, Adam with Nesterov's momentum (Dozat, 2016), as torch.optim.NAdam."""

from abc import ABC
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType, f64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.dialects import nn
from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import (
    Optimizer,
    ParameterStep,
    StepScalars,
    adam_hyperparameters,
    as_generator,
)
from shardir.dialects.train.updates import FLOAT, Update


class NAdams(Update, ABC):
    """An update of NAdam: `of_gradient` and `of_mean` are the factors of the gradient and of its
    running mean."""

    FLOPS: ClassVar[int] = 18
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    SCALARS: ClassVar[tuple[str, ...]] = ("correction2", "of_gradient", "of_mean", "lr")
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    m = operand_def(TensorType)
    v = operand_def(TensorType)
    correction2 = operand_def(TensorType)
    of_gradient = operand_def(TensorType)
    of_mean = operand_def(TensorType)
    lr = operand_def(TensorType)
    beta1 = prop_def(FLOAT)
    beta2 = prop_def(FLOAT)
    eps = prop_def(FLOAT)
    weight_decay = prop_def(FLOAT)
    new_w = result_def(TensorType)
    new_m = result_def(TensorType)
    new_v = result_def(TensorType)
    assembly_format = (
        "$w `,` $g `,` $m `,` $v `,` $correction2 `,` $of_gradient `,` $of_mean `,` $lr "
        "`beta1` $beta1 `beta2` $beta2 `eps` $eps `weight_decay` $weight_decay " + STRATEGY
    )

    def step(self, w: Array, u: Array, *states_and_scalars: Array) -> tuple[Array, ...]:
        """The results, from weight and gradient; one of them includes the decay."""
        m, v, correction2, of_gradient, of_mean, lr = states_and_scalars
        beta1, beta2 = float_of(self, "beta1"), float_of(self, "beta2")
        m, v = beta1 * m + (1 - beta1) * u, beta2 * v + (1 - beta2) * u * u
        root = np.sqrt(v / correction2) + float_of(self, "eps")
        return w - lr * (of_gradient * u + of_mean * m) / root, m, v


@op_definition
class NAdamOp(NAdams):
    """u = g + weight_decay w; m' = beta1 m + (1 - beta1) u; v' = beta2 v + (1 - beta2) u^2;
    w' = w - lr (of_gradient u + of_mean m') / (sqrt(v' / correction2) + eps) (Dozat, 2016)"""

    name = "train.nadam"

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, *others = arrays
        return self.step(w, g + float_of(self, "weight_decay") * w, *others)


@op_definition
class NAdamWOp(NAdams):
    """As train.nadam with u = g, from (1 - lr weight_decay) w (Dozat, 2016; Loshchilov and Hutter,
    2019)"""

    name = "train.nadamw"

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, *others = arrays
        return self.step(w - others[-1] * float_of(self, "weight_decay") * w, g, *others)


def _factors(scalars: StepScalars, beta1: float, decay: float) -> tuple[SSAValue, SSAValue]:
    """The factors of the gradient and of its mean: (1 - mu_t) / (1 - mu_1 ... mu_t) and
    mu_t+1 / (1 - mu_1 ... mu_t+1), with mu_t = beta1 (1 - 0.96^(t decay) / 2)."""
    b = scalars.b

    def once(name: str, make: Callable[[], SSAValue]) -> SSAValue:
        return scalars.once(name, (beta1, decay), make)

    def momentum(time: SSAValue) -> SSAValue:
        power = b.value(nn.PowOp, b.constant(0.96, f64), b.scale(time, decay))
        return b.sub(b.constant(beta1, f64), b.scale(power, 0.5 * beta1))

    def complement(x: SSAValue) -> SSAValue:
        return b.sub(b.constant(1.0, f64), x)

    mu = once("mu", lambda: momentum(scalars.time))
    next_mu = once("mu_next", lambda: momentum(b.add(scalars.time, b.constant(1.0, f64))))
    product = scalars.state("mu_product", f64, 1.0, lambda before: b.mul(before, mu))
    return (
        once("of_gradient", lambda: b.div(complement(mu), complement(product))),
        once("of_mean", lambda: b.div(next_mu, complement(b.mul(product, next_mu)))),
    )


def update(p: ParameterStep) -> list[SSAValue]:
    values = p.hyperparameters
    factors = _factors(p.scalars, values["beta1"], values["momentum_decay"])
    kind = NAdamWOp if values["decoupled"] else NAdamOp
    states = [p.state(n) for n in kind.STATES]
    return p.apply(kind, p.w, p.g, *states, p.scalar("correction2"), *factors, p.lr)


OPTIMIZER = Optimizer(
    {
        **adam_hyperparameters(eps=1e-8, weight_decay=0.0),
        "momentum_decay": OptionSpec(float, 0.004, minimum=0.0),
        "decoupled": OptionSpec(int, 0, minimum=0, maximum=1),
    },
    as_generator(update),
)
