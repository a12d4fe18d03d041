"""Layer norm and its gradient."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, TensorType, f64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementary import SqrtOp
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.types import float_element, same_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


# ---- layer norm ----


def check_norm(x: Shape, weight: Shape) -> None:
    """Raises ShardirError unless the dimensions of `weight` are the trailing ones of `x`."""
    if not weight or x[-len(weight) :] != weight:
        found = (
            f"expected a weight and bias of trailing dimensions of {list(x)}, got {list(weight)}"
        )
        raise ShardirError(coded("T6", found, use="use x's trailing dimensions"))


def normed(
    b: "OpBuilder", x: SSAValue, weight: SSAValue, eps: float
) -> tuple[SSAValue, SSAValue, range]:
    """(x - mean) / sqrt(var + eps), that root, and the dimensions, those that the weight has."""
    t = unsharded_type(x)
    rank, norm = len(t.get_shape()), len(unsharded_type(weight).get_shape())
    dims = range(rank - norm, rank)
    centred = b.sub(x, b.reduce(x, "mean", dims, keep=True))
    var = b.reduce(b.mul(centred, centred), "mean", dims, keep=True)
    root = b.value(SqrtOp, b.add(var, b.constant(eps, t.element_type)))
    return b.div(centred, root), root, dims


@op_definition
class LayerNormGradOp(TensorOp):
    """The cotangents of x, weight and bias of a layer norm."""

    name = "nn.layer_norm_grad"
    FLOPS: ClassVar[int] = 12
    PRECISION: ClassVar[str] = "wide"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    dy = operand_def(TensorType)
    eps = prop_def(FloatAttr.constr(type=f64))
    dx = result_def(TensorType)
    dweight = result_def(TensorType)
    dbias = result_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $dy `eps` $eps {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, weight, dy = operands
        float_element(cls.name, operands)
        check_norm(x.get_shape(), weight.get_shape())
        if dy != x:
            found = f"expected dy of the type {x} of x, got {dy}"
            raise ShardirError(coded("T1", found))
        return [x, weight, weight]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        x, w, _ = (t.get_shape() for t in operands)
        names = factor_names(len(x))
        tail = names[len(x) - len(w) :]
        return Factors.of(
            [names, tail, names], [names, tail, tail],
            [t.get_shape() for t in (*operands, *results)], replicate=tail,
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        x, weight, dy = arrays
        dims = tuple(range(x.ndim - weight.ndim, x.ndim))
        lead = tuple(range(x.ndim - weight.ndim))
        c = x - x.mean(axis=dims, keepdims=True)
        r = 1 / np.sqrt((c * c).mean(axis=dims, keepdims=True) + float_of(self, "eps"))
        h = c * r
        g = dy * weight
        dx = r * (g - g.mean(axis=dims, keepdims=True) - h * (g * h).mean(axis=dims, keepdims=True))
        return dx.astype(x.dtype), (dy * h).sum(axis=lead), dy.sum(axis=lead)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        h, root, dims = normed(b, self.x, self.weight, float_of(self, "eps"))
        g = b.mul(self.dy, self.weight)
        # Complete before either is used: so both go together.
        mean, slope = (b.complete(b.reduce(v, "mean", dims, keep=True)) for v in (g, b.mul(g, h)))
        dx = b.div(b.sub(b.sub(g, mean), b.mul(h, slope)), root)
        lead = range(dims[0])
        return dx, b.reduce(b.mul(self.dy, h), "sum", lead), b.reduce(self.dy, "sum", lead)


@op_definition
class LayerNormOp(TensorOp):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the trailing dimensions that weight and
    bias have."""

    name = "nn.layer_norm"
    FLOPS: ClassVar[int] = 8
    PRECISION: ClassVar[str] = "wide"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = operand_def(TensorType)
    eps = prop_def(FloatAttr.constr(type=f64))
    out = result_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $bias `eps` $eps {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, weight, bias = (t.get_shape() for t in operands)
        float_element(cls.name, operands)
        check_norm(x, weight)
        check_norm(x, bias)
        if weight != bias:
            found = f"expected a weight and bias of one shape, got {list(weight)} and {list(bias)}"
            raise ShardirError(coded("T6", found, use=""))
        return [tensor(same_element(operands), x)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        x, w, _ = (t.get_shape() for t in operands)
        names = factor_names(len(x))
        tail = names[len(x) - len(w) :]
        return Factors.of(
            [names, tail, tail], [names], [t.get_shape() for t in (*operands, *results)],
            replicate=tail,
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, weight, bias = arrays
        dims = tuple(range(x.ndim - weight.ndim, x.ndim))
        c = x - x.mean(axis=dims, keepdims=True)
        var = (c * c).mean(axis=dims, keepdims=True)
        return (c / np.sqrt(var + float_of(self, "eps")) * weight + bias).astype(x.dtype)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        op = b.op(LayerNormGradOp, self.x, self.weight, dy, props={"eps": self.eps})
        return op.results

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        h, _, _ = normed(b, self.x, self.weight, float_of(self, "eps"))
        return (b.add(b.mul(h, self.weight), self.bias),)
