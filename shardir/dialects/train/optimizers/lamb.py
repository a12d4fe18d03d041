"""LAMB: the direction of Adam, scaled by a trust ratio (You et al., 2020)."""

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import Array, Device
from shardir.dialects.nn.properties import float_of
from shardir.dialects.train.optimizer import (
    Optimizer,
    ParameterStep,
    Updated,
    adam_hyperparameters,
    trust_scaled_rate,
)
from shardir.dialects.train.updates import MOMENTS, WITH_MOMENTS, WithMoments


@op_definition
class LambDirectionOp(WithMoments):
    """m' and v' as in train.adam with u = g, and the direction that a trust ratio then scales:
    (m' / correction1) / (sqrt(v' / correction2) + eps) + weight_decay w (You et al., 2020)"""

    name = "train.lamb_direction"
    assembly_format = WITH_MOMENTS + MOMENTS

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        w, g, m, v, correction1, correction2 = arrays
        m, v = self.moments(g, m, v)
        direction = self.direction(m, v, correction1, correction2)
        return direction + float_of(self, "weight_decay") * w, m, v


def update(p: ParameterStep) -> Updated:
    states = [p.state(n) for n in LambDirectionOp.STATES]
    scalars = map(p.scalar, LambDirectionOp.SCALARS)
    direction, *new = p.apply(LambDirectionOp, p.w, p.g, *states, *scalars)
    direction.name_hint = "direction"
    w, u = p.squares(p.w), p.squares(direction)
    yield
    return [*p.descend(p.w, direction, trust_scaled_rate(p, w, u, 1.0, 0.0)), *new]


OPTIMIZER = Optimizer(adam_hyperparameters(eps=1e-6, weight_decay=0.01), update)
