"""Reductions over dimensions.

%s = nn.reduce <sum> %x dims <1> : (tensor<4x8xf32>) -> tensor<4xf32>
%m = nn.reduce <mean> %x dims <0, 1> keep : (tensor<4x8xf32>) -> tensor<1x1xf32>
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from xdsl.dialects.builtin import AnyFloat, TensorType, UnitAttr
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
from shardir.dialects.nn.base import (
    STRATEGY,
    Array,
    Place,
    Props,
    TensorOp,
    Types,
    dims_of,
    letters,
    needs_numbers,
    plain,
)
from shardir.dialects.nn.base import DimsAttr as _DimsAttr
from shardir.dialects.text import WordAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import Builder


@irdl_attr_definition
class ReductionKindAttr(WordAttr):
    """`<sum>`, `<mean>`, `<max>` or `<min>`."""

    name = "nn.reduction"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return ("sum", "mean", "max", "min")


@irdl_op_definition
class ReduceOp(TensorOp):
    """Over `dims`: their sum, mean, greatest or least. `keep` leaves dimensions of size 1.

    A device contributes to a mean its own sum divided by the number of all elements, so that the
    contributions of a split mean are a partial sum, whatever the shards' sizes.
    """

    name = "nn.reduce"
    kind = prop_def(ReductionKindAttr)
    x = operand_def(TensorType)
    dims = prop_def(_DimsAttr)
    keep = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    assembly_format = f"$kind $x `dims` $dims (`keep` $keep^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        (t,) = operands
        shape = t.get_shape()
        dims = dims_of(props, "dims", len(shape))
        kind = props["kind"]
        assert isinstance(kind, ReductionKindAttr)
        if kind.data == "sum":
            needs_numbers(cls.name, operands)
        if kind.data == "mean" and not isinstance(t.element_type, AnyFloat):
            raise ShardirError(f"[T5] a mean wants floats, not {t.element_type}; nn.convert it")
        if kind.data in ("mean", "max", "min") and prod(shape[d] for d in dims) == 0:
            raise ShardirError(f"[T8] there is no {kind.data} of nothing")
        kept = [1] if "keep" in props else []
        out = [k for d, n in enumerate(shape) for k in (kept if d in dims else [n])]
        return [tensor(t.element_type, tuple(out))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        rank = len(operands[0].get_shape())
        dims, names = dims_of(props, "dims", rank), letters(rank)
        kind = props["kind"]
        assert isinstance(kind, ReductionKindAttr)
        kept = [""] if "keep" in props else []
        out = [k for d, f in enumerate(names) for k in (kept if d in dims else [f])]
        summed = kind.data in ("sum", "mean")
        return Factors.of(
            [names], [out], [t.get_shape() for t in (*operands, *results)],
            reduction="sum" if summed else kind.data, linear="sum" if summed else "",
        )  # fmt: skip

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        x = arrays[0]
        dims = dims_of(self.properties, "dims", x.ndim)
        keep = self.keep is not None
        match self.kind.data:
            case "max" | "min" as kind:
                end = np.inf if x.dtype.kind == "f" else None
                if end is None:
                    info = np.iinfo(x.dtype) if x.dtype.kind == "i" else None
                    first = (info.min if kind == "max" else info.max) if info else kind == "min"
                else:
                    first = -end if kind == "max" else end
                take = np.max if kind == "max" else np.min
                return np.asarray(take(x, axis=dims, keepdims=keep, initial=first))
            case kind:
                total = np.sum(x, axis=dims, keepdims=keep, dtype=x.dtype)
                if kind == "mean":
                    total = total / prod(place.whole(self.x)[d] for d in dims)
                return np.asarray(total, dtype=x.dtype)

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        dy = cotangents[0]
        assert dy is not None
        shape = plain(self.x).get_shape()
        dims = dims_of(self.properties, "dims", len(shape))
        left = [d for d in range(len(shape)) if d not in dims]

        def spread(v: SSAValue) -> SSAValue:
            flat = b.reshape(v, tuple(shape[d] for d in left))
            return b.broadcast(flat, left, shape, like=self.x)

        if self.kind.data == "sum":
            return (spread(dy),)
        if self.kind.data == "mean":
            return (spread(b.scale(dy, 1 / prod(shape[d] for d in dims))),)
        chosen = b.compare("eq", self.x, spread(self.out))
        chosen = b.convert(chosen, plain(dy).element_type)
        count = b.reduce(chosen, "sum", dims, self.keep is not None)
        return (b.mul(chosen, spread(b.div(dy, count))),)


OPS = [ReduceOp]
ATTRS = [ReductionKindAttr]
