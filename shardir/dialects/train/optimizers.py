"""Each optimizer as ops: what a parameter and its states become in one step.

An optimizer is a generator. It hands control back where communication that it placed may go
together with that of the other parameters: `distributed-autodiff` runs the generators of all of
them side by side. What it returns is the new parameter, and behind it the new states.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from xdsl.dialects.builtin import BFloat16Type, Float16Type, f32, f64
from xdsl.ir import Attribute, SSAValue

from shardir.dialects import nn
from shardir.dialects.builder import Builder
from shardir.dialects.nn.base import float_attr, plain
from shardir.dialects.train.options import OptimizerAttr, ScheduleAttr
from shardir.dialects.train.updates import (
    AdamOp,
    AdamWOp,
    BiasCorrectionOp,
    LambDirectionOp,
    LarsOp,
    LearningRateOp,
    MomentumOp,
    NesterovOp,
    SgdOp,
    TrustRatioOp,
    Update,
)

Updated = Generator[None, None, list[SSAValue]]


class Clock:
    """The numbers that all parameters share, each made once, by the first who asks.

    `counted` gives the count of the steps done, a state of the step's.
    """

    def __init__(self, b: Builder, optimizer: OptimizerAttr, counted: Callable[[], SSAValue]):
        self.b, self.optimizer, self.counted = b, optimizer, counted
        self._made: dict[tuple[str, float], SSAValue] = {}

    def once(self, name: str, number: float, make: Callable[[], SSAValue]) -> SSAValue:
        key = name, number
        if key not in self._made:
            self._made[key] = made = make()
            made.name_hint = made.name_hint or name
        return self._made[key]

    @cached_property
    def done(self) -> SSAValue:
        """The number of steps done before this one."""
        return self.counted()

    @cached_property
    def step(self) -> SSAValue:
        """The number of this step, from 1."""
        one = self.b.constant(1, plain(self.done).element_type)
        step = self.b.add(self.done, one)
        step.name_hint = self.done.name_hint
        return step

    @cached_property
    def time(self) -> SSAValue:
        """The number of this step as a float."""
        return self.b.convert(self.step, f64)

    @property
    def is_used(self) -> bool:
        """Whether the count is asked for."""
        return "done" in self.__dict__

    def rate(self, factor: float = 1.0) -> SSAValue:
        """The learning rate of this step, for a parameter that has it times `factor`."""
        if factor != 1.0:
            return self.once("lr", factor, lambda: self.b.scale(self.rate(), factor))
        return self.once("lr", 1.0, self._rate)

    def _rate(self) -> SSAValue:
        lr = self.optimizer.values["lr"]
        if isinstance(lr, float):
            return self.b.constant(lr, f64)
        return self.b.value(LearningRateOp, self.done, props={"schedule": ScheduleAttr(lr)})

    def power(self, name: str, exponent: float) -> SSAValue:
        """step^exponent"""
        return self.once(
            name, exponent,
            lambda: self.b.value(nn.PowOp, self.time, self.b.constant(exponent, f64)),
        )  # fmt: skip

    def correction(self, which: str, beta: float) -> SSAValue:
        """1 - beta^step"""
        props = {"beta": float_attr(beta)}
        return self.once(
            which, beta, lambda: self.b.value(BiasCorrectionOp, self.step, props=props)
        )


@dataclass
class Target:
    """One parameter on its way through a step."""

    b: Builder
    clock: Clock
    w: SSAValue
    g: SSAValue
    numbers: dict[str, float]
    """The optimizer's options, with the parameter's own `weight_decay`."""
    lr: SSAValue
    new_state: Callable[[str, Sequence[int]], SSAValue]

    def state(self, name: str, dims: Sequence[int] | None = None) -> SSAValue:
        """The state `name`, of the parameter's shape and layout; of its dimensions `dims` only."""
        rank = len(plain(self.w).get_shape())
        return self.new_state(name, range(rank) if dims is None else dims)

    def scalar(self, name: str) -> SSAValue:
        """One of the SCALARS of an update."""
        if name == "lr":
            return self.lr
        return self.clock.correction(name, self.numbers[name.replace("correction", "beta")])

    def apply(self, kind: type[Update], *operands: SSAValue) -> list[SSAValue]:
        """The results of an update op with the parameter's numbers."""
        names = [n for n in kind.get_irdl_definition().properties if n in self.numbers]
        props = {n: float_attr(self.numbers[n]) for n in names}
        results: list[SSAValue] = [*self.b.op(kind, *operands, props=props).results]
        for new, old in zip(results, (operands[0], *operands[2:]), strict=False):
            new.name_hint = old.name_hint
        return results

    def plain_step(self, w: SSAValue, direction: SSAValue, rate: SSAValue) -> list[SSAValue]:
        """w - rate direction"""
        no_decay = {"weight_decay": float_attr(0.0)}
        new = self.b.value(SgdOp, w, direction, rate, props=no_decay)
        new.name_hint = w.name_hint
        return [new]

    # ---- numbers of all elements ----

    def squares(self, x: SSAValue) -> SSAValue:
        """The sum of the squares of all elements, brought together."""
        return self.b.complete(sum_of_squares(self.b, x))

    def times(self, x: SSAValue, number: SSAValue) -> SSAValue:
        """x times a number in double precision."""
        return self.b.mul(x, self.b.convert(number, plain(x).element_type))


def wide(b: Builder, x: SSAValue) -> SSAValue:
    """x in a type that holds sums of its squares."""
    narrow = isinstance(plain(x).element_type, BFloat16Type | Float16Type)
    return b.convert(x, f32) if narrow else x


def sum_of_squares(b: Builder, x: SSAValue) -> SSAValue:
    """The sum of the squares of all elements: a partial sum where x is split."""
    x = wide(b, x)
    return b.reduce(b.mul(x, x), "sum", range(len(plain(x).get_shape())))


def _elementwise(kind: type[Update]) -> "Optimizer":
    """The optimizer that is one op, from the parameter's states and shared scalars."""

    def update(p: Target) -> Updated:
        states = [p.state(n) for n in kind.STATES]
        return p.apply(kind, p.w, p.g, *states, *map(p.scalar, kind.SCALARS))
        yield  # what makes it a generator: it never hands back

    return update


def _trusted(p: Target, w: SSAValue, u: SSAValue, coefficient: float, decay: float) -> SSAValue:
    """The learning rate times the trust ratio, from the squares of norms."""
    w, u = p.b.convert(w, f64), p.b.convert(u, f64)
    props: dict[str, Attribute] = {
        "coefficient": float_attr(coefficient), "weight_decay": float_attr(decay),
    }  # fmt: skip
    return p.b.mul(p.lr, p.b.value(TrustRatioOp, w, u, props=props))


def _lamb(p: Target) -> Updated:
    states = [p.state(n) for n in LambDirectionOp.STATES]
    scalars = map(p.scalar, LambDirectionOp.SCALARS)
    direction, *new = p.apply(LambDirectionOp, p.w, p.g, *states, *scalars)
    direction.name_hint = "direction"
    w, u = p.squares(p.w), p.squares(direction)
    yield
    return [*p.plain_step(p.w, direction, _trusted(p, w, u, 1.0, 0.0)), *new]


def _lars(p: Target) -> Updated:
    v = p.state("momentum")
    w, g = p.squares(p.w), p.squares(p.g)
    yield
    rate = _trusted(p, w, g, p.numbers["coefficient"], p.numbers["weight_decay"])
    return p.apply(LarsOp, p.w, p.g, v, rate)


def _adafactor(p: Target) -> Updated:
    """As torch.optim.Adafactor: the second moment of a matrix is the product of the means of its
    rows and columns (Shazeer and Stern, 2018)."""
    b, numbers, t = p.b, p.numbers, plain(p.w)
    rank, size = len(t.get_shape()), max(1, prod(t.get_shape()))
    fresh = p.clock.power("fresh", numbers["beta2_decay"])
    rate = b.value(nn.MinOp, p.lr, p.clock.power("bound", -0.5))

    def at_least(x: SSAValue, number: float) -> SSAValue:
        return b.value(nn.ClampOp, x, props={"min": float_attr(number)})

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
        rows, columns = ([d for d in range(rank) if d != gone] for gone in (rank - 1, rank - 2))
        old = p.state("row_var", rows), p.state("col_var", columns)
        means = [b.complete(b.reduce(squares, "mean", [d])) for d in (rank - 1, rank - 2)]
        yield
        row, column = states = [mix(x, y) for x, y in zip(old, means, strict=True)]
        mean = b.complete(b.reduce(row, "mean", [rank - 2], keep=True))
        yield
        row = b.div(row, at_least(mean, numbers["eps1"]))
        variance = b.mul(
            b.broadcast(row, rows, t.get_shape(), like=p.w),
            b.broadcast(column, columns, t.get_shape(), like=p.w),
        )
    direction = b.mul(p.g, b.value(nn.RsqrtOp, at_least(variance, numbers["eps1"] ** 2)))
    direction.name_hint = "direction"
    u = p.squares(direction)
    yield
    beyond = at_least(b.scale(root_mean(u), 1 / numbers["clip"]), 1.0)
    rate = b.mul(rate, at_least(root_mean(w), numbers["eps2"]))
    before = p.w
    if decay := numbers["weight_decay"]:
        before = p.times(p.w, b.sub(b.constant(1.0, f64), b.scale(p.lr, decay)))
    return [*p.plain_step(before, direction, b.div(rate, beyond)), *states]


Optimizer = Callable[[Target], Updated]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": _elementwise(SgdOp),
    "momentum": _elementwise(MomentumOp),
    "nesterov": _elementwise(NesterovOp),
    "adam": _elementwise(AdamOp),
    "adamw": _elementwise(AdamWOp),
    "lamb": _lamb,
    "lars": _lars,
    "adafactor": _adafactor,
}
