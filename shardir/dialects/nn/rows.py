"""Replacement of rows by index, as in the key-value cache of attention.

%y = nn.index_copy %x, %ids, %rows axis 1 : (tensor<4x8xf32>, tensor<2xi64>, tensor<4x2xf32>)
                                         -> tensor<4x8xf32>
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
from shardir.dialects.nn.indexing import GatherOp, check_indices, local_indices
from shardir.dialects.nn.properties import axis_of
from shardir.dialects.nn.types import unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


@op_definition
class IndexCopyOp(TensorOp):
    """x with replaced rows along `axis`: x[.., ids[i], ..] = rows[.., i, ..]. Of rows with equal
    indices, one is kept.

    Where `axis` is split, a device replaces rows of its shard only.
    """

    name = "nn.index_copy"
    FLOPS: ClassVar[int] = 0
    x = operand_def(TensorType)
    ids = operand_def(TensorType)
    rows = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    out = result_def(TensorType)
    assembly_format = f"$x `,` $ids `,` $rows `axis` $axis {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, ids, rows = operands
        check_indices(ids)
        shape = x.get_shape()
        if len(ids.get_shape()) != 1:
            raise ShardirError(coded("T2", f"expected indices of rank 1, got {ids}"))
        axis = axis_of(props, "axis", len(shape))
        expected = tensor(x.element_type, _with_rows(shape, axis, ids.get_shape()[0]))
        if (rows.element_type, rows.get_shape()) != (x.element_type, expected.get_shape()):
            raise ShardirError(coded("T1", f"expected rows of {expected}, got {rows}"))
        return [tensor(x.element_type, shape)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        x = operands[0].get_shape()
        names = factor_names(len(x))
        rows = names.copy()
        rows[axis_of(props, "axis", len(x))] = "k"
        return Factors.of(
            [names, ["k"], rows], [names],
            [v.get_shape() for v in (*operands, *results)], replicate=["k"],
        )  # fmt: skip

    @classmethod
    def touched(cls, shapes: Sequence[Shape]) -> Sequence[int]:
        ids, rows = (int(np.prod(shape)) for shape in shapes[1:3])
        return [0, ids, rows, rows]

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, ids, rows = arrays
        axis = axis_of(self.properties, "axis", x.ndim)
        here, inside = local_indices(device, self.x, axis, ids)
        out = x.copy()
        np.moveaxis(out, axis, 0)[here[inside]] = np.moveaxis(rows, axis, 0)[inside]
        return out

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        props = {"axis": self.axis}
        zeros = b.zeros(unsharded_type(self.rows), like=self.rows)
        dx = b.value(IndexCopyOp, dy, self.ids, zeros, props=props)
        return dx, None, b.value(GatherOp, dy, self.ids, props=props)


def _with_rows(shape: Shape, axis: int, rows: int) -> Shape:
    return (*shape[:axis], rows, *shape[axis + 1 :])
