"""Layer norm and its gradient.

    %y, %mean, %rstd = nn.layer_norm %x, %weight, %bias eps 1.0e-05 statistics
        : (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>)
        -> (tensor<4x8xf32>, tensor<4xf32>, tensor<4xf32>)

With `statistics` the op also returns the mean and 1 / sqrt(var + eps) of each row, in f32 if the
operands are narrower. The gradient reads them, so a differentiated layer norm has them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, TensorType, UnitAttr, f64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, opt_prop_def, prop_def, result_def, var_result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementary import ReciprocalOp, SqrtOp
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.types import (
    float_element,
    same_element,
    statistic_of,
    statistic_type,
    unsharded_type,
)

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


# ---- layer norm ----


def check_norm(x: Shape, weight: Shape) -> None:
    """Raises ShardirError unless `weight` has the trailing dimensions of `x`."""
    if not weight or x[-len(weight) :] != weight:
        message = (
            f"expected a weight and bias of trailing dimensions of {list(x)}, got {list(weight)}"
        )
        raise ShardirError(coded("T6", message, use="use x's trailing dimensions"))


def check_statistics(x: TensorType, weight: TensorType, statistics: Types) -> None:
    """Raises ShardirError unless a layer norm of x has statistics of these types."""
    expected = statistic_type(x, weight.get_num_dims())
    for name, t in zip(("mean", "rstd"), statistics, strict=True):
        if t != expected:
            raise ShardirError(coded("T1", f"expected {name} of type {expected}, got {t}"))


@op_definition
class LayerNormGradOp(TensorOp):
    """The cotangents of a layer norm's x, weight and bias, from the result's cotangent and the
    statistics."""

    name = "nn.layer_norm_grad"
    FLOPS: ClassVar[int] = 12
    PRECISION: ClassVar[str] = "wide"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    dy = operand_def(TensorType)
    mean = operand_def(TensorType)
    rstd = operand_def(TensorType)
    dx = result_def(TensorType)
    dweight = result_def(TensorType)
    dbias = result_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $dy `,` $mean `,` $rstd {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, weight, dy, *statistics = operands
        float_element(cls.name, operands[:3])
        check_norm(x.get_shape(), weight.get_shape())
        if dy != x:
            message = f"expected dy of the type {x} of x, got {dy}"
            raise ShardirError(coded("T1", message))
        check_statistics(x, weight, statistics)
        return [x, weight, weight]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        x, w = (t.get_shape() for t in operands[:2])
        names = factor_names(len(x))
        lead, tail = names[: len(x) - len(w)], names[len(x) - len(w) :]
        return Factors.of(
            [names, tail, names, lead, lead], [names, tail, tail],
            [t.get_shape() for t in (*operands, *results)], replicate=tail,
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        x, weight, dy, *statistics = arrays
        dims = tuple(range(x.ndim - weight.ndim, x.ndim))
        lead = tuple(range(x.ndim - weight.ndim))
        mean, r = (np.expand_dims(s, dims) for s in statistics)
        h = (x - mean) * r
        g = dy * weight
        dx = r * (g - g.mean(axis=dims, keepdims=True) - h * (g * h).mean(axis=dims, keepdims=True))
        return dx.astype(x.dtype), (dy * h).sum(axis=lead), dy.sum(axis=lead)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        rows = unsharded_type(self.mean).get_shape()
        dims = range(len(rows), unsharded_type(self.x).get_num_dims())
        mean, rstd = (b.reshape(v, (*rows, *[1] * len(dims))) for v in (self.mean, self.rstd))
        h = b.mul(b.sub(self.x, mean), rstd)
        g = b.mul(self.dy, self.weight)
        # Both means are complete before either is used, so that one collective reduces both.
        mean_g, slope = (b.complete(b.reduce(v, "mean", dims, keep=True)) for v in (g, b.mul(g, h)))
        dx = b.mul(b.sub(b.sub(g, mean_g), b.mul(h, slope)), rstd)
        lead = range(dims[0])
        return dx, b.reduce(b.mul(self.dy, h), "sum", lead), b.reduce(self.dy, "sum", lead)


@op_definition
class LayerNormOp(TensorOp):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the trailing dimensions of weight and
    bias. With `statistics` there are two more results: the mean and 1 / sqrt(var + eps)"""

    name = "nn.layer_norm"
    FLOPS: ClassVar[int] = 8
    PRECISION: ClassVar[str] = "wide"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = operand_def(TensorType)
    eps = prop_def(FloatAttr.constr(type=f64))
    statistics = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    saved = var_result_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $bias `eps` $eps (`statistics` $statistics^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, weight, bias = (t.get_shape() for t in operands)
        float_element(cls.name, operands)
        check_norm(x, weight)
        check_norm(x, bias)
        if weight != bias:
            message = (
                f"expected a weight and bias of one shape, got {list(weight)} and {list(bias)}"
            )
            raise ShardirError(coded("T6", message, use=""))
        out = tensor(same_element(operands), x)
        return [out] + [statistic_type(out, len(weight))] * (2 if "statistics" in props else 0)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        x, w, _ = (t.get_shape() for t in operands)
        names = factor_names(len(x))
        lead, tail = names[: len(x) - len(w)], names[len(x) - len(w) :]
        return Factors.of(
            [names, tail, tail], [names, lead, lead][: len(results)],
            [t.get_shape() for t in (*operands, *results)], replicate=tail,
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        x, weight, bias = arrays
        dims = tuple(range(x.ndim - weight.ndim, x.ndim))
        mean = x.mean(axis=dims, keepdims=True)
        c = x - mean
        root = np.sqrt((c * c).mean(axis=dims, keepdims=True) + float_of(self, "eps"))
        out = (c / root * weight + bias).astype(x.dtype)
        if self.statistics is None:
            return out
        return out, *(s.reshape(x.shape[: dims[0]]) for s in (mean, 1 / root))

    def saving(self) -> tuple[Props, dict[str, TensorType]] | None:
        if self.statistics is not None:
            return None
        t = statistic_of(self.out, unsharded_type(self.weight).get_num_dims())
        return {"statistics": UnitAttr()}, {"mean": t, "rstd": t}

    def gradient(self, b: "OpBuilder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        dy, *more = cotangents
        if dy is None or any(d is not None for d in more):
            raise self.no_gradient("statistics")
        return b.results(LayerNormGradOp, self.x, self.weight, dy, *self.saved)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        t, norm = unsharded_type(self.x), unsharded_type(self.weight).get_num_dims()
        rows, dims = t.get_shape()[:-norm], range(t.get_num_dims() - norm, t.get_num_dims())
        mean = b.reduce(self.x, "mean", dims, keep=True)
        centred = b.sub(self.x, mean)
        var = b.reduce(b.mul(centred, centred), "mean", dims, keep=True)
        root = b.value(SqrtOp, b.add(var, b.constant(float_of(self, "eps"), t.element_type)))
        results = [b.add(b.mul(b.div(centred, root), self.weight), self.bias)]
        if self.statistics is not None:
            results += [b.reshape(v, rows) for v in (mean, b.value(ReciprocalOp, root))]
        return results
