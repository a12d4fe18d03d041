"""Reads and additions along one dimension, with an index for each element.

%y = nn.take_along_axis %x, %ids axis 1 : (tensor<4x8xf32>, tensor<4x3xi32>) -> tensor<4x3xf32>
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.properties import axis_of
from shardir.dialects.nn.types import arithmetic_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.indexing import IndexedRead, check_indices, local_indices
from shardir.dialects.nn.reduction import ReductionKindAttr

# ---- along a dimension, with indices of the same rank ----


def _check_along(shape: Shape, ids: Shape, axis: int) -> None:
    """Raises ShardirError unless the shapes are equal except for the dimension `axis`."""
    if len(shape) != len(ids) or any(
        n != m for d, (n, m) in enumerate(zip(shape, ids, strict=True)) if d != axis
    ):
        message = (
            f"expected indices equal to {list(shape)} but for dimension {axis}, got {list(ids)}"
        )
        raise ShardirError(coded("T6", message, use="use nn.broadcast or nn.slice"))


def _factors_along(rank: int, axis: int) -> tuple[list[str], list[str]]:
    """Return the factors of the indexed value and of the indices."""
    names = factor_names(rank)
    return names, [*names[:axis], "k", *names[axis + 1 :]]


class ScatterOp(TensorOp, ABC):
    """A value of the result's shape, whose elements combine those of src at their index."""

    ids = operand_def(TensorType)
    src = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        ids, src = operands
        check_indices(ids)
        arithmetic_element(cls.name, (src, *results))
        if src.get_shape() != ids.get_shape():
            message = f"expected src of the shape of the indices {ids}, got {src}"
            raise ShardirError(coded("T1", message))
        shape = results[0].get_shape()
        _check_along(shape, ids.get_shape(), axis_of(props, "axis", len(shape)))

    def combined(self, device: Device, arrays: Sequence[Array], how: np.ufunc, first: Any) -> Array:
        """Return the combinations, from the element `first` on."""
        ids, src = arrays
        shape = device.shape(self.out)
        axis = axis_of(self.properties, "axis", len(shape))
        local_ids, inside = local_indices(device, self.out, axis, ids)
        out = np.full(shape, first, src.dtype)
        if shape[axis]:
            where: list[Array] = list(np.ogrid[tuple(slice(n) for n in ids.shape)])
            where[axis] = local_ids
            how.at(out, tuple(where), np.where(inside, src, np.asarray(first, src.dtype)))
        return out


def _scatter_factors(operands: Types, results: Types, props: Props, **options: Any) -> Factors:
    rank = len(results[0].get_shape())
    names, ids = _factors_along(rank, axis_of(props, "axis", rank))
    shapes = [v.get_shape() for v in (*operands, *results)]
    return Factors.of([ids, ids], [names], shapes, **options)


@op_definition
class ScatterAddOp(ScatterOp):
    """Zeros of the result's shape, to which each element of src is added at its index along `axis`:
    out[.., ids[.., i, ..], ..] += src[.., i, ..]."""

    name = "nn.scatter_add"
    assembly_format = f"$ids `,` $src `axis` $axis {STRATEGY}"

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(results[0].get_shape()))
        return _scatter_factors(operands, results, props, sparse=names)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return self.combined(device, arrays, np.add, 0)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return None, b.value(TakeAlongAxisOp, dy, self.ids, props={"axis": self.axis})


COMBINE: Mapping[str, np.ufunc] = {"max": np.maximum, "min": np.minimum, "prod": np.multiply}


@op_definition
class ScatterReduceOp(ScatterOp):
    """The product, maximum or minimum of all elements of src with the same index along `axis`.
    Where no element has the index, it is 1 for a product, and for a maximum the least number of the
    element type: -inf for floats."""

    name = "nn.scatter_reduce"
    kind = prop_def(ReductionKindAttr)
    assembly_format = f"$kind $ids `,` $src `axis` $axis {STRATEGY}"

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        super().check_results(operands, results, props)
        if (kind := _kind(props)) not in COMBINE:
            message = f"expected the kind max, min or prod of a scatter, got {kind}"
            raise ShardirError(coded("T10", message, use="use nn.scatter_add for sums"))

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        if (kind := _kind(props)) == "prod":
            return _scatter_factors(operands, results, props, replicate=["k"])
        return _scatter_factors(operands, results, props, reduction=kind)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        kind = self.kind.data
        return self.combined(device, arrays, COMBINE[kind], _identity(kind, arrays[1].dtype))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """Equal extremes share the cotangent. The factor of an element of a product is that of the
        others, which are nonzero."""
        element = unsharded_type(self.src).element_type
        result: dict[str, Any] = {"result": unsharded_type(self.out), "like": self.out}

        def take(v: SSAValue) -> SSAValue:
            return b.value(TakeAlongAxisOp, v, self.ids, props={"axis": self.axis})

        def add(v: SSAValue) -> SSAValue:
            return b.value(ScatterAddOp, self.ids, v, props={"axis": self.axis}, **result)

        zero, one = b.scalar(0.0, self.src), b.scalar(1.0, self.src)
        if self.kind.data != "prod":
            chosen = b.convert(b.compare("eq", self.src, take(self.out)), element)
            return None, b.mul(chosen, b.div(take(dy), take(add(chosen))))
        is_zero = b.compare("eq", self.src, zero)
        filled = b.select(is_zero, one, self.src)
        props = {"axis": self.axis, "kind": self.kind}
        product = take(b.value(ScatterReduceOp, self.ids, filled, props=props, **result))
        zeros = take(add(b.convert(is_zero, element)))
        at_zero = b.select(b.compare("eq", zeros, one), product, zero)
        elsewhere = b.select(b.compare("eq", zeros, zero), b.div(product, filled), zero)
        return None, b.mul(take(dy), b.select(is_zero, at_zero, elsewhere))


def _kind(props: Props) -> str:
    kind = props["kind"]
    assert isinstance(kind, ReductionKindAttr)
    return kind.data


def _identity(kind: str, dtype: Any) -> float | int:
    if kind == "prod":
        return 1
    if dtype.kind == "f":
        return -np.inf if kind == "max" else np.inf
    return int(np.iinfo(dtype).min if kind == "max" else np.iinfo(dtype).max)


@op_definition
class TakeAlongAxisOp(IndexedRead):
    """The element at each index along `axis`: x[.., ids[.., i, ..], ..]."""

    name = "nn.take_along_axis"
    x = operand_def(TensorType)
    ids = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    out = result_def(TensorType)
    assembly_format = f"$x `,` $ids `axis` $axis {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, ids = operands
        check_indices(ids)
        shape = x.get_shape()
        _check_along(shape, ids.get_shape(), axis_of(props, "axis", len(shape)))
        return [tensor(x.element_type, ids.get_shape())]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        rank = len(operands[0].get_shape())
        names, ids = _factors_along(rank, axis_of(props, "axis", rank))
        shapes = [v.get_shape() for v in (*operands, *results)]
        return Factors.of([names, ids], [ids], shapes, sparse=names)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, ids = arrays
        axis = axis_of(self.properties, "axis", x.ndim)
        local_ids, inside = local_indices(device, self.x, axis, ids)
        if x.shape[axis] == 0:
            return np.zeros(ids.shape, x.dtype)
        taken = np.take_along_axis(x, local_ids, axis=axis)
        return np.where(inside, taken, np.zeros((), x.dtype))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        d = b.value(
            ScatterAddOp, self.ids, dy,
            props={"axis": self.axis}, result=unsharded_type(self.x), like=self.x,
        )  # fmt: skip
        return d, None
