"""Movement with several operands or results: concat, stack, split."""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    operand_def,
    prop_def,
    result_def,
    var_operand_def,
    var_result_def,
)

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, Types, factor_names
from shardir.dialects.nn.movement import IntsPerDimAttr, Movement, strided_elements, union
from shardir.dialects.nn.properties import axis_of
from shardir.dialects.nn.types import same_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


class _Joining(Movement, ABC):
    xs = var_operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    out = result_def(TensorType)
    assembly_format = f"$xs `axis` $axis {STRATEGY}"


@op_definition
class ConcatOp(_Joining):
    """The operands one after the other along `axis`."""

    name = "nn.concat"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        needs_one(cls.name, operands)
        element, first = same_element(operands), operands[0].get_shape()
        axis = axis_of(props, "axis", len(first))
        for i, t in enumerate(operands):
            shape = t.get_shape()
            if len(shape) != len(first) or _without(shape, axis) != _without(first, axis):
                message = (
                    f"expected operand {i} equal to {list(first)} but for dimension {axis}, "
                    f"got {list(shape)}"
                )
                raise ShardirError(coded("T6", message))
        size = sum(t.get_shape()[axis] for t in operands)
        return [tensor(element, (*first[:axis], size, *first[axis + 1 :]))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(results[0].get_shape()))
        return Factors.of(
            [names] * len(operands), [names], [t.get_shape() for t in (*operands, *results)],
            moved=[names[axis_of(props, "axis", len(names))]], linear="any",
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        axis = axis_of(self.properties, "axis", arrays[0].ndim)
        return _part(device, np.concatenate(arrays, axis=axis), self.out, axis)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """Pad each operand with zeros to the result's size, and add."""
        shape = unsharded_type(self.out).get_shape()
        axis, before = axis_of(self.properties, "axis", len(shape)), 0
        out: SSAValue | None = None
        for x in self.xs:
            n = unsharded_type(x).get_shape()[axis]
            new = strided_elements(b, x, axis, -before, shape[axis])
            out = new if out is None else union(b, out, new)
            before += n
        assert out is not None
        return (out,)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        axis = axis_of(self.properties, "axis", len(unsharded_type(self.out).get_shape()))
        return b.split(dy, [unsharded_type(x).get_shape()[axis] for x in self.xs], axis)


@op_definition
class StackOp(_Joining):
    """The operands side by side along a new dimension, `axis` of the result."""

    name = "nn.stack"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        needs_one(cls.name, operands)
        element, shape = same_element(operands), operands[0].get_shape()
        for t in operands:
            if t.get_shape() != shape:
                message = (
                    f"expected operands of one shape, got {list(shape)} and {list(t.get_shape())}"
                )
                raise ShardirError(coded("T6", message, use=""))
        axis = axis_of(props, "axis", len(shape) + 1)
        return [tensor(element, (*shape[:axis], len(operands), *shape[axis:]))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        axis = axis_of(props, "axis", len(names) + 1)
        return Factors.of(
            [names] * len(operands), [[*names[:axis], "s", *names[axis:]]],
            [t.get_shape() for t in (*operands, *results)], linear="any",
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        axis = axis_of(self.properties, "axis", arrays[0].ndim + 1)
        return _part(device, np.stack(arrays, axis=axis), self.out, axis)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        shape = unsharded_type(self.xs[0]).get_shape()
        axis = axis_of(self.properties, "axis", len(shape) + 1)
        return [b.reshape(d, shape) for d in b.split(dy, [1] * len(self.xs), axis)]


@op_definition
class SplitOp(Movement):
    """Pieces of x along `axis`, with the given `sizes`."""

    name = "nn.split"
    x = operand_def(TensorType)
    sizes = prop_def(IntsPerDimAttr)
    axis = prop_def(IntegerAttr.constr(type=i64))
    outs = var_result_def(TensorType)
    assembly_format = f"$x `sizes` $sizes `axis` $axis {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = operands[0].get_shape()
        axis, sizes = axis_of(props, "axis", len(shape)), cls.pieces(props)
        if sum(sizes) != shape[axis] or any(n < 0 for n in sizes) or not sizes:
            message = (
                f"expected sizes whose sum is {shape[axis]}, dimension {axis}, got {list(sizes)}"
            )
            raise ShardirError(coded("T10", message))
        element = operands[0].element_type
        return [tensor(element, (*shape[:axis], n, *shape[axis + 1 :])) for n in sizes]

    @classmethod
    def pieces(cls, props: Props) -> tuple[int, ...]:
        attr = props["sizes"]
        assert isinstance(attr, IntsPerDimAttr)
        return attr.data

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        return Factors.of(
            [names], [names] * len(results), [t.get_shape() for t in (*operands, *results)],
            moved=[names[axis_of(props, "axis", len(names))]], linear="any",
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        (x,) = arrays
        axis = axis_of(self.properties, "axis", x.ndim)
        ends = np.cumsum(self.pieces(self.properties))[:-1]
        full = np.split(x, ends, axis=axis)
        return tuple(
            _part(device, piece, out, axis) for piece, out in zip(full, self.outs, strict=True)
        )

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        axis = axis_of(self.properties, "axis", len(unsharded_type(self.x).get_shape()))
        sizes = self.pieces(self.properties)
        starts = np.cumsum((0, *sizes)).tolist()
        return [
            strided_elements(b, self.x, axis, s, n) for s, n in zip(starts, sizes, strict=False)
        ]

    def gradient(self, b: "OpBuilder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        """An unused piece has a cotangent of zeros."""
        dys = [
            b.zeros(unsharded_type(out), like=out) if d is None else d
            for d, out in zip(cotangents, self.outs, strict=True)
        ]
        return (b.value(ConcatOp, *dys, props={"axis": self.axis}),)


def needs_one(op: str, operands: Types) -> None:
    """Raises ShardirError when there is no operand."""
    if not operands:
        message = f"expected one or more operands of {op}, got none"
        raise ShardirError(coded("T10", message, use=""))


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _part(device: Device, full: Array, out: SSAValue, axis: int) -> Array:
    """The elements along `axis` of the device's shard of `out`."""
    first = device.start(out, axis)
    part = np.arange(first, first + device.shape(out)[axis])
    return np.take(full, part, axis=axis)
