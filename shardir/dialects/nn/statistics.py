"""Statistics along dimensions: logsumexp, variance, standard deviation.

Along a split dimension they are decomposed into reductions, and partial results are communicated.
"""

from abc import ABC
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    prop_def,
)

from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props
from shardir.dialects.nn.elementary import ExpOp, LogOp, SqrtOp, SquareOp
from shardir.dialects.nn.logic import IsinfOp
from shardir.dialects.nn.properties import dims_of, int_of
from shardir.dialects.nn.selection import StopGradientOp
from shardir.dialects.nn.types import check_not_empty, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.reduction import OverDims

# ---- statistics ----


@op_definition
class LogsumexpOp(OverDims):
    """The logarithm of the sum of e^x over `dims`."""

    name = "nn.logsumexp"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x = arrays[0]
        dims = dims_of(self.properties, "dims", x.ndim)
        top = np.max(x, axis=dims, keepdims=True, initial=-np.inf)
        top = np.where(np.isinf(top), 0, top)
        total = np.log(np.sum(np.exp(x - top), axis=dims, keepdims=True)) + top
        return total if self.keep is not None else np.squeeze(total, dims)

    def partial(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        share = b.value(ExpOp, b.sub(self.x, self.spread(b, self.out)))
        return b.mul(self.spread(b, dy), share)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """The maximum only prevents overflow; it is not subtracted where it is infinite."""
        dims, _ = self.where()
        top = b.value(StopGradientOp, b.reduce(self.x, "max", dims, keep=True))
        top = b.select(b.value(IsinfOp, top), b.scalar(0.0, top), top)
        total = b.reduce(b.value(ExpOp, b.sub(self.x, top)), "sum", dims, keep=True)
        out = b.add(b.value(LogOp, total), top)
        return (b.reshape(out, unsharded_type(self.out).get_shape()),)


class _Variance(OverDims, ABC):
    correction = prop_def(IntegerAttr.constr(type=i64))
    assembly_format = f"$x `dims` $dims `correction` $correction (`keep` $keep^)? {STRATEGY}"

    @classmethod
    def check(cls, x: TensorType, count: int, props: Props) -> None:
        super().check(x, count, props)
        check_not_empty(count, "a variance")

    def divisor(self) -> float:
        """1 over the number of degrees of freedom; infinity if there is none."""
        free = self.where()[1] - int_of(self.properties, "correction")
        return 1 / free if free > 0 else inf

    def variance(self, x: Array) -> Array:
        dims = dims_of(self.properties, "dims", x.ndim)
        centred = x - x.mean(axis=dims, keepdims=True)
        total = np.sum(centred * centred, axis=dims, keepdims=self.keep is not None)
        return np.asarray(total * self.divisor())

    def centred(self, b: "OpBuilder") -> SSAValue:
        return b.sub(self.x, b.reduce(self.x, "mean", self.where()[0], keep=True))

    def sum_of_squares(self, b: "OpBuilder") -> SSAValue:
        squares = b.value(SquareOp, self.centred(b))
        total = b.reduce(squares, "sum", self.where()[0], self.keep is not None)
        return b.scale(total, self.divisor())


@op_definition
class VarOp(_Variance):
    """The variance over `dims`: the sum of squared distances from the mean, divided by their number
    minus `correction`."""

    name = "nn.var"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return self.variance(arrays[0])

    def partial(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        return b.mul(self.spread(b, b.scale(dy, 2 * self.divisor())), self.centred(b))

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        return (self.sum_of_squares(b),)


@op_definition
class StdOp(_Variance):
    """The standard deviation: the root of nn.var. The gradient is 0 where it is 0."""

    name = "nn.std"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.sqrt(self.variance(arrays[0]))

    def partial(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        zero = b.scalar(0.0, dy)
        slope = b.div(b.scale(dy, self.divisor()), self.out)
        slope = b.select(b.compare("eq", self.out, zero), zero, slope)
        return b.mul(self.spread(b, slope), self.centred(b))

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """The variance 0 is replaced by 1 under the root, whose slope is infinite at 0."""
        var = self.sum_of_squares(b)
        zero, one = b.scalar(0.0, var), b.scalar(1.0, var)
        is_zero = b.compare("eq", var, zero)
        root = b.value(SqrtOp, b.select(is_zero, one, var))
        return (b.select(is_zero, zero, root),)
