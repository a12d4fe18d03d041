"""Adafactor (Shazeer and Stern, 2018), as torch.optim.Adafactor."""

from math import prod

from xdsl.dialects.builtin import f64
from xdsl.ir import SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.properties import float_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.text import OptionSpec
from shardir.dialects.train.optimizer import DECAY, LR, Optimizer, ParameterStep, Updated


def update(p: ParameterStep) -> Updated:
    """The second moment of a matrix is the product of the means of its rows and columns, divided by
    their mean. As in torch, `eps1` bounds the mean from below, and `eps1`^2 the second moment."""
    b, values, t = p.b, p.hyperparameters, unsharded_type(p.w)
    rank, size = len(t.get_shape()), max(1, prod(t.get_shape()))
    fresh = p.scalars.power("fresh", values["beta2_decay"])
    rate = b.value(nn.MinOp, p.lr, p.scalars.power("bound", -0.5))

    def at_least(x: SSAValue, bound: float) -> SSAValue:
        return b.value(nn.ClampOp, x, props={"min": float_attr(bound)})

    def mix(old: SSAValue, new: SSAValue) -> SSAValue:
        """old + fresh (new - old)"""
        return b.add(old, p.times(b.sub(new, old), fresh))

    def root_mean(squares: SSAValue) -> SSAValue:
        return b.value(nn.SqrtOp, b.scale(b.convert(squares, f64), 1 / size))

    squares, w = b.mul(p.g, p.g), p.squares(p.w)
    if rank < 2:
        states = [mix(p.state("variance"), squares)]
        variance = states[0]
    else:
        rows, columns = (
            [d for d in range(rank) if d != reduced] for reduced in (rank - 1, rank - 2)
        )
        old = p.state("row_var", rows), p.state("col_var", columns)
        means = [b.complete(b.reduce(squares, "mean", [d])) for d in (rank - 1, rank - 2)]
        yield
        row, column = states = [mix(x, y) for x, y in zip(old, means, strict=True)]
        mean = b.complete(b.reduce(row, "mean", [rank - 2], keep=True))
        yield
        row = b.div(row, at_least(mean, values["eps1"]))
        variance = b.mul(
            b.broadcast(row, rows, t.get_shape(), like=p.w),
            b.broadcast(column, columns, t.get_shape(), like=p.w),
        )
    direction = b.mul(p.g, b.value(nn.RsqrtOp, at_least(variance, values["eps1"] ** 2)))
    direction.name_hint = "direction"
    u = p.squares(direction)
    yield
    excess = at_least(b.scale(root_mean(u), 1 / values["clip"]), 1.0)
    rate = b.mul(rate, at_least(root_mean(w), values["eps2"]))
    decayed = p.w
    if decay := values["weight_decay"]:
        decayed = p.times(p.w, b.sub(b.constant(1.0, f64), b.scale(p.lr, decay)))
    return [*p.descend(decayed, direction, b.div(rate, excess)), *states]


OPTIMIZER = Optimizer(
    {
        "lr": LR,
        "beta2_decay": OptionSpec(float, -0.8, maximum=0.0),
        "eps1": OptionSpec(float, 1e-7, minimum=0.0),
        "eps2": OptionSpec(float, 1e-3, minimum=0.0),
        "clip": OptionSpec(float, 1.0, minimum=0.0, ends="()"),
        "weight_decay": DECAY,
    },
    update,
)
