"""Cross entropy: losses of rows over classes, the last dimension, with one label a row.

`nn.cross_entropy` has one loss per label; the losses of losses.py that reduce them are

    %l = nn.cross_entropy_loss <mean> %z, %labels ignore -100 : (...) -> tensor<f32>
    %l = nn.nll_loss <mean> %log_p, %labels : (...) -> tensor<f32>

    %l, %log_p = nn.cross_entropy %z, %labels log_softmax
        : (tensor<8x3xf32>, tensor<8xi32>) -> (tensor<8xf32>, tensor<8x3xf32>)

With `log_softmax` the second result has the log-probabilities, in the type of the logits. The
gradient reads them instead of the logits, so a differentiated cross entropy has them.
"""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    FloatAttr,
    IntegerAttr,
    TensorType,
    UnitAttr,
    f64,
    i64,
)
from xdsl.ir import SSAValue
from xdsl.irdl import (
    operand_def,
    opt_prop_def,
    opt_result_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import layout_of, tensor, with_layout
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementary import ExpOp, LogOp
from shardir.dialects.nn.indexing import PickGradOp, PickOp, check_indices
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.softmax import shifted_exp
from shardir.dialects.nn.types import float_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.losses import Loss

# ---- one loss per label ----


class _OfLabels(TensorOp, ABC):
    """An op on rows over classes, the last dimension, and the label of each row."""

    PRECISION: ClassVar[str] = "wide"

    @classmethod
    def check(cls, operands: Types, props: Props) -> tuple[Any, tuple[int, ...]]:
        """Check the shapes of rows and labels; return the rows' element type and shape."""
        rows, labels = operands[:2]
        check_indices(labels)
        if not rows.get_shape() or labels.get_shape() != rows.get_shape()[:-1]:
            message = f"expected labels of the shape of {rows} without the classes, got {labels}"
            raise ShardirError(coded("T1", message))
        return float_element(cls.name, operands[:1]), rows.get_shape()

    @classmethod
    def names(cls, operands: Types) -> list[str]:
        return factor_names(len(operands[1].get_shape()))


def counted_labels(b: "OpBuilder", labels: SSAValue, ignore: int | None) -> SSAValue | None:
    """The i1 mask of the labels that are not `ignore`; None without `ignore`."""
    if ignore is None:
        return None
    return b.compare("ne", labels, b.scalar(ignore, labels))


def select_or_zero(b: "OpBuilder", condition: SSAValue | None, x: SSAValue) -> SSAValue:
    """x where the condition holds, else 0; x without a condition."""
    if condition is None:
        return x
    return b.select(condition, x, b.scalar(0, x))


class _CrossEntropy(_OfLabels, ABC):
    FLOPS: ClassVar[int] = 5
    ignore = opt_prop_def(IntegerAttr.constr(type=i64))
    smoothing = opt_prop_def(FloatAttr.constr(type=f64))

    @classmethod
    def check(cls, operands: Types, props: Props) -> tuple[Any, tuple[int, ...]]:
        share = props.get("smoothing")
        if isinstance(share, FloatAttr) and not 0 <= share.value.data <= 1:
            message = f"expected smoothing from 0 to 1, got {share.value.data}"
            raise ShardirError(coded("T10", message))
        return super().check(operands, props)

    def options(self) -> tuple[int | None, float]:
        """The ignored label, and the smoothing: the share of the loss spread over all classes."""
        ignore = self.ignore.value.data if self.ignore is not None else None
        return ignore, float_of(self, "smoothing") if self.smoothing is not None else 0.0

    def checked(self, labels: Array, classes: int) -> tuple[Array, Array]:
        """The labels, with 0 for ignored ones, and the mask of labels that count."""
        ignore, _ = self.options()
        counts = labels != ignore if ignore is not None else np.ones(labels.shape, bool)
        safe = np.where(counts, labels, 0).astype(np.int64)
        if safe.size and (safe.min() < 0 or safe.max() >= classes):
            bad = int(safe.min() if safe.min() < 0 else safe.max())
            raise ShardirError(f"expected labels from 0 to {classes - 1}, got {bad}")
        return safe, counts


def options_of(props: Props) -> Props:
    """The properties that all cross entropies share: `ignore` and `smoothing`."""
    return {n: a for n, a in props.items() if n in ("ignore", "smoothing")}


_OPTIONS = "(`ignore` $ignore^)? (`smoothing` $smoothing^)?"


@op_definition
class CrossEntropyGradOp(_CrossEntropy):
    """(e^log_p - target) dy, where the target is 1 at the label, smoothed"""

    name = "nn.cross_entropy_grad"
    log_p = operand_def(TensorType)
    labels = operand_def(TensorType)
    dy = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$log_p `,` $labels `,` $dy {_OPTIONS} {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element, shape = cls.check(operands, props)
        if operands[2] != tensor(element, shape[:-1]):
            message = f"expected dy with one {element} per label, got {operands[2]}"
            raise ShardirError(coded("T1", message))
        return [tensor(element, shape)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        n = cls.names(operands)
        return Factors.of(
            [[*n, "c"], n, n], [[*n, "c"]], [t.get_shape() for t in (*operands, *results)],
            replicate=["c"],
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        log_p, labels, dy = arrays
        classes = log_p.shape[-1]
        safe, counts = self.checked(labels, classes)
        share = self.options()[1]
        hot = np.arange(classes) == safe[..., None]
        target = (1 - share) * hot + (share / classes if share else 0)
        out = (np.exp(log_p) - target) * dy[..., None]
        return np.where(counts[..., None], out, 0).astype(log_p.dtype)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        t = unsharded_type(self.log_p)
        rows, classes = t.get_shape()[:-1], t.get_shape()[-1]
        ignore, share = self.options()
        counts = counted_labels(b, self.labels, ignore)
        labels, dy = select_or_zero(b, counts, self.labels), select_or_zero(b, counts, self.dy)
        dy_column = b.reshape(dy, (*rows, 1))
        spread = b.mul(b.value(ExpOp, self.log_p), dy_column)
        if share:
            spread = b.sub(spread, b.scale(dy_column, share / classes))
            dy = b.scale(dy, 1 - share)
        target = b.value(PickGradOp, labels, dy, result=t, like=self.log_p)
        return (b.sub(spread, target),)


@op_definition
class CrossEntropyOp(_CrossEntropy):
    """-log softmax(logits)[label], one loss per label; classes are the last dimension. It is 0 for
    the label `ignore`. `smoothing` is the share of the loss that is the mean over all classes. With
    `log_softmax` there is a second result: log softmax(logits)"""

    name = "nn.cross_entropy"
    logits = operand_def(TensorType)
    labels = operand_def(TensorType)
    log_softmax = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    log_p = opt_result_def(TensorType)
    assembly_format = f"$logits `,` $labels {_OPTIONS} (`log_softmax` $log_softmax^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element, shape = cls.check(operands, props)
        log_p = [tensor(element, shape)] if "log_softmax" in props else []
        return [tensor(element, shape[:-1]), *log_p]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        n = cls.names(operands)
        return Factors.of(
            [[*n, "c"], n], [n, [*n, "c"]][: len(results)],
            [t.get_shape() for t in (*operands, *results)], replicate=["c"],
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        logits, labels = arrays
        safe, counts = self.checked(labels, logits.shape[-1])
        share = self.options()[1]
        z = logits - logits.max(axis=-1, keepdims=True, initial=-np.inf)
        target = np.take_along_axis(z, safe[..., None], axis=-1)[..., 0]
        if share:
            target = (1 - share) * target + share * z.mean(axis=-1)
        total = np.log(np.exp(z).sum(axis=-1))
        losses = np.where(counts, total - target, 0)
        return losses if self.log_softmax is None else (losses, z - total[..., None])

    def saving(self) -> tuple[Props, dict[str, TensorType]] | None:
        if self.log_softmax is not None:
            return None
        t, layout = unsharded_type(self.logits), layout_of(self.logits)
        log_p = t if layout is None else with_layout(t, layout.complete)
        return {"log_softmax": UnitAttr()}, {"log_p": log_p}

    def gradient(self, b: "OpBuilder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        dy, *more = cotangents
        if dy is None or any(d is not None for d in more):
            raise self.no_gradient("logarithms")
        assert self.log_p is not None
        props = options_of(self.properties)
        return b.value(CrossEntropyGradOp, self.log_p, self.labels, dy, props=props), None

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        shape = unsharded_type(self.logits).get_shape()
        last = len(shape) - 1
        ignore, share = self.options()
        shifted, _, total = shifted_exp(b, self.logits, last)
        counts = counted_labels(b, self.labels, ignore)
        target = b.value(PickOp, shifted, select_or_zero(b, counts, self.labels))
        if share:
            spread = b.scale(b.reduce(shifted, "mean", [last]), share)
            target = b.add(b.scale(target, 1 - share), spread)
        logarithms = b.value(LogOp, b.reshape(total, shape[:-1]))
        results = [select_or_zero(b, counts, b.sub(logarithms, target))]
        if self.log_softmax is not None:
            results.append(b.sub(shifted, b.reshape(logarithms, (*shape[:-1], 1))))
        return results


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


@op_definition
class CrossEntropyLossOp(_LabelLoss, _CrossEntropy):
    """The cross entropies of all labels; a mean is over those that are not `ignore`"""

    name = "nn.cross_entropy_loss"
    logits = operand_def(TensorType)
    labels = operand_def(TensorType)
    assembly_format = f"$reduction $logits `,` $labels {_OPTIONS} {STRATEGY}"

    def losses(self, b: "OpBuilder") -> SSAValue:
        return b.value(CrossEntropyOp, self.logits, self.labels, props=options_of(self.properties))

    def counts(self, b: "OpBuilder") -> SSAValue | None:
        return counted_labels(b, self.labels, self.options()[0])


@op_definition
class NllLossOp(_LabelLoss):
    """-x[label] for rows x of log-probabilities; a mean is over the labels that are not `ignore`"""

    name = "nn.nll_loss"
    x = operand_def(TensorType)
    labels = operand_def(TensorType)
    ignore = opt_prop_def(IntegerAttr.constr(type=i64))
    assembly_format = f"$reduction $x `,` $labels (`ignore` $ignore^)? {STRATEGY}"

    def losses(self, b: "OpBuilder") -> SSAValue:
        counts = self.counts(b)
        picked = b.value(PickOp, self.x, select_or_zero(b, counts, self.labels))
        return b.neg(select_or_zero(b, counts, picked))

    def counts(self, b: "OpBuilder") -> SSAValue | None:
        ignore = self.ignore.value.data if self.ignore is not None else None
        return counted_labels(b, self.labels, ignore)
