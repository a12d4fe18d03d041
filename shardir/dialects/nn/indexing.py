"""Ops that read by index: gather (embedding) and pick, their gradients, and one_hot.

The indexed dimension can be split: a device gives zeros for indices of other shards, and the result
is a partial sum.
"""

from abc import ABC
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, IntegerType, TensorType, i64
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, opt_prop_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.slices import SlicedDim
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.movement import IntsPerDimAttr
from shardir.dialects.nn.properties import axis_of, int_of
from shardir.dialects.nn.selection import SelectOp
from shardir.dialects.nn.types import arithmetic_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


def check_indices(t: TensorType) -> None:
    e = t.element_type
    if not isinstance(e, IntegerType) or e.width.data not in (32, 64):
        message = f"expected indices of i32 or i64, got {e}"
        raise ShardirError(coded("T5", message))


def local_indices(device: Device, v: SSAValue, axis: int, ids: Array) -> tuple[Array, Array]:
    """Return indices relative to the shard of `v` along `axis`, 0 outside of it, and the mask of
    the indices inside.

    Raises:
        ShardirError: an index is outside of the dimension.
    """
    start, size, total = device.start(v, axis), device.shape(v)[axis], device.global_shape(v)[axis]
    if ids.size and (ids.min() < 0 or ids.max() >= total):
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        raise ShardirError(f"expected an index from 0 to {total - 1}, got {bad}")
    here = ids.astype(np.int64) - start
    inside = (here >= 0) & (here < size)
    return np.where(inside, here, 0), inside


def _gathered_shape(table: Shape, ids: Shape, axis: int) -> Shape:
    return (*table[:axis], *ids, *table[axis + 1 :])


def check_slices(table: Shape, ids: Shape, props: Props) -> None:
    """Raise ShardirError unless the slices fit the table and the indices."""
    if ("field" in props) != ("slices" in props):
        message = "expected a field and slices, or neither, got one of them"
        raise ShardirError(coded("T10", message))
    if "field" not in props:
        return
    rows = table[axis_of(props, "axis", len(table))]
    fields = ids[axis_of(props, "field", len(ids))]
    slices = slices_of(props)
    if any(n < 0 for n in slices):
        message = f"expected slices of 0 or more rows, got {list(slices)}"
        raise ShardirError(coded("T10", message))
    if sum(slices) != rows:
        message = f"expected slices whose sum is {rows}, the rows of the table, got {list(slices)}"
        raise ShardirError(coded("T10", message))
    if not slices or fields % len(slices):
        message = f"expected slices whose number divides the {fields} fields, got {len(slices)}"
        raise ShardirError(coded("T10", message))


def slices_of(props: Props) -> Shape:
    attr = props["slices"]
    assert isinstance(attr, IntsPerDimAttr)
    return attr.data


def _dims(
    table: Shape, ids: Shape, props: Props
) -> tuple[list[str | SlicedDim], list[str], list[str]]:
    """Return the dimensions of the table, the dimensions of the indices, and the factors of the
    table. With slices the table's rows have the factor of the fields."""
    axis = axis_of(props, "axis", len(table))
    t, i = factor_names(len(table), "t"), factor_names(len(ids), "i")
    if "field" not in props:
        return [*t], i, t
    t[axis] = i[axis_of(props, "field", len(ids))]
    return [*t[:axis], SlicedDim(t[axis], slices_of(props)), *t[axis + 1 :]], i, t


def check_fields(device: Device, v: SSAValue, props: Props, ids: Array) -> None:
    """Check that the indices of each field are within its slice.

    Raises:
        ShardirError: an index is outside of its slice.
    """
    if "field" not in props or not ids.size:
        return
    shape, slices = device.global_shape(v), slices_of(props)
    dim = axis_of(props, "field", len(shape))
    fields = device.start(v, dim) + np.arange(ids.shape[dim])
    slice_of = fields * len(slices) // shape[dim]
    ends = np.cumsum(slices)
    along = [-1 if d == dim else 1 for d in range(ids.ndim)]
    low, high = ((e[slice_of]).reshape(along) for e in (ends - slices, ends))
    outside = np.argwhere((ids < low) | (ids >= high))
    if len(outside):
        position = tuple(int(k) for k in outside[0])
        first, last = (int(np.broadcast_to(e, ids.shape)[position]) for e in (low, high - 1))
        where = [device.start(v, d) + k for d, k in enumerate(position)]
        message = f"expected an index from {first} to {last} at {where}, got {int(ids[position])}"
        raise ShardirError(f"{message}; correct the indices or the slices")


def _table_props(op: "GatherOp | GatherGradOp") -> Props:
    """Return the properties that relate indices to a table: `axis`, `field`, `slices`."""
    return {k: op.properties[k] for k in ("axis", "field", "slices") if k in op.properties}


class IndexedRead(TensorOp, ABC):
    """An op that reads elements of its first operand at the indices of the second."""

    FLOPS: ClassVar[int] = 0

    @classmethod
    def touched(cls, shapes: Sequence[Shape]) -> Sequence[int]:
        table, ids, out = map(prod, shapes)
        return [min(table, out), ids, out]


@op_definition
class GatherGradOp(TensorOp):
    """Zeros of the table's shape, with the elements of dy added at their indices."""

    name = "nn.gather_grad"
    ids = operand_def(TensorType)
    dy = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    field = opt_prop_def(IntegerAttr.constr(type=i64))
    slices = opt_prop_def(IntsPerDimAttr)
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    GLOBAL_TYPES: ClassVar[bool] = True
    assembly_format = (
        f"$ids `,` $dy `axis` $axis (`field` $field^)? (`slices` $slices^)? {STRATEGY}"
    )

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        check_indices(operands[0])
        arithmetic_element(cls.name, (operands[1], *results))
        axis = axis_of(props, "axis", len(results[0].get_shape()))
        expected = _gathered_shape(results[0].get_shape(), operands[0].get_shape(), axis)
        if operands[1].get_shape() != expected:
            message = f"expected dy of shape {list(expected)}, got {operands[1]}"
            raise ShardirError(coded("T1", message))
        check_slices(results[0].get_shape(), operands[0].get_shape(), props)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        table = results[0].get_shape()
        axis = axis_of(props, "axis", len(table))
        t, i, sparse = _dims(table, operands[0].get_shape(), props)
        return Factors.of(
            [i, [*t[:axis], *i, *t[axis + 1 :]]], [t],
            [v.get_shape() for v in (*operands, *results)], sparse=sparse,
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        ids, dy = arrays
        shape = device.shape(self.out)
        axis = axis_of(self.properties, "axis", len(shape))
        local_ids, inside = local_indices(device, self.out, axis, ids)
        out = np.zeros(shape, dy.dtype)
        addends = np.moveaxis(dy, range(axis, axis + ids.ndim), range(ids.ndim))
        if shape[axis]:
            np.add.at(np.moveaxis(out, axis, 0), local_ids[inside], addends[inside])
        return out

    @classmethod
    def runs_on_host(cls, operands: Sequence[Layout], results: Sequence[Layout | None]) -> bool:
        """Whether the gradient of the table is on host."""
        return results[0] is not None and results[0].host

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return None, b.value(GatherOp, dy, self.ids, props=_table_props(self))


@op_definition
class GatherOp(IndexedRead):
    """Elements of a table at the indices: table.shape[:axis] + ids.shape + table.shape[axis + 1:].

    An embedding is a gather at axis 0. Index `padding` of the table gets no gradient.

    With `field d slices <n0, n1, ...>` dimension d of the indices counts fields: the indices of the
    k-th field are in the k-th slice of the table. (If there are more fields than slices, equal
    numbers of fields share a slice.) So a device with the slices of its fields needs no others.
    """

    name = "nn.gather"
    table = operand_def(TensorType)
    ids = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    padding = opt_prop_def(IntegerAttr.constr(type=i64))
    field = opt_prop_def(IntegerAttr.constr(type=i64))
    slices = opt_prop_def(IntsPerDimAttr)
    out = result_def(TensorType)
    GLOBAL_TYPES: ClassVar[bool] = True
    assembly_format = (
        "$table `,` $ids `axis` $axis (`padding` $padding^)? (`field` $field^)? "
        f"(`slices` $slices^)? {STRATEGY}"
    )

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        table, ids = operands
        check_indices(ids)
        axis = axis_of(props, "axis", len(table.get_shape()))
        rows = table.get_shape()[axis]
        if "padding" in props and not 0 <= (padding := int_of(props, "padding")) < rows:
            message = f"expected a padding index from 0 to below {rows}, got {padding}"
            raise ShardirError(coded("T10", message))
        check_slices(table.get_shape(), ids.get_shape(), props)
        return [
            tensor(table.element_type, _gathered_shape(table.get_shape(), ids.get_shape(), axis))
        ]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        table, ids = (v.get_shape() for v in operands)
        axis = axis_of(props, "axis", len(table))
        t, i, sparse = _dims(table, ids, props)
        return Factors.of(
            [t, i], [[*t[:axis], *i, *t[axis + 1 :]]],
            [v.get_shape() for v in (*operands, *results)], sparse=sparse,
            dealt=[*dict.fromkeys((*i, *sparse))],
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        table, ids = arrays
        axis = axis_of(self.properties, "axis", table.ndim)
        check_fields(device, self.ids, self.properties, ids)
        local_ids, inside = local_indices(device, self.table, axis, ids)
        shape = _gathered_shape(table.shape, ids.shape, axis)
        if table.shape[axis] == 0:
            return np.zeros(shape, table.dtype)
        taken = np.take(table, local_ids, axis=axis)
        mask = inside.reshape((1,) * axis + ids.shape + (1,) * (table.ndim - axis - 1))
        return np.where(mask, taken, np.zeros((), table.dtype))

    @classmethod
    def runs_on_host(cls, operands: Sequence[Layout], results: Sequence[Layout | None]) -> bool:
        """Whether the table is on host."""
        return operands[0].host

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        if self.padding is not None:
            ids, shape = unsharded_type(self.ids), unsharded_type(self.table).get_shape()
            axis = axis_of(self.properties, "axis", len(shape))
            padding = b.constant(self.padding.value.data, ids.element_type)
            used = b.compare("ne", self.ids, padding)
            dims = range(axis, axis + len(ids.get_shape()))
            used = b.broadcast(used, list(dims), unsharded_type(dy).get_shape(), like=dy)
            dy = b.value(SelectOp, used, dy, b.scalar(0.0, dy))
        d = b.value(
            GatherGradOp, self.ids, dy,
            props=_table_props(self), result=unsharded_type(self.table), like=self.table,
        )  # fmt: skip
        return d, None


@op_definition
class PickGradOp(TensorOp):
    """Zeros with one more dimension, with dy at the index along it."""

    name = "nn.pick_grad"
    ids = operand_def(TensorType)
    dy = operand_def(TensorType)
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$ids `,` $dy {STRATEGY}"

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        check_indices(operands[0])
        arithmetic_element(cls.name, (operands[1], *results))
        for t in operands:
            if t.get_shape() != results[0].get_shape()[:-1]:
                message = f"expected the leading dimensions of {results[0]}, got {t}"
                raise ShardirError(coded("T1", message))

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        return Factors.of(
            [names, names], [[*names, "c"]], [v.get_shape() for v in (*operands, *results)]
        )

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        ids, dy = arrays
        shape = device.shape(self.out)
        here, inside = local_indices(device, self.out, len(shape) - 1, ids)
        out = np.zeros(shape, dy.dtype)
        if shape[-1]:
            value = np.where(inside, dy, np.zeros((), dy.dtype))
            np.put_along_axis(out, here[..., None], value[..., None], axis=-1)
        return out

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return None, b.value(PickOp, dy, self.ids)


@op_definition
class PickOp(IndexedRead):
    """One element of the last dimension for each of the leading ones: x[..., ids[...]]."""

    name = "nn.pick"
    x = operand_def(TensorType)
    ids = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x `,` $ids {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, ids = operands
        check_indices(ids)
        if not x.get_shape() or ids.get_shape() != x.get_shape()[:-1]:
            message = f"expected indices of the shape of {x} without the last dimension, got {ids}"
            raise ShardirError(coded("T1", message))
        return [tensor(x.element_type, ids.get_shape())]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[1].get_shape()))
        return Factors.of(
            [[*names, "c"], names], [names], [v.get_shape() for v in (*operands, *results)]
        )

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, ids = arrays
        here, inside = local_indices(device, self.x, x.ndim - 1, ids)
        if x.shape[-1] == 0:
            return np.zeros(ids.shape, x.dtype)
        taken = np.take_along_axis(x, here[..., None], axis=-1)[..., 0]
        return np.where(inside, taken, np.zeros((), x.dtype))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        d = b.value(PickGradOp, self.ids, dy, result=unsharded_type(self.x), like=self.x)
        return d, None


@op_definition
class OneHotOp(TensorOp):
    """1 at the index along a new last dimension, the classes, and 0 elsewhere."""

    name = "nn.one_hot"
    FLOPS: ClassVar[int] = 0
    ids = operand_def(TensorType)
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$ids {STRATEGY}"

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        check_indices(operands[0])
        if operands[0].get_shape() != results[0].get_shape()[:-1] or not results[0].get_shape():
            message = (
                f"expected the shape of {operands[0]} and one more dimension, got {results[0]}"
            )
            raise ShardirError(coded("T1", message))

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        shapes = [v.get_shape() for v in (*operands, *results)]
        return Factors.of([names], [[*names, "c"]], shapes)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        (ids,) = arrays
        here, inside = local_indices(device, self.out, ids.ndim, ids)
        return inside[..., None] & (here[..., None] == np.arange(device.shape(self.out)[ids.ndim]))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (None,)
