"""Norms of rows, the trailing dimensions of the weight, and their gradients: layer norm and RMS
norm.

    %y, %mean, %rstd = nn.layer_norm %x, %weight, %bias eps 1.0e-05 statistics
        : (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>)
        -> (tensor<4x8xf32>, tensor<4xf32>, tensor<4xf32>)

With `statistics` a norm also returns the statistics of each row, in f32 if the operands are
narrower. The gradient reads them, so a differentiated norm has them.
"""

from abc import ABC
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, TensorType, UnitAttr, f64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, opt_prop_def, prop_def, result_def, var_result_def

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementary import ReciprocalOp, SqrtOp
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.types import (
    check_not_empty,
    float_element,
    same_element,
    statistic_of,
    statistic_type,
    unsharded_type,
)

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


def check_row(x: TensorType, parameters: Types) -> None:
    """Raises ShardirError unless the weight, and the bias, have the trailing dimensions of `x`."""
    weight = parameters[0].get_shape()
    for name, t in zip(("weight", "bias"), parameters, strict=False):
        row = t.get_shape()
        if not row or x.get_shape()[-len(row) :] != row:
            message = (
                f"expected a {name} with the trailing dimensions of {list(x.get_shape())}, "
                f"got {list(row)}"
            )
            raise ShardirError(coded("T6", message, use="reshape it"))
        if row != weight:
            message = f"expected a weight and bias of one shape, got {list(weight)} and {list(row)}"
            raise ShardirError(coded("T6", message, use=""))
    check_not_empty(prod(weight), "a mean")


def _factors_of_rows(operands: Types) -> tuple[list[str], list[str]]:
    """The factors of the dimensions of x that count rows, and of those of the weight."""
    x, w = (t.get_num_dims() for t in operands[:2])
    names = factor_names(x)
    return names[: x - w], names[x - w :]


class RowNormGrad(TensorOp, ABC):
    """The cotangents of a norm's x, weight, and bias if it has one, from the result's cotangent and
    the statistics."""

    PRECISION: ClassVar[str] = "wide"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, weight, dy, *statistics = operands
        float_element(cls.name, operands[:3])
        check_row(x, [weight])
        if dy != x:
            message = f"expected dy of the type {x} of x, got {dy}"
            raise ShardirError(coded("T1", message))
        expected = statistic_type(x, weight.get_num_dims())
        for name, t in zip(cls.STATISTICS, statistics, strict=True):
            if t != expected:
                raise ShardirError(coded("T1", f"expected {name} of type {expected}, got {t}"))
        return [x, *[weight] * len(statistics)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        lead, row = _factors_of_rows(operands)
        return Factors.of(
            [lead + row, row, lead + row, *[lead] * len(cls.STATISTICS)],
            [lead + row, *[row] * (len(results) - 1)],
            [t.get_shape() for t in (*operands, *results)], replicate=row,
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        x, weight, dy, *statistics = arrays
        dims = tuple(range(x.ndim - weight.ndim, x.ndim))
        lead = tuple(range(x.ndim - weight.ndim))
        *means, r = (np.expand_dims(s, dims) for s in statistics)
        h = (x - means[0] if means else x) * r
        g = dy * weight
        dx = g - h * (g * h).mean(axis=dims, keepdims=True)
        if means:
            dx = dx - g.mean(axis=dims, keepdims=True)
        sums = [(dy * h).sum(axis=lead), *(dy.sum(axis=lead) for _ in means)]
        return (dx * r).astype(x.dtype), *sums

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        x, weight, dy, *statistics = self.operands
        rows = unsharded_type(statistics[0]).get_shape()
        lead, dims = range(len(rows)), range(len(rows), unsharded_type(x).get_num_dims())
        *means, rstd = (b.reshape(v, (*rows, *[1] * len(dims))) for v in statistics)
        h = b.mul(b.sub(x, means[0]) if means else x, rstd)
        g = b.mul(dy, weight)
        # All means are complete before one is used, so that one collective reduces them.
        *mean_g, slope = (
            b.complete(b.reduce(v, "mean", dims, keep=True))
            for v in (*(g for _ in means), b.mul(g, h))
        )
        for mean in mean_g:
            g = b.sub(g, mean)
        dx = b.mul(b.sub(g, b.mul(h, slope)), rstd)
        sums = [b.reduce(v, "sum", lead) for v in (b.mul(dy, h), *(dy for _ in means))]
        return [dx, *sums]


class RowNorm(TensorOp, ABC):
    """A norm of each row of x, times a weight, perhaps plus a bias."""

    PRECISION: ClassVar[str] = "wide"
    GRADIENT: ClassVar[type[RowNormGrad]]
    eps = prop_def(FloatAttr.constr(type=f64))
    statistics = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    saved = var_result_def(TensorType)

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, *parameters = operands
        float_element(cls.name, operands)
        check_row(x, parameters)
        out = tensor(same_element(operands), x.get_shape())
        statistic = statistic_type(out, parameters[0].get_num_dims())
        return [out, *([statistic] * len(cls.GRADIENT.STATISTICS) if "statistics" in props else [])]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        lead, row = _factors_of_rows(operands)
        return Factors.of(
            [lead + row, *[row] * (len(operands) - 1)],
            [lead + row, *[lead] * (len(results) - 1)],
            [t.get_shape() for t in (*operands, *results)], replicate=row,
        )  # fmt: skip

    def saving(self) -> tuple[Props, dict[str, TensorType]] | None:
        if self.statistics is not None:
            return None
        t = statistic_of(self.out, unsharded_type(self.operands[1]).get_num_dims())
        return {"statistics": UnitAttr()}, dict.fromkeys(self.GRADIENT.STATISTICS, t)

    def gradient(self, b: "OpBuilder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        dy, *more = cotangents
        if dy is None or any(d is not None for d in more):
            raise self.no_gradient("statistics")
        return b.results(self.GRADIENT, *self.operands[:2], dy, *self.saved)

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        x, weight, *bias = arrays
        dims = tuple(range(x.ndim - weight.ndim, x.ndim))
        means = [x.mean(axis=dims, keepdims=True) for _ in self.GRADIENT.STATISTICS[:-1]]
        centred = x - means[0] if means else x
        root = np.sqrt((centred * centred).mean(axis=dims, keepdims=True) + float_of(self, "eps"))
        out = sum(bias, start=centred / root * weight).astype(x.dtype)
        if self.statistics is None:
            return out
        return out, *(s.reshape(x.shape[: dims[0]]) for s in (*means, 1 / root))

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        x, weight, *biases = self.operands
        t, norm = unsharded_type(x), unsharded_type(weight).get_num_dims()
        rows, dims = t.get_shape()[:-norm], range(t.get_num_dims() - norm, t.get_num_dims())
        means = [b.reduce(x, "mean", dims, keep=True) for _ in self.GRADIENT.STATISTICS[:-1]]
        centred = b.sub(x, means[0]) if means else x
        power = b.reduce(b.mul(centred, centred), "mean", dims, keep=True)
        root = b.value(SqrtOp, b.add(power, b.constant(float_of(self, "eps"), t.element_type)))
        out = b.mul(b.div(centred, root), weight)
        for bias in biases:
            out = b.add(out, bias)
        if self.statistics is None:
            return [out]
        return [out, *(b.reshape(v, rows) for v in (*means, b.value(ReciprocalOp, root)))]


@op_definition
class LayerNormGradOp(RowNormGrad):
    """The cotangents of a layer norm's x, weight and bias, from the result's cotangent and the
    statistics."""

    name = "nn.layer_norm_grad"
    FLOPS: ClassVar[int] = 12
    STATISTICS: ClassVar[tuple[str, ...]] = ("mean", "rstd")
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    dy = operand_def(TensorType)
    mean = operand_def(TensorType)
    rstd = operand_def(TensorType)
    dx = result_def(TensorType)
    dweight = result_def(TensorType)
    dbias = result_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $dy `,` $mean `,` $rstd {STRATEGY}"


@op_definition
class LayerNormOp(RowNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the trailing dimensions of weight and
    bias. With `statistics` there are two more results: the mean and 1 / sqrt(var + eps)"""

    name = "nn.layer_norm"
    FLOPS: ClassVar[int] = 8
    GRADIENT: ClassVar[type[RowNormGrad]] = LayerNormGradOp
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = operand_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $bias `eps` $eps (`statistics` $statistics^)? {STRATEGY}"


@op_definition
class RmsNormGradOp(RowNormGrad):
    """The cotangents of an RMS norm's x and weight, from the result's cotangent and the
    statistic."""

    name = "nn.rms_norm_grad"
    FLOPS: ClassVar[int] = 9
    STATISTICS: ClassVar[tuple[str, ...]] = ("rstd",)
    TIMED_AS: ClassVar[str] = LayerNormGradOp.name
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    dy = operand_def(TensorType)
    rstd = operand_def(TensorType)
    dx = result_def(TensorType)
    dweight = result_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $dy `,` $rstd {STRATEGY}"


@op_definition
class RmsNormOp(RowNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the trailing dimensions of the weight. With
    `statistics` there is one more result: 1 / sqrt(mean(x^2) + eps)"""

    name = "nn.rms_norm"
    FLOPS: ClassVar[int] = 6
    GRADIENT: ClassVar[type[RowNormGrad]] = RmsNormGradOp
    TIMED_AS: ClassVar[str] = LayerNormOp.name
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    assembly_format = f"$x `,` $weight `eps` $eps (`statistics` $statistics^)? {STRATEGY}"
