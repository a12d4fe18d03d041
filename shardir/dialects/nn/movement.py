"""Ops that move elements along a dimension: slice, pad, flip, roll, tile; and, in joining.py,
concat, stack, split.

The factor of such a dimension is `moved`: the operand is unsharded along it, and each device
computes its own shard of the result. Where the dimension is split and elements keep their order,
the op decomposes into windows of size one, whose exchange fetches the elements that a device lacks.
All other dimensions keep their layout, and partial values pass through.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, i1, i64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    irdl_attr_definition,
    operand_def,
    prop_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.logic import OrOp
from shardir.dialects.nn.properties import DimsAttr, axis_of, dims_of, int_of
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.text import IntsAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


@dataclass(frozen=True)
class IndexMap:
    """The source of a dimension of the result, which has `length` elements: index j reads index
    `first` + `step` * j of the operand, modulo its size if `wraps`. Indices outside of the operand
    are filled."""

    length: int
    first: int = 0
    step: int = 1
    wraps: bool = False

    def indices(self, start: int, count: int, size: int) -> Array:
        """The operand's indices for `count` indices of the result from `start`; -1 for indices
        outside of the operand, which has `size` elements."""
        sources = self.first + self.step * np.arange(start, start + count)
        if self.wraps:
            return sources % max(1, size)
        return np.where((sources >= 0) & (sources < size), sources, -1)


SourceIndices = Mapping[int, IndexMap]
"""The index map of each dimension that changes."""


@irdl_attr_definition
class IntsPerDimAttr(IntsAttr):
    """One integer for each dimension: `<0, 2>`."""

    name = "nn.ints"


def ints_of(props: Props, name: str, rank: int) -> tuple[int, ...]:
    """The integers of a property, one for each dimension.

    Raises:
        ShardirError: the number of integers is not the rank.
    """
    attr = props[name]
    assert isinstance(attr, IntsPerDimAttr)
    if len(attr.data) != rank:
        raise ShardirError(
            coded(
                "T4",
                f"expected {name} with one number for each of {rank} dimensions, got "
                f"{list(attr.data)}",
                use="write one for each",
            )
        )
    return attr.data


class Movement(TensorOp, ABC):
    """An op that moves elements and computes nothing."""

    FLOPS: ClassVar[int] = 0
    GLOBAL_TYPES: ClassVar[bool] = True


def split_dims(b: "OpBuilder", x: SSAValue, dims: Sequence[int]) -> list[int]:
    """The dimensions among `dims` that are split."""
    return [d for d in dims if b.mesh is not None and b.layout(x).dims[d]]


def strided_elements(
    b: "OpBuilder", x: SSAValue, dim: int, start: int, count: int, step: int = 1
) -> SSAValue:
    """Elements start, start + step, ... along a dimension; zeros past its ends."""
    shape = unsharded_type(x).get_shape()
    windows = b.unfold(x, dim, Windows(shape[dim], count, 1, step, start))
    return b.reshape(windows, (*shape[:dim], count, *shape[dim + 1 :]))


def union(b: "OpBuilder", x: SSAValue, y: SSAValue) -> SSAValue:
    """The sum of two values with disjoint nonzero elements; `or` for i1."""
    return b.value(OrOp, x, y) if unsharded_type(x).element_type == i1 else b.add(x, y)


class IndexMapOp(Movement, ABC):
    """An op whose result is the operand, reindexed by an index map for each dimension; unmapped
    elements are filled."""

    x = operand_def(TensorType)
    out = result_def(TensorType)
    PART: ClassVar[bool] = False
    """Whether the result is a part of the operand: a slice."""

    @classmethod
    @abstractmethod
    def sources(cls, shape: Shape, props: Props) -> SourceIndices:
        """The index map of each dimension that changes. Raises ShardirError."""

    @classmethod
    def filling(cls, props: Props) -> float:
        """The value of elements without a source."""
        return 0.0

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = list(operands[0].get_shape())
        for d, index_map in cls.sources(tuple(shape), props).items():
            shape[d] = index_map.length
        return [tensor(operands[0].element_type, tuple(shape))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        """A slice of less than half of a dimension becomes a partial sum of the elements on each
        device: its reduction moves fewer elements than a gather of the dimension."""
        shape = operands[0].get_shape()
        ins, outs, moved = factor_names(len(shape)), factor_names(len(shape)), []
        for d, index_map in cls.sources(shape, props).items():
            if cls.PART and 2 * index_map.length < shape[d]:
                outs[d] = f"o{d}"
            else:
                moved.append(ins[d])
        return Factors.of(
            [ins], [outs], [shape, results[0].get_shape()], moved=moved,
            linear="" if cls.filling(props) else "any",
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        (out,) = arrays
        shape, total = device.shape(self.out), device.global_shape(self.x)
        filling = np.asarray(self.filling(self.properties)).astype(out.dtype)
        for d, index_map in self.sources(total, self.properties).items():
            indices = index_map.indices(device.start(self.out, d), shape[d], total[d])
            local = indices - device.start(self.x, d)
            inside = (indices >= 0) & (local >= 0) & (local < out.shape[d])
            column = [1] * out.ndim
            column[d] = shape[d]
            if out.shape[d]:
                taken = np.take(out, np.where(inside, local, 0), axis=d)
            else:
                taken = np.zeros((*out.shape[:d], shape[d], *out.shape[d + 1 :]), out.dtype)
            out = np.where(inside.reshape(column), taken, filling)
        return out


@op_definition
class FlipOp(IndexMapOp):
    """The dimensions `dims` in reverse order."""

    name = "nn.flip"
    dims = prop_def(DimsAttr)
    assembly_format = f"$x `dims` $dims {STRATEGY}"

    @classmethod
    def sources(cls, shape: Shape, props: Props) -> SourceIndices:
        return {d: IndexMap(shape[d], shape[d] - 1, -1) for d in dims_of(props, "dims", len(shape))}

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.value(FlipOp, dy, props={"dims": self.dims}),)


@op_definition
class RollOp(IndexMapOp):
    """Each dimension rotated by its number of `shifts`: index i moves to (i + shift) mod n."""

    name = "nn.roll"
    shifts = prop_def(IntsPerDimAttr)
    assembly_format = f"$x `shifts` $shifts {STRATEGY}"

    @classmethod
    def sources(cls, shape: Shape, props: Props) -> SourceIndices:
        return {
            d: IndexMap(n, -k, wraps=True)
            for d, (n, k) in enumerate(
                zip(shape, ints_of(props, "shifts", len(shape)), strict=True)
            )
            if n and k % n
        }

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        shape, shifts, out = unsharded_type(self.x).get_shape(), list(self.shifts.data), self.x
        for d in split_dims(b, out, list(self.sources(shape, self.properties))):
            n, k = shape[d], shifts[d] % shape[d]
            out = union(
                b, strided_elements(b, out, d, -k, n), strided_elements(b, out, d, n - k, n)
            )
            shifts[d] = 0
        if any(shifts):
            out = b.value(RollOp, out, props={"shifts": IntsPerDimAttr(tuple(shifts))})
        return (out,)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        back = IntsPerDimAttr(tuple(-k for k in self.shifts.data))
        return (b.value(RollOp, dy, props={"shifts": back}),)


@op_definition
class TileOp(IndexMapOp):
    """Each dimension repeated its number of `repeats` times: 1 2 3 1 2 3."""

    name = "nn.tile"
    repeats = prop_def(IntsPerDimAttr)
    assembly_format = f"$x `repeats` $repeats {STRATEGY}"

    @classmethod
    def sources(cls, shape: Shape, props: Props) -> SourceIndices:
        repeats = ints_of(props, "repeats", len(shape))
        if any(k < 0 for k in repeats):
            raise ShardirError(coded("T10", f"expected repeats of 0 or more, got {list(repeats)}"))
        return {
            d: IndexMap(n * k, wraps=True)
            for d, (n, k) in enumerate(zip(shape, repeats, strict=True))
            if k != 1
        }

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        shape = unsharded_type(self.x).get_shape()
        pairs = [n for pair in zip(self.repeats.data, shape, strict=True) for n in pair]
        copies = b.reshape(dy, tuple(pairs))
        return (b.reduce(copies, "sum", range(0, len(pairs), 2)),)


@op_definition
class RepeatInterleaveOp(Movement):
    """Each element along `axis` `repeats` times: 1 1 2 2 3 3."""

    name = "nn.repeat_interleave"
    x = operand_def(TensorType)
    repeats = prop_def(IntegerAttr.constr(type=i64))
    axis = prop_def(IntegerAttr.constr(type=i64))
    out = result_def(TensorType)
    assembly_format = f"$x `repeats` $repeats `axis` $axis {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = operands[0].get_shape()
        axis, repeats = axis_of(props, "axis", len(shape)), int_of(props, "repeats")
        if repeats < 0:
            raise ShardirError(coded("T10", f"expected repeats of 0 or more, got {repeats}"))
        new = (*shape[:axis], shape[axis] * repeats, *shape[axis + 1 :])
        return [tensor(operands[0].element_type, new)]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        """Each device repeats the elements of its shard, if shards are even."""
        shape = operands[0].get_shape()
        axis, names = axis_of(props, "axis", len(shape)), factor_names(len(shape))
        outs, repeats = list(names), int_of(props, "repeats")
        if repeats > 1:
            outs[axis] = f"{names[axis]} r"
        factors = Factors.of(
            [names], [outs], [shape, results[0].get_shape()], linear="any",
            moved=[] if repeats else [names[axis]],
        )  # fmt: skip
        return factors.with_sizes({"r": repeats})

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, shape = arrays[0], device.shape(self.out)
        axis = axis_of(self.properties, "axis", x.ndim)
        repeats = max(1, int_of(self.properties, "repeats"))
        copies = np.repeat(x, repeats, axis=axis)
        first = device.start(self.out, axis) - device.start(self.x, axis) * repeats
        return np.take(copies, np.arange(first, first + shape[axis]), axis=axis)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        shape = unsharded_type(self.x).get_shape()
        axis = axis_of(self.properties, "axis", len(shape))
        repeats = int_of(self.properties, "repeats")
        copies = b.reshape(dy, (*shape[: axis + 1], repeats, *shape[axis + 1 :]))
        return (b.reduce(copies, "sum", [axis + 1]),)
