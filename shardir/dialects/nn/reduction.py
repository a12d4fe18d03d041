"""Reductions over dimensions.

%s = nn.reduce <sum> %x dims <1> : (tensor<4x8xf32>) -> tensor<4xf32>
%m = nn.reduce <mean> %x dims <0, 1> keep : (tensor<4x8xf32>) -> tensor<1x1xf32>
"""

from abc import ABC
from collections.abc import Sequence
from math import inf, prod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import AnyFloat, IntegerAttr, TensorType, UnitAttr, i1, i64
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
from shardir.dialects.nn.arithmetic import ExpOp, LogOp, SqrtOp, SquareOp
from shardir.dialects.nn.base import (
    STRATEGY,
    Array,
    DimsAttr,
    Place,
    Props,
    TensorOp,
    Types,
    axis_of,
    dims_of,
    int_of,
    letters,
    needs_numbers,
    plain,
)
from shardir.dialects.nn.elementwise import Function, needs_float
from shardir.dialects.nn.logic import IsinfOp, IsnanOp, OrOp
from shardir.dialects.nn.selection import StopGradientOp
from shardir.dialects.text import WordAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import Builder


@irdl_attr_definition
class ReductionKindAttr(WordAttr):
    """`<sum>`, `<mean>`, `<prod>`, `<max>`, `<min>`, `<any>` or `<all>`."""

    name = "nn.reduction"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return ("sum", "mean", "prod", "max", "min", "any", "all")


class OverDims(TensorOp, ABC):
    """Over `dims` of x; `keep` leaves dimensions of size 1."""

    PRECISION: ClassVar[str] = "wide"
    x = operand_def(TensorType)
    dims = prop_def(DimsAttr)
    keep = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    assembly_format = f"$x `dims` $dims (`keep` $keep^)? {STRATEGY}"

    @classmethod
    def check(cls, x: TensorType, count: int, props: Props) -> None:
        """Raises ShardirError where `count` elements like those of x have no such value."""
        needs_float(cls.name, [x])
        if not dims_of(props, "dims", len(x.get_shape())):
            raise ShardirError(f"[T4] {cls.name} wants at least one dimension")

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
        return cls.over(operands, results, props, whole=True)

    @classmethod
    def over(
        cls, operands: Types, results: Types, props: Props, *, whole: bool = False, **options: str
    ) -> Factors:
        """The factors; `whole`: the dimensions are not to be split."""
        rank = len(operands[0].get_shape())
        dims, names = dims_of(props, "dims", rank), letters(rank)
        kept = [""] if "keep" in props else []
        out = [k for d, f in enumerate(names) for k in (kept if d in dims else [f])]
        return Factors.of(
            [names], [out], [t.get_shape() for t in (*operands, *results)],
            replicate=[names[d] for d in dims] if whole else (), **options,
        )  # fmt: skip

    def where(self) -> tuple[tuple[int, ...], int]:
        """The dimensions, and the global number of elements along them."""
        t = self.x.type
        assert isinstance(t, TensorType)
        dims = dims_of(self.properties, "dims", len(t.get_shape()))
        return dims, prod(t.get_shape()[d] for d in dims)

    def spread(self, b: "Builder", v: SSAValue) -> SSAValue:
        """A value like the result, repeated along the dimensions."""
        shape = plain(self.x).get_shape()
        dims, _ = self.where()
        left = [d for d in range(len(shape)) if d not in dims]
        flat = b.reshape(v, tuple(shape[d] for d in left))
        return b.broadcast(flat, left, shape, like=self.x)

    def partial(self, b: "Builder", dy: SSAValue) -> SSAValue | None:
        """The cotangent of x."""
        raise self.no_gradient()

    def pullback(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (self.partial(b, dy),)


@irdl_op_definition
class ReduceOp(OverDims):
    """Over `dims`: their sum, mean, product, greatest or least; of i1 whether any or all hold.
    `keep` leaves dimensions of size 1.

    A device contributes to a mean its own sum divided by the number of all elements, so that the
    contributions of a split mean are a partial sum, whatever the shards' sizes.
    """

    name = "nn.reduce"
    kind = prop_def(ReductionKindAttr)
    assembly_format = f"$kind $x `dims` $dims (`keep` $keep^)? {STRATEGY}"

    @classmethod
    def check(cls, x: TensorType, count: int, props: Props) -> None:
        kind = _kind(props)
        if kind in ("sum", "prod"):
            needs_numbers(cls.name, [x])
        if kind == "mean" and not isinstance(x.element_type, AnyFloat):
            raise ShardirError(f"[T5] a mean wants floats, not {x.element_type}; nn.convert it")
        if kind in ("any", "all") and x.element_type != i1:
            raise ShardirError(f"[T5] {kind} wants i1, not {x.element_type}; nn.compare gives it")
        if kind in ("mean", "max", "min") and count == 0:
            raise ShardirError(f"[T8] there is no {kind} of nothing")

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        match _kind(props):
            case "sum" | "mean":
                return cls.over(operands, results, props, linear="sum")
            case "prod":
                return cls.over(operands, results, props, whole=True)
            case kind:
                reduction = {"any": "max", "all": "min"}.get(kind, kind)
                return cls.over(operands, results, props, reduction=reduction)

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
            case "any":
                return np.asarray(np.any(x, axis=dims, keepdims=keep))
            case "all":
                return np.asarray(np.all(x, axis=dims, keepdims=keep))
            case "prod":
                return np.asarray(np.prod(x, axis=dims, keepdims=keep, dtype=x.dtype))
            case kind:
                total = np.sum(x, axis=dims, keepdims=keep, dtype=x.dtype)
                if kind == "mean":
                    total = total / prod(place.whole(self.x)[d] for d in dims)
                return np.asarray(total, dtype=x.dtype)

    def partial(self, b: "Builder", dy: SSAValue) -> SSAValue | None:
        dims, count = self.where()
        match self.kind.data:
            case "sum":
                return self.spread(b, dy)
            case "mean":
                return self.spread(b, b.scale(dy, 1 / count))
            case "prod":
                return b.mul(self.spread(b, dy), self.others(b))
        chosen = b.compare("eq", self.x, self.spread(b, self.out))
        chosen = b.convert(chosen, plain(dy).element_type)
        ties = b.reduce(chosen, "sum", dims, self.keep is not None)
        return b.mul(chosen, self.spread(b, b.div(dy, ties)))

    def others(self, b: "Builder") -> SSAValue:
        """For each element the product of the others. All nonzero elements are multiplied once: p.
        It is p / x where no element is 0, and p at a single 0. Elsewhere it is 0, but written with
        the sum of the zeros, whose slope is that of the one that is left: so that the second
        derivative is right too."""
        dims, _ = self.where()
        zero, one, two = (b.number(n, self.x) for n in (0.0, 1.0, 2.0))
        is_zero = b.compare("eq", self.x, zero)
        filled = b.select(is_zero, one, self.x)
        keep = self.keep is not None
        product = self.spread(b, b.reduce(filled, "prod", dims, keep))
        at_zero = b.convert(is_zero, plain(self.x).element_type)
        count = b.reduce(at_zero, "sum", dims, keep)
        none, single, double = (self.spread(b, b.compare("eq", count, n)) for n in (zero, one, two))
        left = b.mul(at_zero, self.x)
        lefts = self.spread(b, b.reduce(left, "sum", dims, keep))
        other = b.mul(product, b.sub(lefts, left))
        here = b.select(single, product, b.select(double, other, zero))
        rest = b.div(product, filled)
        return b.select(
            is_zero, here, b.select(none, rest, b.select(single, b.mul(lefts, rest), zero))
        )

    def decompose(self, b: "Builder") -> Sequence[SSAValue] | None:
        """Of each shard its own product, then that of the shards', which is gathered for it."""
        x = self.x
        dims, _ = self.where()
        for d in dims:
            if (rows := b.in_parts(x, d)) is not None:
                x = b.reduce(rows, "prod", [d + 1])
        here = [d for d in dims if not b.layout(x).dims[d]]
        x = b.reduce(x, "prod", here, keep=True)
        props = {n: a for n, a in self.properties.items() if n != "strategy"}
        return b.op(ReduceOp, x, props=props).results


def _kind(props: Props) -> str:
    kind = props["kind"]
    assert isinstance(kind, ReductionKindAttr)
    return kind.data


# ---- statistics ----


@irdl_op_definition
class LogsumexpOp(OverDims):
    """The logarithm of the sum of e^x over `dims`."""

    name = "nn.logsumexp"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        x = arrays[0]
        dims = dims_of(self.properties, "dims", x.ndim)
        top = np.max(x, axis=dims, keepdims=True, initial=-np.inf)
        top = np.where(np.isinf(top), 0, top)
        total = np.log(np.sum(np.exp(x - top), axis=dims, keepdims=True)) + top
        return total if self.keep is not None else np.squeeze(total, dims)

    def partial(self, b: "Builder", dy: SSAValue) -> SSAValue | None:
        share = b.value(ExpOp, b.sub(self.x, self.spread(b, self.out)))
        return b.mul(self.spread(b, dy), share)

    def decompose(self, b: "Builder") -> Sequence[SSAValue] | None:
        """The greatest is taken only against overflow, and is no number to subtract where it is
        infinite."""
        dims, _ = self.where()
        top = b.value(StopGradientOp, b.reduce(self.x, "max", dims, keep=True))
        top = b.select(b.value(IsinfOp, top), b.number(0.0, top), top)
        total = b.reduce(b.value(ExpOp, b.sub(self.x, top)), "sum", dims, keep=True)
        out = b.add(b.value(LogOp, total), top)
        return (b.reshape(out, plain(self.out).get_shape()),)


class _Variance(OverDims, ABC):
    correction = prop_def(IntegerAttr.constr(type=i64))
    assembly_format = f"$x `dims` $dims `correction` $correction (`keep` $keep^)? {STRATEGY}"

    @classmethod
    def check(cls, x: TensorType, count: int, props: Props) -> None:
        super().check(x, count, props)
        if count == 0:
            raise ShardirError("[T8] there is no variance of nothing")

    def divisor(self) -> float:
        """1 over the number of degrees of freedom; infinite where there is none."""
        free = self.where()[1] - int_of(self.properties, "correction")
        return 1 / free if free > 0 else inf

    def variance(self, x: Array) -> Array:
        dims = dims_of(self.properties, "dims", x.ndim)
        centred = x - x.mean(axis=dims, keepdims=True)
        total = np.sum(centred * centred, axis=dims, keepdims=self.keep is not None)
        return np.asarray(total * self.divisor())

    def centred(self, b: "Builder") -> SSAValue:
        return b.sub(self.x, b.reduce(self.x, "mean", self.where()[0], keep=True))

    def sum_of_squares(self, b: "Builder") -> SSAValue:
        squares = b.value(SquareOp, self.centred(b))
        total = b.reduce(squares, "sum", self.where()[0], self.keep is not None)
        return b.scale(total, self.divisor())


@irdl_op_definition
class VarOp(_Variance):
    """The variance over `dims`: squared distances from the mean, over their number less
    `correction`."""

    name = "nn.var"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return self.variance(arrays[0])

    def partial(self, b: "Builder", dy: SSAValue) -> SSAValue | None:
        return b.mul(self.spread(b, b.scale(dy, 2 * self.divisor())), self.centred(b))

    def decompose(self, b: "Builder") -> Sequence[SSAValue] | None:
        return (self.sum_of_squares(b),)


@irdl_op_definition
class StdOp(_Variance):
    """The standard deviation: the root of nn.var. No cotangent goes through where it is 0."""

    name = "nn.std"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        return np.sqrt(self.variance(arrays[0]))

    def partial(self, b: "Builder", dy: SSAValue) -> SSAValue | None:
        zero = b.number(0.0, dy)
        slope = b.div(b.scale(dy, self.divisor()), self.out)
        slope = b.select(b.compare("eq", self.out, zero), zero, slope)
        return b.mul(self.spread(b, slope), self.centred(b))

    def decompose(self, b: "Builder") -> Sequence[SSAValue] | None:
        """The root is taken of 1 in the place of 0, where its slope is infinite."""
        var = self.sum_of_squares(b)
        zero, one = b.number(0.0, var), b.number(1.0, var)
        none = b.compare("eq", var, zero)
        root = b.value(SqrtOp, b.select(none, one, var))
        return (b.select(none, zero, root),)


# ---- where the greatest or least is ----


class _ArgExtreme(TensorOp, ABC):
    x = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    keep = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    assembly_format = f"$x `axis` $axis (`keep` $keep^)? {STRATEGY}"

    KIND: ClassVar[str]
    NUMPY: ClassVar[Function]

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = operands[0].get_shape()
        needs_numbers(cls.name, operands)
        axis = axis_of(props, "axis", len(shape))
        if shape[axis] == 0:
            raise ShardirError(f"[T8] there is no {cls.KIND} of nothing")
        kept = (1,) if "keep" in props else ()
        return [tensor(i64, (*shape[:axis], *kept, *shape[axis + 1 :]))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = operands[0].get_shape()
        axis, names = axis_of(props, "axis", len(shape)), letters(len(shape))
        kept = [""] if "keep" in props else []
        out = [*names[:axis], *kept, *names[axis + 1 :]]
        shapes = [t.get_shape() for t in (*operands, *results)]
        return Factors.of([names], [out], shapes, replicate=[names[axis]])

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        axis = axis_of(self.properties, "axis", arrays[0].ndim)
        return type(self).NUMPY(arrays[0], axis=axis, keepdims=self.keep is not None)

    def pullback(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (None,)

    def decompose(self, b: "Builder") -> Sequence[SSAValue] | None:
        """The greatest, then the least index at which it stands; NaN counts as the greatest and
        the least."""
        t = plain(self.x)
        axis = axis_of(self.properties, "axis", len(t.get_shape()))
        found = b.compare("eq", self.x, b.reduce(self.x, self.KIND, [axis], keep=True))
        if isinstance(t.element_type, AnyFloat):
            found = b.value(OrOp, found, b.value(IsnanOp, self.x))
        index = b.iota(axis, like=self.x)
        index = b.select(found, index, b.number(t.get_shape()[axis], index))
        return (b.reduce(index, "min", [axis], self.keep is not None),)


@irdl_op_definition
class ArgmaxOp(_ArgExtreme):
    """The i64 index along `axis` of the greatest; of the first where some are equal."""

    name = "nn.argmax"
    KIND: ClassVar[str] = "max"
    NUMPY: ClassVar[Function] = np.argmax


@irdl_op_definition
class ArgminOp(_ArgExtreme):
    """The i64 index along `axis` of the least; of the first where some are equal."""

    name = "nn.argmin"
    KIND: ClassVar[str] = "min"
    NUMPY: ClassVar[Function] = np.argmin
