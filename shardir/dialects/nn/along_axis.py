"""Reads and additions along one dimension, with an index for each element.

%y = nn.take_along_axis %x, %ids axis 1 : (tensor<4x8xf32>, tensor<4x3xi32>) -> tensor<4x3xf32>
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

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


@op_definition
class ScatterAddOp(TensorOp):
    """Zeros of the result's shape, to which each element of src is added at its index along `axis`:
    out[.., ids[.., i, ..], ..] += src[.., i, ..]."""

    name = "nn.scatter_add"
    ids = operand_def(TensorType)
    src = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$ids `,` $src `axis` $axis {STRATEGY}"

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

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        rank = len(results[0].get_shape())
        names, ids = _factors_along(rank, axis_of(props, "axis", rank))
        shapes = [v.get_shape() for v in (*operands, *results)]
        return Factors.of([ids, ids], [names], shapes, sparse=names)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        ids, src = arrays
        shape = device.shape(self.out)
        axis = axis_of(self.properties, "axis", len(shape))
        local_ids, inside = local_indices(device, self.out, axis, ids)
        out = np.zeros(shape, src.dtype)
        if shape[axis]:
            where: list[Array] = list(np.ogrid[tuple(slice(n) for n in ids.shape)])
            where[axis] = local_ids
            np.add.at(out, tuple(where), np.where(inside, src, np.zeros((), src.dtype)))
        return out

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return None, b.value(TakeAlongAxisOp, dy, self.ids, props={"axis": self.axis})


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
