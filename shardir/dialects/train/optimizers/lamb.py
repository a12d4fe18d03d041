"""LAMB: the direction of Adam, scaled by a trust ratio (You et al., 2020)."""

from shardir.dialects.train.optimizer import (
    Optimizer,
    ParameterStep,
    Updated,
    adam_hyperparameters,
    trusted,
)
from shardir.dialects.train.updates import LambDirectionOp


def update(p: ParameterStep) -> Updated:
    states = [p.state(n) for n in LambDirectionOp.STATES]
    scalars = map(p.scalar, LambDirectionOp.SCALARS)
    direction, *new = p.apply(LambDirectionOp, p.w, p.g, *states, *scalars)
    direction.name_hint = "direction"
    w, u = p.squares(p.w), p.squares(direction)
    yield
    return [*p.descend(p.w, direction, trusted(p, w, u, 1.0, 0.0)), *new]


OPTIMIZER = Optimizer(adam_hyperparameters(eps=1e-6, weight_decay=0.01), update)
