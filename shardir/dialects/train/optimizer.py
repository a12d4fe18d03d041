"""What every optimizer is made of: its record, the parameter on its way through a step, and the
scalars that all parameters share. Each optimizer is a file in optimizers/.

An update is a generator. It hands control back where communication that it placed may go
together with that of the other parameters: `distributed-autodiff` runs the generators of all of
them side by side. It returns the new parameter, followed by the new states.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

from xdsl.dialects.builtin import BFloat16Type, Float16Type, f32, f64
from xdsl.ir import Attribute, SSAValue

from shardir.dialects import nn
from shardir.dialects.builder import Builder
from shardir.dialects.nn.base import float_attr, unsharded_type
from shardir.dialects.text import OptionsAttr, OptionSpec
from shardir.dialects.train.options import ScheduleAttr
from shardir.dialects.train.updates import (
    BiasCorrectionOp,
    LearningRateOp,
    SgdOp,
    TrustRatioOp,
    Update,
)

Updated = Generator[None, None, list[SSAValue]]


LR = OptionSpec(float, minimum=0.0, nested=ScheduleAttr.completed)
DECAY = OptionSpec(float, 0.0, minimum=0.0)
BETA1, BETA2 = (OptionSpec(float, x, minimum=0.0, maximum=1.0, ends="[)") for x in (0.9, 0.999))
"""Hyperparameters that several optimizers have."""


class StepScalars:
    """The numbers that all parameters share, each made once, by the first who asks.

    `counted` gives the count of the steps done, a state of the step's.
    """

    def __init__(self, b: Builder, optimizer: OptionsAttr, counted: Callable[[], SSAValue]):
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
        one = self.b.constant(1, unsharded_type(self.done).element_type)
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
class ParameterStep:
    """One parameter on its way through a step."""

    b: Builder
    scalars: StepScalars
    w: SSAValue
    g: SSAValue
    numbers: dict[str, float]
    """The optimizer's options, with the parameter's own `weight_decay`."""
    lr: SSAValue
    new_state: Callable[[str, Sequence[int]], SSAValue]

    def state(self, name: str, dims: Sequence[int] | None = None) -> SSAValue:
        """The state `name`, of the parameter's shape and layout; of its dimensions `dims` only."""
        rank = len(unsharded_type(self.w).get_shape())
        return self.new_state(name, range(rank) if dims is None else dims)

    def scalar(self, name: str) -> SSAValue:
        """One of the SCALARS of an update."""
        if name == "lr":
            return self.lr
        return self.scalars.correction(name, self.numbers[name.replace("correction", "beta")])

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
        return self.b.mul(x, self.b.convert(number, unsharded_type(x).element_type))


def wide(b: Builder, x: SSAValue) -> SSAValue:
    """x in a type that holds sums of its squares."""
    narrow = isinstance(unsharded_type(x).element_type, BFloat16Type | Float16Type)
    return b.convert(x, f32) if narrow else x


def sum_of_squares(b: Builder, x: SSAValue) -> SSAValue:
    """The sum of the squares of all elements: a partial sum where x is split."""
    x = wide(b, x)
    return b.reduce(b.mul(x, x), "sum", range(len(unsharded_type(x).get_shape())))


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: its hyperparameters with their defaults and bounds, and its update as ops."""

    hyperparameters: dict[str, OptionSpec]
    update: Callable[[ParameterStep], Updated]


def adam_hyperparameters(eps: float, weight_decay: float) -> dict[str, OptionSpec]:
    """The hyperparameters of Adam and what is built on its moments."""
    return {
        "lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": OptionSpec(float, eps, minimum=0.0),
        "weight_decay": OptionSpec(float, weight_decay, minimum=0.0),
    }  # fmt: skip


def elementwise(kind: type[Update]) -> Callable[[ParameterStep], Updated]:
    """The update that is one op, from the parameter's states and shared scalars."""

    def update(p: ParameterStep) -> Updated:
        states = [p.state(n) for n in kind.STATES]
        return p.apply(kind, p.w, p.g, *states, *map(p.scalar, kind.SCALARS))
        yield  # what makes it a generator: it never hands back

    return update


def trusted(
    p: ParameterStep, w: SSAValue, u: SSAValue, coefficient: float, decay: float
) -> SSAValue:
    """The learning rate times the trust ratio, from the squares of norms."""
    w, u = p.b.convert(w, f64), p.b.convert(u, f64)
    props: dict[str, Attribute] = {
        "coefficient": float_attr(coefficient), "weight_decay": float_attr(decay),
    }  # fmt: skip
    return p.b.mul(p.lr, p.b.value(TrustRatioOp, w, u, props=props))
