"""The common parts of optimizers: their record, one parameter's step, and the scalars that all
parameters share. Each optimizer is a file in optimizers/.

An update is a generator. It yields after each collective, so that the collectives of all parameters
can be fused: `distributed-autodiff` advances the generators of all parameters together. It returns
the new parameter, followed by the new states.
"""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from xdsl.dialects.builtin import f64, i64
from xdsl.ir import Attribute, SSAValue

from shardir.diagnostics import ShardirError, coded
from shardir.dialects import nn
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.properties import float_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.text import OptionsAttr, OptionSpec
from shardir.dialects.train.options import InitAttr, ScheduleAttr
from shardir.dialects.train.updates import (
    BiasCorrectionOp,
    LearningRateOp,
    SgdOp,
    TrustRatioOp,
    Update,
)

Updated = Generator[None, None, list[SSAValue]]

FirstValue = float | InitAttr
"""The elements of a state before step 1."""

RULES = "rules"
"""The optimizer of a step whose parameters all have rules."""

RULE_OF = "write train.rule = @function at the parameter"


LR = OptionSpec(float, minimum=0.0, nested=ScheduleAttr.completed)
DECAY = OptionSpec(float, 0.0, minimum=0.0)
BETA1, BETA2 = (OptionSpec(float, x, minimum=0.0, maximum=1.0, ends="[)") for x in (0.9, 0.999))
"""Hyperparameters of several optimizers."""


class StepScalars:
    """The scalars that all parameters of a step share, created at their first use.

    Args:
        new_state: adds a scalar state of the step, from its name, element type and initial value.
    """

    def __init__(
        self, b: OpBuilder, optimizer: OptionsAttr,
        new_state: Callable[[str, Attribute, float], SSAValue],
    ):  # fmt: skip
        self.b, self.optimizer, self.new_state = b, optimizer, new_state
        self._created: dict[tuple[str, Hashable], SSAValue] = {}
        self.states: dict[str, tuple[SSAValue, SSAValue]] = {}
        """The states of the step, except the number of steps: values before and after it."""
        self.given: SSAValue | None = None
        """The learning rate, if it is a state, which no step changes."""

    def state(
        self, name: str, element: Attribute, first: float, update: Callable[[SSAValue], SSAValue]
    ) -> SSAValue:
        """The new value of a scalar state of the step; `first` is its value before step 1."""
        if name not in self.states:
            before = self.new_state(name, element, first)
            after = update(before)
            after.name_hint = before.name_hint
            self.states[name] = before, after
        return self.states[name][1]

    def once(self, name: str, value: Hashable, make: Callable[[], SSAValue]) -> SSAValue:
        key = name, value
        if key not in self._created:
            self._created[key] = created = make()
            created.name_hint = created.name_hint or name
        return self._created[key]

    @cached_property
    def done(self) -> SSAValue:
        """The number of steps done before this one."""
        return self.new_state("count", i64, 0.0)

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

    @cached_property
    def done_as_float(self) -> SSAValue:
        """The number of steps done before this one as a float."""
        return self.b.convert(self.done, f64)

    @property
    def is_used(self) -> bool:
        """Whether the number of steps is used."""
        return "done" in self.__dict__

    def rate(self, factor: float = 1.0, schedule: ScheduleAttr | None = None) -> SSAValue:
        """The learning rate of this step, or that of a schedule, times `factor`."""
        if factor != 1.0:
            key = factor, schedule
            return self.once("lr", key, lambda: self.b.scale(self.rate(1.0, schedule), factor))
        if schedule is not None:
            return self.once("lr", schedule, lambda: self._scheduled(schedule))
        return self.given or self.once("lr", 1.0, self._rate)

    def _scheduled(self, schedule: ScheduleAttr) -> SSAValue:
        return self.b.value(LearningRateOp, self.done, props={"schedule": schedule})

    def _rate(self) -> SSAValue:
        lr = self.optimizer.values["lr"]
        if isinstance(lr, float):
            return self.b.constant(lr, f64)
        schedule = ScheduleAttr(lr)
        if schedule.kind == "given":
            self.given = self.new_state("lr", f64, schedule.values["rate"])
            return self.given
        return self._scheduled(schedule)

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
    """The update of one parameter in a step."""

    b: OpBuilder
    scalars: StepScalars
    w: SSAValue
    g: SSAValue
    hyperparameters: dict[str, float]
    """The optimizer's hyperparameters without `lr`, with the parameter's own `weight_decay`."""
    lr: SSAValue
    new_state: Callable[[str, Sequence[int], FirstValue, Attribute], SSAValue]
    rule: Callable[["ParameterStep"], list[SSAValue]] | None = None
    """The update by the parameter's own rule, if it has one."""

    def state(
        self, name: str, dims: Sequence[int] | None = None, first: FirstValue = 0.0,
        element: Attribute | None = None,
    ) -> SSAValue:  # fmt: skip
        """The state `name`, with the shape and layout of the parameter, or of its dimensions
        `dims`, and its element type or another one. Its elements are `first` before step 1."""
        t = unsharded_type(self.w)
        dims = range(len(t.get_shape())) if dims is None else dims
        return self.new_state(name, dims, first, element or t.element_type)

    def by_rule(self) -> list[SSAValue]:
        """The new parameter and its new states by its rule."""
        if self.rule is None:
            raise ShardirError(
                coded("G18", "expected a rule of each parameter, got one without", use=RULE_OF)
            )
        return self.rule(self)

    def scalar(self, name: str) -> SSAValue:
        """One of the `SCALARS` of an update."""
        if name == "lr":
            return self.lr
        return self.scalars.correction(
            name, self.hyperparameters[name.replace("correction", "beta")]
        )

    def apply(self, kind: type[Update], *operands: SSAValue) -> list[SSAValue]:
        """The results of an update op with the parameter's hyperparameters."""
        names = [n for n in kind.get_irdl_definition().properties if n in self.hyperparameters]
        props = {n: float_attr(self.hyperparameters[n]) for n in names}
        results: list[SSAValue] = [*self.b.op(kind, *operands, props=props).results]
        for new, old in zip(results, (operands[0], *operands[2:]), strict=False):
            new.name_hint = old.name_hint
        return results

    def without_decay(self) -> "ParameterStep":
        """This step without weight decay, for gradients that include it."""
        return replace(self, hyperparameters={**self.hyperparameters, "weight_decay": 0.0})

    def descend(self, w: SSAValue, direction: SSAValue, rate: SSAValue) -> list[SSAValue]:
        """w - rate direction"""
        no_decay = {"weight_decay": float_attr(0.0)}
        new = self.b.value(SgdOp, w, direction, rate, props=no_decay)
        new.name_hint = w.name_hint
        return [new]

    # ---- over all elements ----

    def squares(self, x: SSAValue) -> SSAValue:
        """The sum of the squares of all elements, reduced over devices."""
        return self.b.complete(sum_of_squares(self.b, x))

    def times(self, x: SSAValue, scalar: SSAValue) -> SSAValue:
        """x times a scalar in double precision."""
        return self.b.mul(x, self.b.convert(scalar, unsharded_type(x).element_type))


def sum_of_squares(b: OpBuilder, x: SSAValue) -> SSAValue:
    """The sum of the squares of all elements; a partial sum if x is sharded."""
    x = b.widen(x)
    return b.reduce(b.mul(x, x), "sum", range(len(unsharded_type(x).get_shape())))


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: its hyperparameters with their defaults and bounds, and its update as ops."""

    hyperparameters: dict[str, OptionSpec]
    update: Callable[[ParameterStep], Updated]


def adam_hyperparameters(eps: float, weight_decay: float) -> dict[str, OptionSpec]:
    """The hyperparameters of Adam and of optimizers that use its moments."""
    return {
        "lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": OptionSpec(float, eps, minimum=0.0),
        "weight_decay": OptionSpec(float, weight_decay, minimum=0.0),
    }  # fmt: skip


def as_generator(
    update: Callable[[ParameterStep], list[SSAValue]],
) -> Callable[[ParameterStep], Updated]:
    """Turn an update without communication into a generator."""

    def generator(p: ParameterStep) -> Updated:
        yield from ()  # makes it a generator
        return update(p)

    return generator


def elementwise(kind: type[Update]) -> Callable[[ParameterStep], Updated]:
    """The update by one op, which reads the parameter's states and the shared scalars."""

    def update(p: ParameterStep) -> list[SSAValue]:
        states = [p.state(n) for n in kind.STATES]
        return p.apply(kind, p.w, p.g, *states, *map(p.scalar, kind.SCALARS))

    return as_generator(update)


def trust_scaled_rate(
    p: ParameterStep, w: SSAValue, u: SSAValue, coefficient: float, decay: float
) -> SSAValue:
    """The learning rate times the trust ratio; `w` and `u` are squares of norms."""
    w, u = p.b.convert(w, f64), p.b.convert(u, f64)
    props: dict[str, Attribute] = {
        "coefficient": float_attr(coefficient), "weight_decay": float_attr(decay),
    }  # fmt: skip
    return p.b.mul(p.lr, p.b.value(TrustRatioOp, w, u, props=props))
