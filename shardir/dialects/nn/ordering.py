"""Ops that depend on the order along a dimension: running sums, sort, the k largest elements.

Along an evenly split dimension, running sums and topk are computed on each shard, and totals or
candidates are communicated (`decompose`). A sort needs the dimension unsharded.
"""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import operand_def, opt_prop_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.along_axis import ScatterAddOp, TakeAlongAxisOp
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.properties import axis_of, int_attr, int_of
from shardir.dialects.nn.types import arithmetic_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


class _Along(TensorOp, ABC):
    """An op along the unsharded dimension `axis` of x; the other dimensions may be split."""

    x = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))

    def at(self) -> int:
        return axis_of(self.properties, "axis", len(unsharded_type(self.x).get_shape()))

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        return cls.along(operands, results, props)

    @classmethod
    def along(cls, operands: Types, results: Types, props: Props, linear: str = "") -> Factors:
        shape = operands[0].get_shape()
        axis, names = axis_of(props, "axis", len(shape)), factor_names(len(shape))
        same = results[0].get_shape() == shape
        out = names if same else [*names[:axis], "", *names[axis + 1 :]]
        shapes = [t.get_shape() for t in (*operands, *results)]
        return Factors.of(
            [names], [out] * len(results), shapes, replicate=[names[axis]], linear=linear
        )


@op_definition
class CumsumOp(_Along):
    """The running sum along `axis`, including each element; from the end with `reverse`."""

    PRECISION: ClassVar[str] = "wide"

    name = "nn.cumsum"
    reverse = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    assembly_format = f"$x `axis` $axis (`reverse` $reverse^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        arithmetic_element(cls.name, operands)
        axis_of(props, "axis", len(operands[0].get_shape()))
        return [operands[0]]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        return cls.along(operands, results, props, linear="sum")

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, axis = arrays[0], self.at()
        if self.reverse is None:
            return np.cumsum(x, axis, dtype=x.dtype)
        return np.flip(np.cumsum(np.flip(x, axis), axis, dtype=x.dtype), axis)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        props: dict[str, Attribute] = {"axis": self.axis}
        if self.reverse is None:
            props["reverse"] = UnitAttr()
        return (b.value(CumsumOp, dy, props=props),)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """Add to the running sums of each shard the totals of the preceding shards."""
        props: dict[str, Attribute] = {"axis": self.axis}
        if self.reverse is not None:
            props["reverse"] = self.reverse
        axis, shards = self.at(), b.split_shards(self.x, self.at())
        if shards is None:
            return b.op(CumsumOp, self.x, props=props).results
        local = b.value(CumsumOp, shards, props={**props, "axis": int_attr(axis + 1)})
        totals = b.reduce(shards, "sum", [axis + 1])
        shape = unsharded_type(totals).get_shape()
        square = (*shape[:axis], shape[axis], *shape[axis:])
        preceding = b.broadcast(totals, [d for d in range(len(square)) if d != axis], square)
        shard, other_shard = (b.iota(d, like=preceding) for d in (axis, axis + 1))
        counted = b.compare("lt" if self.reverse is None else "gt", other_shard, shard)
        preceding = b.select(counted, preceding, b.scalar(0.0, preceding))
        offset = b.reduce(preceding, "sum", [axis + 1])
        offset = b.reshape(offset, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
        return (b.reshape(b.add(local, offset), unsharded_type(self.x).get_shape()),)


def order(x: Array, axis: int, descending: bool) -> Array:
    """The indices that sort x along `axis`, stably; NaN counts as the maximum."""
    if not descending:
        return np.argsort(x, axis, kind="stable")
    backwards = np.argsort(np.flip(x, axis), axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(backwards, axis)


class _Ordered(_Along, ABC):
    """The sorted elements of x, all or some, and their indices."""

    values = result_def(TensorType)
    indices = result_def(TensorType)

    def gradient(self, b: "OpBuilder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        if cotangents[0] is None:
            return (None,)
        d = b.value(
            ScatterAddOp, self.indices, cotangents[0],
            props={"axis": self.axis}, result=unsharded_type(self.x), like=self.x,
        )  # fmt: skip
        return (d,)


@op_definition
class SortOp(_Ordered):
    """The elements along `axis` in ascending or `descending` order, and their i64 indices. The sort
    is stable; NaN counts as the maximum."""

    name = "nn.sort"
    descending = opt_prop_def(UnitAttr)
    assembly_format = f"$x `axis` $axis (`descending` $descending^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        (t,) = operands
        axis_of(props, "axis", len(t.get_shape()))
        return [t, tensor(i64, t.get_shape())]

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        indices = order(arrays[0], self.at(), self.descending is not None)
        return np.take_along_axis(arrays[0], indices, self.at()), indices


@op_definition
class ArgsortOp(_Along):
    """The i64 indices of nn.sort."""

    name = "nn.argsort"
    descending = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    assembly_format = f"$x `axis` $axis (`descending` $descending^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        return [SortOp.infer(operands, props)[1]]

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return order(arrays[0], self.at(), self.descending is not None)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (None,)


@op_definition
class TopkOp(_Ordered):
    """The `k` largest elements along `axis`, or the `smallest`, in order, and their i64 indices.
    The first of equal elements wins; NaN counts as the maximum."""

    name = "nn.topk"
    k = prop_def(IntegerAttr.constr(type=i64))
    smallest = opt_prop_def(UnitAttr)
    assembly_format = f"$x `k` $k `axis` $axis (`smallest` $smallest^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        (t,) = operands
        shape, k = t.get_shape(), int_of(props, "k")
        axis = axis_of(props, "axis", len(shape))
        if not 0 <= k <= shape[axis]:
            raise ShardirError(
                coded(
                    "T10",
                    f"expected k from 0 to the size of dimension {axis}, {shape[axis]}, got {k}",
                )
            )
        out = (*shape[:axis], k, *shape[axis + 1 :])
        return [tensor(t.element_type, out), tensor(i64, out)]

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        indices = order(arrays[0], self.at(), self.smallest is None)
        indices = np.take(indices, range(self.k.value.data), self.at())
        return np.take_along_axis(arrays[0], indices, self.at()), indices

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """Select k elements from the top k of each shard."""
        axis, k = self.at(), self.k.value.data
        props: dict[str, Attribute] = {n: p for n, p in self.properties.items() if n != "strategy"}
        shards = b.split_shards(self.x, axis)
        if shards is None or k >= unsharded_type(shards).get_shape()[axis + 1]:
            return b.op(TopkOp, self.x, props=props).results
        size = unsharded_type(shards).get_shape()[axis + 1]
        values, ids = b.op(TopkOp, shards, props={**props, "axis": int_attr(axis + 1)}).results
        ids = b.add(ids, b.scale(b.iota(axis, like=ids), size))
        shape = unsharded_type(ids).get_shape()
        flat = (*shape[:axis], shape[axis] * k, *shape[axis + 2 :])
        values, ids = b.reshape(values, flat), b.reshape(ids, flat)
        values, chosen = b.op(TopkOp, values, props=props).results
        return values, b.value(TakeAlongAxisOp, ids, chosen, props={"axis": int_attr(axis)})
