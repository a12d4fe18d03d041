"""Ops without operands."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    BFloat16Type,
    DenseIntOrFPElementsAttr,
    IntegerAttr,
    IntegerType,
    TensorType,
    i64,
)
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.diagnostics import coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.properties import axis_of
from shardir.dialects.nn.types import arithmetic_element

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


def count_to(n: int) -> Array:
    """The integers from 0 to n - 1."""
    return np.arange(n)


def dense_values(attr: DenseIntOrFPElementsAttr[Any]) -> Array:
    """The numbers of a dense attribute, in its type's (global) shape; bf16 as float32. A splat is a
    broadcast view of one number."""
    values = attr.get_values()
    element = attr.get_element_type()
    if isinstance(element, IntegerType):
        kind: Any = bool if element.width.data == 1 else np.int64
    else:
        kind = np.float32 if isinstance(element, BFloat16Type) else np.float64
    flat = np.array(values, dtype=kind)
    shape = attr.get_shape()
    return np.broadcast_to(flat[0], shape) if flat.size == 1 else flat.reshape(shape)


def dense_attr(type: TensorType[Any], values: Sequence[float]) -> DenseIntOrFPElementsAttr[Any]:
    """The dense attribute of numbers in row-major order; one number is a splat."""
    if len(values) == 1:
        one = DenseIntOrFPElementsAttr.from_list(TensorType(type.element_type, []), values)
        return DenseIntOrFPElementsAttr(type, one.data)
    return DenseIntOrFPElementsAttr.from_list(type, values)


@op_definition
class ConstantOp(TensorOp):
    """Numbers in the program. A device holds its shard of them.

    %c = nn.constant dense<[[1.0, 2.0], [3.0, 4.0]]> : tensor<2x2xf32> -> tensor<2x2xf32>
    """

    name = "nn.constant"
    FLOPS: ClassVar[int] = 0
    value = prop_def(DenseIntOrFPElementsAttr)
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = "$value (`strategy` $strategy^)? attr-dict `->` type($out)"

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = results[0].get_shape()
        return Factors.of([], [factor_names(len(shape))], [shape])

    def verify_signature(self) -> None:
        super().verify_signature()
        from xdsl.utils.exceptions import VerifyException

        from shardir.dialects.dist import find_mesh, global_shape, type_layout

        t = self.out.type
        layout = type_layout(t)
        mesh = find_mesh(self, layout.mesh) if layout is not None else None
        if (
            self.value.get_shape() != global_shape(t, mesh)
            or self.value.get_element_type() != t.element_type
        ):
            message = f"expected a result of type {self.value.type}, got {t}"
            raise VerifyException(coded("T1", message))

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        shape = device.shape(self.out)
        starts = [device.start(self.out, d) for d in range(len(shape))]
        part = tuple(slice(a, a + n) for a, n in zip(starts, shape, strict=True))
        return dense_values(self.value)[part]

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return ()


@op_definition
class IotaOp(TensorOp):
    """0, 1, 2, ... along `dim`, repeated along the other dimensions.

    %i = nn.iota dim 1 -> tensor<4x4xi32>
    """

    name = "nn.iota"
    FLOPS: ClassVar[int] = 0
    dim = prop_def(IntegerAttr.constr(type=i64))
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = "`dim` $dim (`strategy` $strategy^)? attr-dict `->` type($out)"

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        axis_of(props, "dim", len(results[0].get_shape()))
        arithmetic_element(cls.name, results)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = results[0].get_shape()
        return Factors.of([], [factor_names(len(shape))], [shape])

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        shape = device.shape(self.out)
        dim = axis_of(self.properties, "dim", len(shape))
        start = device.start(self.out, dim)
        column = [1] * len(shape)
        column[dim] = shape[dim]
        return np.broadcast_to(np.arange(start, start + shape[dim]).reshape(column), shape)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return ()


def indices(
    b: "OpBuilder", size: int, at: int, rank: int, axes: Axes = (), element: Attribute = i64
) -> SSAValue:
    """The indices of dimension `at`, split over `axes`; the other dimensions have size 1."""
    shape, dims = [1] * rank, [Axes()] * rank
    shape[at], dims[at] = size, axes
    like = Layout(b.mesh.name, tuple(dims)) if b.mesh is not None else None
    result = tensor(element, tuple(shape))
    return b.value(IotaOp, props={"dim": IntegerAttr(at, i64)}, result=result, like=like)
