"""Reductions over dimensions.

%s = nn.reduce <sum> %x dims <1> : (tensor<4x8xf32>) -> tensor<4xf32>
%m = nn.reduce <mean> %x dims <0, 1> keep : (tensor<4x8xf32>) -> tensor<1x1xf32>
"""

from abc import ABC
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import AnyFloat, TensorType, UnitAttr, i1
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
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.properties import DimsAttr, dims_of
from shardir.dialects.nn.types import (
    arithmetic_element,
    check_not_empty,
    float_element,
    unsharded_type,
)
from shardir.dialects.text import WordAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


@irdl_attr_definition
class ReductionKindAttr(WordAttr):
    """`<sum>`, `<mean>`, `<prod>`, `<max>`, `<min>`, `<any>` or `<all>`."""

    name = "nn.reduction"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return ("sum", "mean", "prod", "max", "min", "any", "all")


class OverDims(TensorOp, ABC):
    """A reduction of x over `dims`; with `keep` they stay, with size 1."""

    PRECISION: ClassVar[str] = "wide"
    x = operand_def(TensorType)
    dims = prop_def(DimsAttr)
    keep = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    assembly_format = f"$x `dims` $dims (`keep` $keep^)? {STRATEGY}"

    @classmethod
    def check(cls, x: TensorType, count: int, props: Props) -> None:
        """Raises ShardirError if the reduction of `count` elements of x's type is undefined."""
        float_element(cls.name, [x])
        if not dims_of(props, "dims", len(x.get_shape())):
            raise ShardirError(
                coded("T4", "expected at least one dimension, got none", use="write dims <0>")
            )

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        (t,) = operands
        shape = t.get_shape()
        dims = dims_of(props, "dims", len(shape))
        cls.check(t, prod(shape[d] for d in dims), props)
        kept = [1] if "keep" in props else []
        out = [k for d, n in enumerate(shape) for k in (kept if d in dims else [n])]
        return [tensor(t.element_type, tuple(out))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        return cls.over(operands, results, props, replicate=True)

    @classmethod
    def over(
        cls,
        operands: Types,
        results: Types,
        props: Props,
        *,
        replicate: bool = False,
        **options: str,
    ) -> Factors:
        """The factors; with `replicate` the reduced dimensions must be unsharded."""
        rank = len(operands[0].get_shape())
        dims, names = dims_of(props, "dims", rank), factor_names(rank)
        kept = [""] if "keep" in props else []
        out = [k for d, f in enumerate(names) for k in (kept if d in dims else [f])]
        return Factors.of(
            [names], [out], [t.get_shape() for t in (*operands, *results)],
            replicate=[names[d] for d in dims] if replicate else (), **options,
        )  # fmt: skip

    def where(self) -> tuple[tuple[int, ...], int]:
        """The reduced dimensions, and the global number of elements along them."""
        t = self.x.type
        assert isinstance(t, TensorType)
        dims = dims_of(self.properties, "dims", len(t.get_shape()))
        return dims, prod(t.get_shape()[d] for d in dims)

    def spread(self, b: "OpBuilder", v: SSAValue) -> SSAValue:
        """Broadcast a value of the result's shape along the reduced dimensions."""
        shape = unsharded_type(self.x).get_shape()
        dims, _ = self.where()
        left = [d for d in range(len(shape)) if d not in dims]
        flat = b.reshape(v, tuple(shape[d] for d in left))
        return b.broadcast(flat, left, shape, like=self.x)

    def partial(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        """The cotangent of x."""
        raise self.no_gradient()

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (self.partial(b, dy),)


@op_definition
class ReduceOp(OverDims):
    """The sum, mean, product, maximum or minimum over `dims`; `any` and `all` for i1. With `keep`
    the dimensions stay, with size 1.

    The partial value of a mean is the device's sum divided by the global number of elements, so
    that a split mean is a partial sum, whatever the sizes of shards.
    """

    name = "nn.reduce"
    kind = prop_def(ReductionKindAttr)
    assembly_format = f"$kind $x `dims` $dims (`keep` $keep^)? {STRATEGY}"

    @classmethod
    def check(cls, x: TensorType, count: int, props: Props) -> None:
        kind = _kind(props)
        if kind in ("sum", "prod"):
            arithmetic_element(cls.name, [x])
        if kind == "mean" and not isinstance(x.element_type, AnyFloat):
            raise ShardirError(coded("T5", f"expected floats for a mean, got {x.element_type}"))
        if kind in ("any", "all") and x.element_type != i1:
            raise ShardirError(
                coded("T5", f"expected i1 for {kind}, got {x.element_type}", use="use nn.compare")
            )
        if kind in ("mean", "max", "min"):
            check_not_empty(count, f"a {kind}")

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        match _kind(props):
            case "sum" | "mean":
                return cls.over(operands, results, props, linear="sum")
            case "prod":
                return cls.over(operands, results, props, replicate=True)
            case kind:
                reduction = {"any": "max", "all": "min"}.get(kind, kind)
                return cls.over(operands, results, props, reduction=reduction)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
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
                extreme = np.max if kind == "max" else np.min
                return np.asarray(extreme(x, axis=dims, keepdims=keep, initial=first))
            case "any":
                return np.asarray(np.any(x, axis=dims, keepdims=keep))
            case "all":
                return np.asarray(np.all(x, axis=dims, keepdims=keep))
            case "prod":
                return np.asarray(np.prod(x, axis=dims, keepdims=keep, dtype=x.dtype))
            case kind:
                total = np.sum(x, axis=dims, keepdims=keep, dtype=x.dtype)
                if kind == "mean":
                    total = total / prod(device.global_shape(self.x)[d] for d in dims)
                return np.asarray(total, dtype=x.dtype)

    def partial(self, b: "OpBuilder", dy: SSAValue) -> SSAValue | None:
        dims, count = self.where()
        match self.kind.data:
            case "sum":
                return self.spread(b, dy)
            case "mean":
                return self.spread(b, b.scale(dy, 1 / count))
            case "prod":
                return b.mul(self.spread(b, dy), self.others(b))
        chosen = b.compare("eq", self.x, self.spread(b, self.out))
        chosen = b.convert(chosen, unsharded_type(dy).element_type)
        ties = b.reduce(chosen, "sum", dims, self.keep is not None)
        return b.mul(chosen, self.spread(b, b.div(dy, ties)))

    def others(self, b: "OpBuilder") -> SSAValue:
        """The product of all other elements, for each element.

        Let p be the product of the nonzero elements. The result is p / x if no element is 0, and p
        at a single 0. Elsewhere it is 0, written with the sum of the other zeros so that the second
        derivative is right too.
        """
        dims, _ = self.where()
        zero, one, two = (b.scalar(n, self.x) for n in (0.0, 1.0, 2.0))
        is_zero = b.compare("eq", self.x, zero)
        filled = b.select(is_zero, one, self.x)
        keep = self.keep is not None
        product = self.spread(b, b.reduce(filled, "prod", dims, keep))
        at_zero = b.convert(is_zero, unsharded_type(self.x).element_type)
        count = b.reduce(at_zero, "sum", dims, keep)
        none, single, double = (self.spread(b, b.compare("eq", count, n)) for n in (zero, one, two))
        left = b.mul(at_zero, self.x)
        lefts = self.spread(b, b.reduce(left, "sum", dims, keep))
        other = b.mul(product, b.sub(lefts, left))
        here = b.select(single, product, b.select(double, other, b.mul(zero, product)))
        rest = b.div(product, filled)
        several = b.select(single, b.mul(lefts, rest), b.mul(zero, rest))
        return b.select(is_zero, here, b.select(none, rest, several))

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """Multiply the elements of each shard, gather the products, and multiply them."""
        x = self.x
        dims, _ = self.where()
        for d in dims:
            if (shards := b.split_shards(x, d)) is not None:
                x = b.reduce(shards, "prod", [d + 1])
        unsharded = [d for d in dims if not b.layout(x).dims[d]]
        x = b.reduce(x, "prod", unsharded, keep=True)
        props = {n: a for n, a in self.properties.items() if n != "strategy"}
        return b.op(ReduceOp, x, props=props).results


def _kind(props: Props) -> str:
    kind = props["kind"]
    assert isinstance(kind, ReductionKindAttr)
    return kind.data
