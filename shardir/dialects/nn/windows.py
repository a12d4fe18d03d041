"""Windows of a dimension, as two dimensions: the windows and their elements.

    %w = nn.unfold %x dim 2 step 4 offset -1
           : (tensor<8x3x16xf32>) -> tensor<8x3x4x6xf32>

If the dimension is split, the windows are split over the same axes, and lower-to-spmd inserts a
halo exchange, in which each device fetches the elements of its windows that it lacks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.algebra.mesh import Mesh
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError, coded
from shardir.dialects import dist
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.properties import axis_of, int_attr, int_of
from shardir.dialects.nn.types import arithmetic_element, same_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

Int = IntegerAttr.constr(type=i64)
T = TypeVar("T")


class _WindowsOp(TensorOp, ABC):
    """An op between a value with a dimension, and a value with its windows and their elements. The
    result's type specifies the sizes."""

    COLLECTIVE: ClassVar[type[dist.HaloOp]]
    GLOBAL_TYPES: ClassVar[bool] = True
    INFERRED: ClassVar[bool] = False
    dim = prop_def(Int)
    step = prop_def(Int)
    offset = prop_def(Int)
    x = operand_def(TensorType)
    out = result_def(TensorType)

    @classmethod
    @abstractmethod
    def ends(cls, operands: Sequence[T], results: Sequence[T]) -> tuple[T, T]:
        """The operand and the result: first the value with the dimension, then its windows."""

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        x, windows = (t.get_shape() for t in cls.ends(operands, results))
        same_element((*operands, *results))
        d = axis_of(props, "dim", len(x))
        if (step := int_of(props, "step")) < 1:
            raise ShardirError(coded("T10", f"expected a step of at least 1, got {step}"))
        if len(windows) <= d + 1 or x[:d] + x[d + 1 :] != windows[:d] + windows[d + 2 :]:
            raise ShardirError(
                coded(
                    "T1",
                    f"expected windows of {list(x)} with two dimensions instead of dimension "
                    f"{d}, got {list(windows)}",
                )
            )

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        value, _ = cls.ends(operands, results)
        names = factor_names(len(value.get_shape()))
        d = axis_of(props, "dim", len(names))
        sides = names, [*names[: d + 1], "", *names[d + 1 :]]
        x, out = sides if cls.LINEAR == "any" else sides[::-1]
        return Factors.of(
            [x], [out], [t.get_shape() for t in (*operands, *results)],
            linear=cls.linear(props), sliding=[names[d]],
        )  # fmt: skip

    @classmethod
    def linear(cls, props: Props) -> str:
        """Return the argument `linear` of the factors."""
        return cls.LINEAR

    LINEAR: ClassVar[str]

    @property
    def at(self) -> int:
        """The index of the dimension, and of the windows in the other value."""
        value, _ = self.ends(self.operands, self.results)
        return axis_of(self.properties, "dim", len(unsharded_type(value).get_shape()))

    def windows(self, mesh: Mesh | None = None) -> Windows:
        """The windows: sizes, step and offset."""
        x, out = self.shapes(mesh)
        value, windows = self.ends([x], [out])
        at = self.at
        step, offset = self.step.value.data, self.offset.value.data
        return Windows(value[at], windows[at], windows[at + 1], step, offset)

    def start(self, device: Device) -> int:
        """The local index at which the first window of this device begins."""
        value, windows = self.ends(self.operands, self.results)
        first = device.start(windows, self.at) * self.step.value.data + self.offset.value.data
        return first - device.start(value, self.at)

    def exchange(self, mesh: Mesh) -> tuple[type[dist.CollectiveOp], Props] | None:
        layout = layout_of(self.x)
        axes = layout.dims[self.at] if layout is not None else ()
        if not self.windows(mesh).halo(mesh.extent(axes)):
            return None
        props = {n: p for n, p in self.properties.items() if n != "strategy"}
        return self.COLLECTIVE, {**props, "dim": int_attr(self.at), "axes": dist.AxesAttr(axes)}


@op_definition
class UnfoldOp(_WindowsOp):
    """Windows of a dimension, `step` elements apart; the first begins at index `offset`. Elements
    outside of the dimension are zeros, or the `lowest` number."""

    name = "nn.unfold"
    FLOPS: ClassVar[int] = 0
    COLLECTIVE: ClassVar[type[dist.HaloOp]] = dist.HaloUnfoldOp
    LINEAR: ClassVar[str] = "any"
    lowest = opt_prop_def(UnitAttr)
    assembly_format = f"$x `dim` $dim `step` $step `offset` $offset (`lowest` $lowest^)? {STRATEGY}"

    @classmethod
    def ends(cls, operands: Sequence[T], results: Sequence[T]) -> tuple[T, T]:
        return operands[0], results[0]

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        super().check_results(operands, results, props)
        if "lowest" in props:
            arithmetic_element(cls.name, operands)

    @classmethod
    def linear(cls, props: Props) -> str:
        """With `lowest` the op is not linear: the sum of two lowest integers is 0."""
        return "" if "lowest" in props else cls.LINEAR

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        d, (count, size) = self.at, device.shape(self.out)[self.at : self.at + 2]
        lowest = self.lowest is not None
        return unfold(arrays[0], d, count, size, self.step.value.data, self.start(device), lowest)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.fold(dy, self.at, self.windows()),)


@op_definition
class FoldOp(_WindowsOp):
    """The sum of windows at their positions: the transpose of `nn.unfold`."""

    name = "nn.fold"
    COLLECTIVE: ClassVar[type[dist.HaloOp]] = dist.HaloFoldOp
    LINEAR: ClassVar[str] = "sum"
    assembly_format = f"$x `dim` $dim `step` $step `offset` $offset {STRATEGY}"

    @classmethod
    def ends(cls, operands: Sequence[T], results: Sequence[T]) -> tuple[T, T]:
        return results[0], operands[0]

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        super().check_results(operands, results, props)
        arithmetic_element(cls.name, operands)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        size = device.shape(self.out)[self.at]
        return fold(arrays[0], self.at, size, self.step.value.data, self.start(device))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.unfold(dy, self.at, self.windows()),)


def at_dim(dim: int, start: int, stop: int, step: int = 1) -> tuple[slice, ...]:
    """The index of a range of a dimension."""
    return (*[slice(None)] * dim, slice(start, stop, step))


def span(x: Array, dim: int, start: int, length: int, lowest: bool = False) -> Array:
    """Elements [start, start + length) of a dimension; zeros, or the lowest, past its ends."""
    fill: Any = 0
    if lowest:
        fill = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    out = np.full((*x.shape[:dim], length, *x.shape[dim + 1 :]), fill, x.dtype)
    low, high = max(start, 0), min(start + length, x.shape[dim])
    if low < high:
        out[at_dim(dim, low - start, high - start)] = x[at_dim(dim, low, high)]
    return out


def unfold(
    x: Array, dim: int, count: int, size: int, step: int, start: int, lowest: bool = False
) -> Array:
    """`count` windows of `size` elements of x, `step` apart; the first begins at `start`."""
    windows = [span(x, dim, start + p * step, size, lowest) for p in range(count)]
    shape = (*x.shape[:dim], 0, size, *x.shape[dim + 1 :])
    return np.stack(windows, dim) if windows else np.zeros(shape, x.dtype)


def fold(x: Array, dim: int, size: int, step: int, start: int) -> Array:
    """The sum of windows, `step` apart, in a dimension of `size`; the first begins at `start`."""
    out = np.zeros((*x.shape[:dim], size, *x.shape[dim + 2 :]), x.dtype)
    for p in range(x.shape[dim]):
        out += span(x.take(p, dim), dim, -start - p * step, size)
    return out
