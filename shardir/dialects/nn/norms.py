"""Norms with statistics over the batch or groups of channels. They are composites: each device
reduces its shard, and partial sums are communicated.

    %y, %mean_1, %var_1 = nn.batch_norm %x, %weight, %bias, %mean, %var momentum 0.1 eps 1e-5

Statistics are over the global batch in any layout. 16-bit numbers are normalised in f32.
"""

from abc import ABC
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from xdsl.dialects.builtin import (
    FloatAttr,
    IntegerAttr,
    TensorType,
    f64,
    i64,
)
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Composite, Props, Types, factor_names
from shardir.dialects.nn.elementary import RsqrtOp
from shardir.dialects.nn.properties import float_of, int_of
from shardir.dialects.nn.types import check_not_empty, float_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

Number = FloatAttr.constr(type=f64)


class _Norm(Composite, ABC):
    """A normalised x, times a weight, perhaps plus a bias."""

    PRECISION: ClassVar[str] = "wide"
    eps = prop_def(Number)

    def scaled(self, b: "OpBuilder", centred: SSAValue, var: SSAValue) -> SSAValue:
        eps = b.constant(float_of(self, "eps"), unsharded_type(var).element_type)
        return b.mul(centred, b.value(RsqrtOp, b.add(var, eps)))


def _of_channels(b: "OpBuilder", v: SSAValue, rank: int) -> SSAValue:
    """Reshape [channels] so that it broadcasts with [batch, channels, ...]."""
    return b.reshape(v, (unsharded_type(v).get_shape()[0], *[1] * (rank - 2)))


class _ChannelNorm(_Norm, ABC):
    """The first operand is [batch, channels, ...]; the other operands are [channels]."""

    @classmethod
    def check(cls, operands: Types) -> Any:
        element, x = float_element(cls.name, operands), operands[0].get_shape()
        if len(x) < 2:
            raise ShardirError(
                coded(
                    "T6",
                    f"expected a shape [batch, channels, ...], got {list(x)}",
                    use="reshape it",
                )
            )
        for t in operands[1:]:
            if t.get_shape() != x[1:2]:
                raise ShardirError(
                    coded(
                        "T6",
                        f"expected weight, bias and statistics of {list(x[1:2])}, as x has "
                        f"{x[1]} channels, got {list(t.get_shape())}",
                        use="write one value for each channel",
                    )
                )
        return element

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        channels = names[1:2]
        return Factors.of(
            [names, *[channels] * (len(operands) - 1)], [names, *[channels] * (len(results) - 1)],
            [t.get_shape() for t in (*operands, *results)],
        )  # fmt: skip


@op_definition
class BatchNormOp(_ChannelNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias with each channel's mean and variance over the
    global batch and all positions; and the updated running statistics, (1 - momentum) old +
    momentum new. The running variance is unbiased."""

    name = "nn.batch_norm"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = operand_def(TensorType)
    mean = operand_def(TensorType)
    var = operand_def(TensorType)
    momentum = prop_def(Number)
    out = result_def(TensorType)
    new_mean = result_def(TensorType)
    new_var = result_def(TensorType)
    assembly_format = (
        f"$x `,` $weight `,` $bias `,` $mean `,` $var `momentum` $momentum `eps` $eps {STRATEGY}"
    )

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element, x = cls.check(operands), operands[0].get_shape()
        if prod(x[:1] + x[2:]) < 2:
            raise ShardirError(
                coded(
                    "T8",
                    f"expected two or more elements in a channel, for a variance, got {list(x)}",
                    use="use a larger batch, or nn.batch_norm_inference",
                )
            )
        return [tensor(element, x), tensor(element, x[1:2]), tensor(element, x[1:2])]

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        t = unsharded_type(self.x)
        shape = t.get_shape()
        x, weight, bias, old_mean, old_var = self.operands
        dims, n = (0, *range(2, len(shape))), prod(shape[:1] + shape[2:])
        # Complete the mean here: otherwise each use would reduce the partial sum.
        mean = b.complete(b.reduce(x, "mean", dims))
        centred = b.sub(x, _of_channels(b, mean, len(shape)))
        var = b.complete(b.reduce(b.mul(centred, centred), "mean", dims))
        normed = self.scaled(b, centred, _of_channels(b, var, len(shape)))
        weight, bias = (_of_channels(b, v, len(shape)) for v in (weight, bias))
        m = float_of(self, "momentum")
        new_mean = b.add(b.scale(old_mean, 1 - m), b.scale(mean, m))
        new_var = b.add(b.scale(old_var, 1 - m), b.scale(var, m * n / (n - 1)))
        return b.add(b.mul(normed, weight), bias), new_mean, new_var


@op_definition
class BatchNormInferenceOp(_ChannelNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias with a given mean and variance of each
    channel."""

    name = "nn.batch_norm_inference"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = operand_def(TensorType)
    mean = operand_def(TensorType)
    var = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $bias `,` $mean `,` $var `eps` $eps {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        return [tensor(cls.check(operands), operands[0].get_shape())]

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        rank = len(unsharded_type(self.x).get_shape())
        x, *per_channel = self.operands
        weight, bias, mean, var = (_of_channels(b, v, rank) for v in per_channel)
        normed = self.scaled(b, b.sub(x, mean), var)
        out = b.add(b.mul(normed, weight), bias)
        return (out,)


@op_definition
class GroupNormOp(_ChannelNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias with each sample's mean and variance over the
    channels of a group and all positions; there are `groups` groups of channels."""

    name = "nn.group_norm"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = operand_def(TensorType)
    groups = prop_def(IntegerAttr.constr(type=i64))
    out = result_def(TensorType)
    assembly_format = f"$x `,` $weight `,` $bias `groups` $groups `eps` $eps {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        element, x = cls.check(operands), operands[0].get_shape()
        groups = int_of(props, "groups")
        if groups < 1 or x[1] % groups:
            raise ShardirError(
                coded(
                    "T10",
                    f"expected a number of groups that divides {x[1]} channels, got {groups}",
                )
            )
        check_not_empty(prod(x[1:]), "a mean")
        return [tensor(element, x)]

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        t, groups = unsharded_type(self.x), self.groups.value.data
        shape = t.get_shape()
        x, weight, bias = self.operands
        grouped = b.reshape(x, (shape[0], groups, shape[1] // groups, *shape[2:]))
        dims = range(2, len(shape) + 1)
        centred = b.sub(grouped, b.reduce(grouped, "mean", dims, keep=True))
        var = b.reduce(b.mul(centred, centred), "mean", dims, keep=True)
        normed = b.reshape(self.scaled(b, centred, var), shape)
        weight, bias = (_of_channels(b, v, len(shape)) for v in (weight, bias))
        return (b.add(b.mul(normed, weight), bias),)
