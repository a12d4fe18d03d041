"""The bases of updates, which are elementwise in any layout, and the shared scalars in double
precision. The update op of an optimizer is in its file in optimizers/.

    %lr = train.learning_rate %count <cosine, rate = 0.1, steps = 100, end = 0.0, warmup = 0>
    %w_1, %v_1 = train.momentum %w, %g, %v, %lr momentum 0.9 weight_decay 0.0
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, TensorType, f32, f64, i1, i64
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Layout
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, Types
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.types import float_element
from shardir.dialects.train.options import Point, ScheduleAttr, points_of

SHARED_SCALAR = tensor(f64, ())
"""The type of scalars shared by all parameters."""

FLOAT = FloatAttr.constr(type=f64)


class Several(Elementwise, ABC):
    """An elementwise op with several results of one shape."""

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        one = super().rule(operands, results[:1], props)
        return replace(one, results=one.results * len(results))


# ---- updates ----


class Update(Several, ABC):
    """Computes a parameter and its states after one step, from their old values, the gradient and
    `SCALARS`."""

    STATES: ClassVar[tuple[str, ...]] = ()
    """The names of the states: operands after the gradient, results after the new parameter."""
    SCALARS: ClassVar[tuple[str, ...]] = ("lr",)
    """The last operands, of type SHARED_SCALAR."""

    @classmethod
    def runs_on_host(cls, operands: Sequence[Layout], results: Sequence[Layout | None]) -> bool:
        """Whether the states are on host; without states, whether the gradient is."""
        n = len(operands) - len(cls.SCALARS)
        return all(l.host for l in operands[2:n] or operands[1:2])

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        n = len(operands) - len(cls.SCALARS)
        float_element(cls.name, operands[:n])
        for t in operands[1:n]:
            if t != operands[0]:
                raise ShardirError(
                    coded(
                        "T6",
                        f"expected a gradient or state of the parameter's type, {operands[0]}, "
                        f"got {t}",
                        use="use the parameter's type",
                    )
                )
        for name, t in zip(cls.SCALARS, operands[n:], strict=True):
            if t != SHARED_SCALAR:
                raise ShardirError(coded("T5", f"expected {name} of type {SHARED_SCALAR}, got {t}"))
        return [operands[0], *operands[2:n]]


@op_definition
class SgdOp(Update):
    """w - lr (g + weight_decay w)"""

    name = "train.sgd"
    FLOPS: ClassVar[int] = 4
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    lr = operand_def(TensorType)
    weight_decay = prop_def(FLOAT)
    new_w = result_def(TensorType)
    assembly_format = f"$w `,` $g `,` $lr `weight_decay` $weight_decay {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        w, g, lr = arrays
        decay = float_of(self, "weight_decay")
        return w - lr * (g + decay * w if decay else g)


class WithVelocity(Update, ABC):
    """An update with one state, the velocity."""

    FLOPS: ClassVar[int] = 6
    STATES: ClassVar[tuple[str, ...]] = ("momentum",)
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    v = operand_def(TensorType)
    lr = operand_def(TensorType)
    momentum = prop_def(FLOAT)
    weight_decay = prop_def(FLOAT)
    new_w = result_def(TensorType)
    new_v = result_def(TensorType)
    assembly_format = (
        "$w `,` $g `,` $v `,` $lr `momentum` $momentum `weight_decay` $weight_decay " + STRATEGY
    )

    def decayed(self, w: Array, g: Array) -> Array:
        decay = float_of(self, "weight_decay")
        return g + decay * w if decay else g


class WithMoments(Update, ABC):
    """An update with m and v, the running means of the gradient and of its square. At step
    t = 1, 2, ... `correction1` is 1 - beta1^t and `correction2` 1 - beta2^t."""

    FLOPS: ClassVar[int] = 16
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    SCALARS: ClassVar[tuple[str, ...]] = ("correction1", "correction2")
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    m = operand_def(TensorType)
    v = operand_def(TensorType)
    correction1 = operand_def(TensorType)
    correction2 = operand_def(TensorType)
    beta1 = prop_def(FLOAT)
    beta2 = prop_def(FLOAT)
    eps = prop_def(FLOAT)
    weight_decay = prop_def(FLOAT)
    new_w = result_def(TensorType)
    new_m = result_def(TensorType)
    new_v = result_def(TensorType)

    def moments(self, g: Array, m: Array, v: Array) -> tuple[Array, Array]:
        beta1, beta2 = float_of(self, "beta1"), float_of(self, "beta2")
        return beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g

    def direction(self, m: Array, v: Array, correction1: Array, correction2: Array) -> Array:
        return m / correction1 / (np.sqrt(v / correction2) + float_of(self, "eps"))


WITH_MOMENTS = "$w `,` $g `,` $m `,` $v `,` $correction1 `,` $correction2 "
MOMENTS = (
    "`beta1` $beta1 `beta2` $beta2 `eps` $eps `weight_decay` $weight_decay " + STRATEGY
)  # fmt: skip


class WithRate(Update, ABC):
    """An update with a learning rate as its last operand. It must be the last base of a class:
    operands are in the order of the bases."""

    lr = operand_def(TensorType)


class Adams(WithMoments, WithRate, ABC):
    """An update of Adam or AdamW."""

    SCALARS: ClassVar[tuple[str, ...]] = (*WithMoments.SCALARS, "lr")
    assembly_format = WITH_MOMENTS + "`,` $lr " + MOMENTS


# ---- scalars ----


class Scalar(Several, ABC):
    """Computes scalars of the types RESULTS from scalars of the types OPERANDS."""

    OPERANDS: ClassVar[tuple[TensorType, ...]]
    RESULTS: ClassVar[tuple[TensorType, ...]] = (SHARED_SCALAR,)

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        if tuple(operands) != cls.OPERANDS:
            wanted, got = (", ".join(map(str, ts)) for ts in (cls.OPERANDS, operands))
            raise ShardirError(coded("T5", f"expected operands of types {wanted}, got {got}"))
        return list(cls.RESULTS)


COUNT = tensor(i64, ())


@op_definition
class LearningRateOp(Scalar):
    """The learning rate of a step, after `done` steps"""

    name = "train.learning_rate"
    OPERANDS: ClassVar[tuple[TensorType, ...]] = (COUNT,)
    done = operand_def(TensorType)
    schedule = prop_def(ScheduleAttr)
    lr = result_def(TensorType)
    assembly_format = f"$done $schedule {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        done, n = arrays[0].astype(np.float64), self.schedule.values
        if self.schedule.kind == "points":
            return np.asarray(n["rate"] * _factor(points_of(n["at"]), float(done)))
        rate, warmup = n["rate"], n["warmup"]
        part = min(1.0, max(0.0, done - warmup) / (n["steps"] - warmup)) if "steps" in n else 0.0
        match self.schedule.kind:
            case "cosine":
                rate = n["end"] + (rate - n["end"]) * 0.5 * (1 + np.cos(np.pi * part))
            case "polynomial":
                rate = n["end"] + (rate - n["end"]) * (1 - part) ** n["power"]
            case "step":
                rate = rate * n["factor"] ** np.floor(max(0.0, done - warmup) / n["every"])
            case "inverse_sqrt":
                rate = rate * np.sqrt(max(1, warmup) / max(1, warmup, done + 1))
        return np.asarray(rate * min(1.0, (done + 1) / max(1, warmup)))


def _factor(points: Sequence[Point], done: float) -> float:
    """Return the factor of the learning rate after `done` steps."""
    for a, b in pairwise(points):
        if a.step <= done < b.step:
            part = (done - a.step) / (b.step - a.step)
            left = 0.5 * (1 + np.cos(np.pi * part)) if a.is_cosine else 1 - part
            return b.factor + (a.factor - b.factor) * left
    return points[0 if done < points[0].step else -1].factor


@op_definition
class BiasCorrectionOp(Scalar):
    """1 - beta^step: the sum of the weights of a running mean that starts at zero. The step is i64,
    or a float, as some programs count"""

    name = "train.bias_correction"
    OPERANDS: ClassVar[tuple[TensorType, ...]] = (COUNT,)
    step = operand_def(TensorType)
    beta = prop_def(FLOAT)
    out = result_def(TensorType)
    assembly_format = f"$step `beta` $beta {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        if tuple(operands) in ((tensor(f32, ()),), (SHARED_SCALAR,)):
            return list(cls.RESULTS)
        return super().infer(operands, props)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.asarray(1 - float_of(self, "beta") ** arrays[0].astype(np.float64))


@op_definition
class TrustRatioOp(Scalar):
    """coefficient |w| / (|u| + weight_decay |w|), from the squares of the norms; 1 where a norm is
    0"""

    name = "train.trust_ratio"
    OPERANDS: ClassVar[tuple[TensorType, ...]] = (SHARED_SCALAR, SHARED_SCALAR)
    w = operand_def(TensorType)
    u = operand_def(TensorType)
    coefficient = prop_def(FLOAT)
    weight_decay = prop_def(FLOAT)
    ratio = result_def(TensorType)
    assembly_format = (
        f"$w `,` $u `coefficient` $coefficient `weight_decay` $weight_decay {STRATEGY}"
    )

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        w, u = np.sqrt(arrays)
        ratio = float_of(self, "coefficient") * w / (u + float_of(self, "weight_decay") * w)
        return np.where((w > 0) & (u > 0), ratio, 1.0)


@op_definition
class NextLossScaleOp(Scalar):
    """The new loss scale and the number of good steps since it changed. A step that is not finite
    multiplies the scale by `backoff`; `interval` good steps multiply it by `growth`, if that is
    finite"""

    name = "train.next_loss_scale"
    OPERANDS: ClassVar[tuple[TensorType, ...]] = (tensor(f32, ()), COUNT, tensor(i1, ()))
    RESULTS: ClassVar[tuple[TensorType, ...]] = (tensor(f32, ()), COUNT)
    scale = operand_def(TensorType)
    good = operand_def(TensorType)
    finite = operand_def(TensorType)
    growth = prop_def(FLOAT)
    backoff = prop_def(FLOAT)
    interval = prop_def(IntegerAttr.constr(type=i64))
    new_scale = result_def(TensorType)
    new_good = result_def(TensorType)
    assembly_format = (
        "$scale `,` $good `,` $finite `growth` $growth `backoff` $backoff `interval` $interval "
        + STRATEGY
    )

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        scale, good, finite = arrays
        if not finite:
            return scale * float_of(self, "backoff"), np.zeros_like(good)
        if good + 1 < self.interval.value.data:
            return scale, good + 1
        grown = scale * float_of(self, "growth")
        return np.where(np.isfinite(grown), grown, scale), np.zeros_like(good)


SCALARS: list[type[Scalar]] = [LearningRateOp, BiasCorrectionOp, TrustRatioOp, NextLossScaleOp]
