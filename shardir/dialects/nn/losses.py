"""Elementwise losses and their reductions.

`nn.binary_cross_entropy` and `nn.binary_cross_entropy_with_logits` have one loss per element. Each
`nn.*_loss` begins with its reduction:

    %l = nn.mse_loss <mean> %x, %y : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<f32>

A mean divides by the number of elements, or of labels that count, in the global batch, however it
is split.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    BFloat16Type,
    Float16Type,
    FloatAttr,
    TensorType,
    UnitAttr,
    f32,
    f64,
    i64,
)
from xdsl.ir import SSAValue
from xdsl.irdl import (
    irdl_attr_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.activation import SigmoidOp, SoftplusOp
from shardir.dialects.nn.arithmetic import AbsOp, MaxOp, MinOp
from shardir.dialects.nn.base import STRATEGY, Array, Composite, Device, Props, Types, factor_names
from shardir.dialects.nn.elementary import ExpOp, LogOp, SquareOp
from shardir.dialects.nn.elementwise import Binary
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.types import check_not_empty, float_element, unsharded_type
from shardir.dialects.text import WordAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


# ---- one loss per element ----


class _PerElement(Binary, ABC):
    PRECISION: ClassVar[str] = "wide"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return float_element(cls.name, operands)


@op_definition
class BinaryCrossEntropyOp(_PerElement):
    """-(y log x + (1 - y) log(1 - x)) of a probability x. As in torch, logarithms are clamped to at
    least -100, except in the derivative with respect to y"""

    name = "nn.binary_cross_entropy"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, y = arrays
        return (y - 1) * np.maximum(np.log(1 - x), -100) - y * np.maximum(np.log(x), -100)

    def partials(self, b: "OpBuilder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        x, y = self.lhs, self.rhs
        complement = b.sub(b.scalar(1.0, x), x)
        # As in torch, 1e-12 in f32; but f16 has no such number, and torch divides by 0 there.
        half = isinstance(unsharded_type(x).element_type, Float16Type)
        floor = 6e-8 if half else float(np.float32(1e-12))
        dx = b.div(b.sub(x, y), b.value(MaxOp, b.mul(x, complement), b.scalar(floor, x)))
        return b.mul(dy, dx), b.mul(dy, b.sub(b.value(LogOp, complement), b.value(LogOp, x)))


@op_definition
class BinaryCrossEntropyWithLogitsOp(_PerElement):
    """-(y log s + (1 - y) log(1 - s)), where s is the sigmoid of x"""

    name = "nn.binary_cross_entropy_with_logits"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, y = arrays
        return np.logaddexp(x, np.zeros((), x.dtype)) - x * y

    def partials(self, b: "OpBuilder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        dx = b.sub(b.value(SigmoidOp, self.lhs), self.rhs)
        return b.mul(dy, dx), b.neg(b.mul(dy, self.lhs))


# ---- reduced losses ----


@irdl_attr_definition
class LossReductionAttr(WordAttr):
    """`<none>`, `<mean>` or `<sum>`."""

    name = "nn.loss_reduction"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return ("none", "mean", "sum")


class Loss(Composite, ABC):
    """A loss for each element or label, reduced over all of them."""

    PRECISION: ClassVar[str] = "wide"

    reduction = prop_def(LossReductionAttr)
    out = result_def(TensorType)

    @abstractmethod
    def losses(self, b: "OpBuilder") -> SSAValue:
        """One loss per element or label."""

    def counts(self, b: "OpBuilder") -> SSAValue | None:
        """The i1 mask of the losses that count in a mean; None if all do."""
        return None

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        losses, how = self.losses(b), self.reduction.data
        t = unsharded_type(losses)
        dims = range(len(t.get_shape()))
        if how == "none":
            return (losses,)
        counts = self.counts(b) if how == "mean" else None
        if counts is None:
            return (b.reduce(losses, how, dims),)
        # The number of labels and the sum of losses may overflow 16 bits.
        short = isinstance(t.element_type, BFloat16Type | Float16Type)
        element = f32 if short else t.element_type
        number = b.convert(b.reduce(b.convert(counts, i64), "sum", dims), element)
        total = b.reduce(b.convert(losses, element), "sum", dims)
        return (b.convert(b.div(total, number), t.element_type),)

    @classmethod
    def reduced(cls, props: Props, element: Any, shape: tuple[int, ...]) -> list[TensorType]:
        """The result's type, from the element type and shape of the losses."""
        how = props["reduction"]
        assert isinstance(how, LossReductionAttr)
        if how.data == "mean":
            check_not_empty(prod(shape), "a mean")
        return [tensor(element, shape if how.data == "none" else ())]


class _ElementLoss(Loss, ABC):
    """A loss of x and a target y of equal shape."""

    x = operand_def(TensorType)
    y = operand_def(TensorType)
    assembly_format = f"$reduction $x `,` $y {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element = float_element(cls.name, operands)
        x, y = (t.get_shape() for t in operands)
        if x != y:
            message = f"expected x and y of one shape, got {list(x)} and {list(y)}"
            raise ShardirError(coded("T6", message, use=""))
        return cls.reduced(props, element, x)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shapes = [t.get_shape() for t in (*operands, *results)]
        n = factor_names(len(shapes[0]))
        return Factors.of([n, n], [n if shapes[2] == shapes[0] else []], shapes)

    def distance(self, b: "OpBuilder") -> SSAValue:
        """|x - y|"""
        return b.value(AbsOp, b.sub(self.x, self.y))


@op_definition
class MseLossOp(_ElementLoss):
    """(x - y)^2"""

    name = "nn.mse_loss"

    def losses(self, b: "OpBuilder") -> SSAValue:
        return b.value(SquareOp, b.sub(self.x, self.y))


@op_definition
class L1LossOp(_ElementLoss):
    """|x - y|"""

    name = "nn.l1_loss"

    def losses(self, b: "OpBuilder") -> SSAValue:
        return self.distance(b)


class _Huber(_ElementLoss, ABC):
    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        for name in ("delta", "beta"):
            limit = props.get(name)
            if isinstance(limit, FloatAttr) and not limit.value.data > 0:
                message = f"expected {name} above 0, got {limit.value.data}"
                raise ShardirError(coded("T10", message))
        return super().infer(operands, props)

    def huber(self, b: "OpBuilder", limit: float) -> SSAValue:
        """m (d - m / 2), where d = |x - y| and m = min(d, limit)."""
        d = self.distance(b)
        m = b.value(MinOp, d, b.scalar(limit, d))
        return b.mul(m, b.sub(d, b.scale(m, 0.5)))


@op_definition
class HuberLossOp(_Huber):
    """(x - y)^2 / 2 where |x - y| is below delta, else delta (|x - y| - delta / 2)"""

    name = "nn.huber_loss"
    delta = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$reduction $x `,` $y `delta` $delta {STRATEGY}"

    def losses(self, b: "OpBuilder") -> SSAValue:
        return self.huber(b, float_of(self, "delta"))


@op_definition
class SmoothL1LossOp(_Huber):
    """(x - y)^2 / (2 beta) where |x - y| is below beta, else |x - y| - beta / 2"""

    name = "nn.smooth_l1_loss"
    beta = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$reduction $x `,` $y `beta` $beta {STRATEGY}"

    def losses(self, b: "OpBuilder") -> SSAValue:
        beta = float_of(self, "beta")
        return b.scale(self.huber(b, beta), 1 / beta)


@op_definition
class BceLossOp(_ElementLoss):
    """The binary cross entropies of probabilities x"""

    name = "nn.bce_loss"

    def losses(self, b: "OpBuilder") -> SSAValue:
        return b.value(BinaryCrossEntropyOp, self.x, self.y)


@op_definition
class BceWithLogitsLossOp(_ElementLoss):
    """The binary cross entropies of the sigmoids of x"""

    name = "nn.bce_with_logits_loss"

    def losses(self, b: "OpBuilder") -> SSAValue:
        return b.value(BinaryCrossEntropyWithLogitsOp, self.x, self.y)


@op_definition
class SoftMarginLossOp(_ElementLoss):
    """log(1 + e^(-x y))"""

    name = "nn.soft_margin_loss"

    def losses(self, b: "OpBuilder") -> SSAValue:
        return b.value(SoftplusOp, b.neg(b.mul(self.x, self.y)))


@op_definition
class KlDivLossOp(_ElementLoss):
    """y (log y - x) of log-probabilities x. Where y is 0, it is 0 and its derivative by y is -x
    (NaN in torch). With `log_target`, e^y (y - x)"""

    name = "nn.kl_div_loss"
    log_target = opt_prop_def(UnitAttr)
    assembly_format = f"$reduction $x `,` $y (`log_target` $log_target^)? {STRATEGY}"

    def losses(self, b: "OpBuilder") -> SSAValue:
        x, y = self.x, self.y
        if self.log_target is not None:
            return b.mul(b.value(ExpOp, y), b.sub(y, x))
        is_zero = b.compare("eq", y, b.scalar(0.0, y))
        log = b.value(LogOp, b.select(is_zero, b.scalar(1.0, y), y))
        return b.mul(y, b.sub(log, x))
