"""Losses.

`nn.cross_entropy`, `nn.binary_cross_entropy` and `nn.binary_cross_entropy_with_logits` give one
loss per label or element. Each `nn.*_loss` reduces as its first word says:

    %l = nn.mse_loss <mean> %x, %y : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<f32>
    %l = nn.cross_entropy_loss <mean> %z, %labels ignore -100 : (...) -> tensor<f32>

A mean divides by the number of all elements, or of all labels that count, of the whole batch,
wherever its parts lie.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    BFloat16Type,
    Float16Type,
    FloatAttr,
    IntegerAttr,
    TensorType,
    UnitAttr,
    f32,
    f64,
    i64,
)
from xdsl.ir import SSAValue
from xdsl.irdl import (
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import Factors
from shardir.dialects.dist import tensor
from shardir.dialects.nn.activation import SigmoidOp, SoftplusOp
from shardir.dialects.nn.arithmetic import AbsOp, ExpOp, LogOp, MaxOp, MinOp, SquareOp
from shardir.dialects.nn.base import (
    STRATEGY,
    Array,
    Composite,
    Place,
    Props,
    TensorOp,
    Types,
    float_of,
    letters,
    plain,
)
from shardir.dialects.nn.elementwise import Binary, needs_float
from shardir.dialects.nn.indexing import PickGradOp, PickOp, needs_indices
from shardir.dialects.nn.normalisation import shifted_exp, softmax
from shardir.dialects.text import WordAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import Builder


# ---- one loss per label ----


class _OfLabels(TensorOp, ABC):
    """An op on rows over classes, the last dimension, and the label of each row."""

    PRECISION: ClassVar[str] = "wide"

    @classmethod
    def check(cls, operands: Types, props: Props) -> tuple[Any, tuple[int, ...]]:
        """The element type and shape of the rows."""
        rows, labels = operands[:2]
        needs_indices(labels)
        if not rows.get_shape() or labels.get_shape() != rows.get_shape()[:-1]:
            raise ShardirError(
                f"[T1] the labels of {rows} have its shape but the last dimension, the classes"
            )
        return needs_float(cls.name, operands[:1]), rows.get_shape()

    @classmethod
    def names(cls, operands: Types) -> list[str]:
        return letters(len(operands[1].get_shape()))


def counted(b: "Builder", labels: SSAValue, ignore: int | None) -> SSAValue | None:
    """Which labels count (i1); None where all do."""
    if ignore is None:
        return None
    return b.compare("ne", labels, b.number(ignore, labels))


def where(b: "Builder", condition: SSAValue | None, x: SSAValue) -> SSAValue:
    """x where the condition holds, else 0; x without a condition."""
    if condition is None:
        return x
    return b.select(condition, x, b.number(0, x))


class _CrossEntropy(_OfLabels, ABC):
    FLOPS: ClassVar[int] = 5
    ignore = opt_prop_def(IntegerAttr.constr(type=i64))
    smoothing = opt_prop_def(FloatAttr.constr(type=f64))

    @classmethod
    def check(cls, operands: Types, props: Props) -> tuple[Any, tuple[int, ...]]:
        share = props.get("smoothing")
        if isinstance(share, FloatAttr) and not 0 <= share.value.data <= 1:
            raise ShardirError(f"[T10] smoothing is {share.value.data}; it is to be from 0 to 1")
        return super().check(operands, props)

    def options(self) -> tuple[int | None, float]:
        """The label that does not count, and the share of the loss that is spread over all
        classes."""
        ignore = self.ignore.value.data if self.ignore is not None else None
        return ignore, float_of(self, "smoothing") if self.smoothing is not None else 0.0

    def checked(self, labels: Array, classes: int) -> tuple[Array, Array]:
        """The labels, 0 in place of those that do not count, and which ones do."""
        ignore, _ = self.options()
        counts = labels != ignore if ignore is not None else np.ones(labels.shape, bool)
        safe = np.where(counts, labels, 0).astype(np.int64)
        if safe.size and (safe.min() < 0 or safe.max() >= classes):
            raise ShardirError(f"a label is out of range: there are {classes} classes")
        return safe, counts


def options_of(props: Props) -> Props:
    """Those of the properties that one cross entropy hands to another."""
    return {n: a for n, a in props.items() if n in ("ignore", "smoothing")}


_OPTIONS = "(`ignore` $ignore^)? (`smoothing` $smoothing^)?"


@irdl_op_definition
class CrossEntropyGradOp(_CrossEntropy):
    """(softmax(logits) - target) dy, where the target is 1 at the label, smoothed"""

    name = "nn.cross_entropy_grad"
    logits = operand_def(TensorType)
    labels = operand_def(TensorType)
    dy = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$logits `,` $labels `,` $dy {_OPTIONS} {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element, shape = cls.check(operands, props)
        if operands[2] != tensor(element, shape[:-1]):
            raise ShardirError(f"[T1] dy is {operands[2]}, it is to be one {element} per label")
        return [tensor(element, shape)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        n = cls.names(operands)
        return Factors.of(
            [[*n, "c"], n, n], [[*n, "c"]], [t.get_shape() for t in (*operands, *results)],
            replicate=["c"],
        )  # fmt: skip

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        logits, labels, dy = arrays
        classes = logits.shape[-1]
        safe, counts = self.checked(labels, classes)
        share = self.options()[1]
        hot = np.arange(classes) == safe[..., None]
        target = (1 - share) * hot + (share / classes if share else 0)
        out = (softmax(logits, -1) - target) * dy[..., None]
        return np.where(counts[..., None], out, 0).astype(logits.dtype)

    def decompose(self, b: "Builder") -> Sequence[SSAValue] | None:
        t = plain(self.logits)
        rows, classes = t.get_shape()[:-1], t.get_shape()[-1]
        ignore, share = self.options()
        _, exps, total = shifted_exp(b, self.logits, len(rows))
        counts = counted(b, self.labels, ignore)
        labels, dy = where(b, counts, self.labels), where(b, counts, self.dy)
        each = b.reshape(dy, (*rows, 1))
        spread = b.mul(b.div(exps, total), each)
        if share:
            spread = b.sub(spread, b.scale(each, share / classes))
            dy = b.scale(dy, 1 - share)
        target = b.value(PickGradOp, labels, dy, result=t, like=self.logits)
        return (b.sub(spread, target),)


@irdl_op_definition
class CrossEntropyOp(_CrossEntropy):
    """-log softmax(logits)[label], one loss per label; classes are the last dimension. It is 0 for
    the label `ignore`. `smoothing` is the share of the loss that is the mean over all classes"""

    name = "nn.cross_entropy"
    logits = operand_def(TensorType)
    labels = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$logits `,` $labels {_OPTIONS} {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element, shape = cls.check(operands, props)
        return [tensor(element, shape[:-1])]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        n = cls.names(operands)
        return Factors.of(
            [[*n, "c"], n], [n], [t.get_shape() for t in (*operands, *results)], replicate=["c"]
        )

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        logits, labels = arrays
        safe, counts = self.checked(labels, logits.shape[-1])
        share = self.options()[1]
        z = logits - logits.max(axis=-1, keepdims=True, initial=-np.inf)
        target = np.take_along_axis(z, safe[..., None], axis=-1)[..., 0]
        if share:
            target = (1 - share) * target + share * z.mean(axis=-1)
        return np.where(counts, np.log(np.exp(z).sum(axis=-1)) - target, 0)

    def pullback(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        props = options_of(self.properties)
        return b.value(CrossEntropyGradOp, self.logits, self.labels, dy, props=props), None

    def decompose(self, b: "Builder") -> Sequence[SSAValue] | None:
        shape = plain(self.logits).get_shape()
        last = len(shape) - 1
        ignore, share = self.options()
        shifted, _, total = shifted_exp(b, self.logits, last)
        counts = counted(b, self.labels, ignore)
        target = b.value(PickOp, shifted, where(b, counts, self.labels))
        if share:
            spread = b.scale(b.reduce(shifted, "mean", [last]), share)
            target = b.add(b.scale(target, 1 - share), spread)
        return (where(b, counts, b.sub(b.value(LogOp, b.reshape(total, shape[:-1])), target)),)


# ---- one loss per element ----


class _PerElement(Binary, ABC):
    PRECISION: ClassVar[str] = "wide"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return needs_float(cls.name, operands)


@irdl_op_definition
class BinaryCrossEntropyOp(_PerElement):
    """-(y log x + (1 - y) log(1 - x)) of a probability x; logarithms are at least -100, as torch
    has it"""

    name = "nn.binary_cross_entropy"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        x, y = arrays
        return (y - 1) * np.maximum(np.log(1 - x), -100) - y * np.maximum(np.log(x), -100)

    def partials(self, b: "Builder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
        x, y = self.lhs, self.rhs
        rest = b.sub(b.number(1.0, x), x)
        # 1e-12 is what torch has; f16 has nothing as small
        least = 6e-8 if isinstance(plain(x).element_type, Float16Type) else 1e-12
        dx = b.div(b.sub(x, y), b.value(MaxOp, b.mul(x, rest), b.number(least, x)))
        logs = [b.value(MaxOp, b.value(LogOp, v), b.number(-100.0, x)) for v in (rest, x)]
        return b.mul(dy, dx), b.mul(dy, b.sub(*logs))


@irdl_op_definition
class BinaryCrossEntropyWithLogitsOp(_PerElement):
    """-(y log s + (1 - y) log(1 - s)), where s is the sigmoid of x"""

    name = "nn.binary_cross_entropy_with_logits"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        x, y = arrays
        return np.logaddexp(x, np.zeros((), x.dtype)) - x * y

    def partials(self, b: "Builder", dy: SSAValue) -> tuple[SSAValue, SSAValue]:
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
    def losses(self, b: "Builder") -> SSAValue:
        """One loss per element or label."""

    def counts(self, b: "Builder") -> SSAValue | None:
        """Which of them a mean counts (i1); None where all do."""
        return None

    def decompose(self, b: "Builder") -> Sequence[SSAValue]:
        losses, how = self.losses(b), self.reduction.data
        t = plain(losses)
        dims = range(len(t.get_shape()))
        if how == "none":
            return (losses,)
        counts = self.counts(b) if how == "mean" else None
        if counts is None:
            return (b.reduce(losses, how, dims),)
        # Numbers of labels and sums of losses may be beyond what 16 bits can hold.
        short = isinstance(t.element_type, BFloat16Type | Float16Type)
        element = f32 if short else t.element_type
        number = b.convert(b.reduce(b.convert(counts, i64), "sum", dims), element)
        total = b.reduce(b.convert(losses, element), "sum", dims)
        return (b.convert(b.div(total, number), t.element_type),)

    @classmethod
    def reduced(cls, props: Props, element: Any, shape: tuple[int, ...]) -> list[TensorType]:
        """The result's type, from those of the losses."""
        how = props["reduction"]
        assert isinstance(how, LossReductionAttr)
        if how.data == "mean" and 0 in shape:
            raise ShardirError("[T8] there is no mean of nothing")
        return [tensor(element, shape if how.data == "none" else ())]


class _LabelLoss(Loss, _OfLabels, ABC):
    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element, shape = cls.check(operands, props)
        return cls.reduced(props, element, shape[:-1])

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        n = cls.names(operands)
        out = n if results[0].get_shape() == operands[1].get_shape() else []
        return Factors.of(
            [[*n, "c"], n], [out], [t.get_shape() for t in (*operands, *results)], replicate=["c"]
        )


@irdl_op_definition
class CrossEntropyLossOp(_LabelLoss, _CrossEntropy):
    """The cross entropies of all labels; a mean is over those that are not `ignore`"""

    name = "nn.cross_entropy_loss"
    logits = operand_def(TensorType)
    labels = operand_def(TensorType)
    assembly_format = f"$reduction $logits `,` $labels {_OPTIONS} {STRATEGY}"

    def losses(self, b: "Builder") -> SSAValue:
        return b.value(CrossEntropyOp, self.logits, self.labels, props=options_of(self.properties))

    def counts(self, b: "Builder") -> SSAValue | None:
        return counted(b, self.labels, self.options()[0])


@irdl_op_definition
class NllLossOp(_LabelLoss):
    """-x[label] for rows x of log-probabilities; a mean is over the labels that are not `ignore`"""

    name = "nn.nll_loss"
    x = operand_def(TensorType)
    labels = operand_def(TensorType)
    ignore = opt_prop_def(IntegerAttr.constr(type=i64))
    assembly_format = f"$reduction $x `,` $labels (`ignore` $ignore^)? {STRATEGY}"

    def losses(self, b: "Builder") -> SSAValue:
        counts = self.counts(b)
        picked = b.value(PickOp, self.x, where(b, counts, self.labels))
        return b.neg(where(b, counts, picked))

    def counts(self, b: "Builder") -> SSAValue | None:
        ignore = self.ignore.value.data if self.ignore is not None else None
        return counted(b, self.labels, ignore)


class _ElementLoss(Loss, ABC):
    """Of x and the target y, of one shape."""

    x = operand_def(TensorType)
    y = operand_def(TensorType)
    assembly_format = f"$reduction $x `,` $y {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element = needs_float(cls.name, operands)
        x, y = (t.get_shape() for t in operands)
        if x != y:
            raise ShardirError(f"[T6] shapes {list(x)} and {list(y)} differ")
        return cls.reduced(props, element, x)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shapes = [t.get_shape() for t in (*operands, *results)]
        n = letters(len(shapes[0]))
        return Factors.of([n, n], [n if shapes[2] == shapes[0] else []], shapes)

    def distance(self, b: "Builder") -> SSAValue:
        """|x - y|"""
        return b.value(AbsOp, b.sub(self.x, self.y))


@irdl_op_definition
class MseLossOp(_ElementLoss):
    """(x - y)^2"""

    name = "nn.mse_loss"

    def losses(self, b: "Builder") -> SSAValue:
        return b.value(SquareOp, b.sub(self.x, self.y))


@irdl_op_definition
class L1LossOp(_ElementLoss):
    """|x - y|"""

    name = "nn.l1_loss"

    def losses(self, b: "Builder") -> SSAValue:
        return self.distance(b)


class _Huber(_ElementLoss, ABC):
    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        for name in ("delta", "beta"):
            limit = props.get(name)
            if isinstance(limit, FloatAttr) and not limit.value.data > 0:
                raise ShardirError(f"[T10] {name} is {limit.value.data}; it is to be above 0")
        return super().infer(operands, props)

    def huber(self, b: "Builder", limit: float) -> SSAValue:
        """m (d - m / 2), where d = |x - y| and m is d or the limit, the lesser of the two."""
        d = self.distance(b)
        m = b.value(MinOp, d, b.number(limit, d))
        return b.mul(m, b.sub(d, b.scale(m, 0.5)))


@irdl_op_definition
class HuberLossOp(_Huber):
    """(x - y)^2 / 2 where |x - y| is below delta, else delta (|x - y| - delta / 2)"""

    name = "nn.huber_loss"
    delta = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$reduction $x `,` $y `delta` $delta {STRATEGY}"

    def losses(self, b: "Builder") -> SSAValue:
        return self.huber(b, float_of(self, "delta"))


@irdl_op_definition
class SmoothL1LossOp(_Huber):
    """(x - y)^2 / (2 beta) where |x - y| is below beta, else |x - y| - beta / 2"""

    name = "nn.smooth_l1_loss"
    beta = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$reduction $x `,` $y `beta` $beta {STRATEGY}"

    def losses(self, b: "Builder") -> SSAValue:
        beta = float_of(self, "beta")
        return b.scale(self.huber(b, beta), 1 / beta)


@irdl_op_definition
class BceLossOp(_ElementLoss):
    """The binary cross entropies of probabilities x"""

    name = "nn.bce_loss"

    def losses(self, b: "Builder") -> SSAValue:
        return b.value(BinaryCrossEntropyOp, self.x, self.y)


@irdl_op_definition
class BceWithLogitsLossOp(_ElementLoss):
    """The binary cross entropies of the sigmoids of x"""

    name = "nn.bce_with_logits_loss"

    def losses(self, b: "Builder") -> SSAValue:
        return b.value(BinaryCrossEntropyWithLogitsOp, self.x, self.y)


@irdl_op_definition
class SoftMarginLossOp(_ElementLoss):
    """log(1 + e^(-x y))"""

    name = "nn.soft_margin_loss"

    def losses(self, b: "Builder") -> SSAValue:
        return b.value(SoftplusOp, b.neg(b.mul(self.x, self.y)))


@irdl_op_definition
class KlDivLossOp(_ElementLoss):
    """y (log y - x) of log-probabilities x, 0 where y is 0; with `log_target`, e^y (y - x)"""

    name = "nn.kl_div_loss"
    log_target = opt_prop_def(UnitAttr)
    assembly_format = f"$reduction $x `,` $y (`log_target` $log_target^)? {STRATEGY}"

    def losses(self, b: "Builder") -> SSAValue:
        x, y = self.x, self.y
        if self.log_target is not None:
            return b.mul(b.value(ExpOp, y), b.sub(y, x))
        nothing = b.compare("eq", y, b.number(0.0, y))
        log = b.value(LogOp, b.select(nothing, b.number(1.0, y), y))
        return b.mul(y, b.sub(log, x))
