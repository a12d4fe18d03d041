"""Windows of a dimension, and ops with a sliding kernel: convolutions, pools.

    %w = nn.unfold %x dim 2 step 4 offset -1
           : (tensor<8x3x16xf32>) -> tensor<8x3x4x6xf32>

Where the dimension is split, the windows are split over the same axes, and lower-to-spmd makes an
exchange of it, in which each device fetches the elements of its windows that it lacks. So an op
that slides over a split dimension is computed on windows, one for each device (`Tiles`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError, coded
from shardir.dialects import dist
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.movement import IntsPerDimAttr
from shardir.dialects.nn.properties import axis_of, int_attr, int_of
from shardir.dialects.nn.types import arithmetic_element, same_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

Int = IntegerAttr.constr(type=i64)
T = TypeVar("T")


# ---- windows as dimensions ----


class _WindowsOp(TensorOp, ABC):
    """A dimension on one side; on the other its windows, and the elements of each. The number of
    windows is that of the result's type."""

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
        """Operand and result, the one with the dimension first, then the one with its windows."""

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
        both = names, [*names[: d + 1], "", *names[d + 1 :]]
        x, out = both if cls.LINEAR == "any" else both[::-1]
        return Factors.of(
            [x], [out], [t.get_shape() for t in (*operands, *results)],
            linear=cls.linear(props), sliding=[names[d]],
        )  # fmt: skip

    @classmethod
    def linear(cls, props: Props) -> str:
        """Return the `linear` of the factors."""
        return cls.LINEAR

    LINEAR: ClassVar[str]

    @property
    def at(self) -> int:
        """The dimension; on the side of the windows that of their number."""
        value, _ = self.ends(self.operands, self.results)
        return axis_of(self.properties, "dim", len(unsharded_type(value).get_shape()))

    def windows(self, mesh: Mesh | None = None) -> Windows:
        """The range of elements of each window."""
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
        parts = mesh.extent(axes)
        windows = self.windows(mesh)
        needed = ((k, r.holder) for k in range(parts) for r in windows.needed(parts, k))
        if all(k == holder for k, holder in needed):
            return None
        props = {n: p for n, p in self.properties.items() if n != "strategy"}
        return self.COLLECTIVE, {**props, "dim": int_attr(self.at), "axes": dist.AxesAttr(axes)}


@irdl_op_definition
class UnfoldOp(_WindowsOp):
    """Windows of a dimension, each `step` after the one before; the first begins at index `offset`.
    Elements outside of the dimension are zeros, or the `lowest` number."""

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
        """The lowest number is no share of a sum: of integers, the lowest twice is 0."""
        return "" if "lowest" in props else cls.LINEAR

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        d, (count, size) = self.at, device.shape(self.out)[self.at : self.at + 2]
        lowest = self.lowest is not None
        return unfold(arrays[0], d, count, size, self.step.value.data, self.start(device), lowest)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.fold(dy, self.at, self.windows()),)


@irdl_op_definition
class FoldOp(_WindowsOp):
    """The sum of windows, each added where `nn.unfold` takes it from: the transpose of it."""

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
    """Windows of x, the first from index `start` on."""
    windows = [span(x, dim, start + p * step, size, lowest) for p in range(count)]
    shape = (*x.shape[:dim], 0, size, *x.shape[dim + 1 :])
    return np.stack(windows, dim) if windows else np.zeros(shape, x.dtype)


def fold(x: Array, dim: int, size: int, step: int, start: int) -> Array:
    """The sum of windows, the first from index `start` on."""
    out = np.zeros((*x.shape[:dim], size, *x.shape[dim + 2 :]), x.dtype)
    for p in range(x.shape[dim]):
        out += span(x.take(p, dim), dim, -start - p * step, size)
    return out


# ---- sliding kernels ----

SPATIAL = 2
"""The first spatial dimension: before it are the batch and the channels."""


class Slide(NamedTuple):
    """A kernel that slides over one dimension, with a padding of `low` and `high` at its ends."""

    kernel: int
    stride: int = 1
    low: int = 0
    high: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """The number of elements from the first to the last under the kernel."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def passes(self) -> bool:
        """Whether each element is computed from one: the dimension can be split."""
        return self[:4] == (1, 1, 0, 0)

    def positions(self, size: int) -> int:
        """The number of positions of the kernel over a dimension of `size` elements.

        Raises:
            ShardirError: it does not fit.
        """
        if min(self.kernel, self.stride, self.dilation) < 1 or min(self.low, self.high) < 0:
            raise ShardirError(
                coded(
                    "T10",
                    "expected a kernel, stride and dilation of at least 1, and a padding of 0 or "
                    f"more, got {self.kernel}, {self.stride}, {self.dilation} and {self.low}, "
                    f"{self.high}",
                )
            )
        free = size + self.low + self.high - self.span
        if free < 0:
            raise ShardirError(
                coded(
                    "T10",
                    f"expected a kernel that fits {size} elements and a padding of {self.low} and "
                    f"{self.high}, got one over {self.span}",
                )
            )
        return free // self.stride + 1

    def under(self, k: int, positions: int) -> slice:
        """The elements, padding included, under element k of the kernel at each position."""
        first = k * self.dilation
        return slice(first, first + (positions - 1) * self.stride + 1, self.stride)


def slides(kernel: Sequence[int], props: Props) -> list[Slide]:
    """The slide of the kernel over each spatial dimension.

    Raises:
        ShardirError: a property does not have one number for each spatial dimension.
    """
    n = len(kernel)

    def numbers(name: str, per_dim: int, default: int) -> tuple[int, ...]:
        attr = props.get(name)
        found = attr.data if isinstance(attr, IntsPerDimAttr) else (default,) * n * per_dim
        if len(found) != n * per_dim:
            each = "two numbers, low and high," if per_dim == 2 else "one number"
            raise ShardirError(
                coded(
                    "T10",
                    f"expected {name} with {each} for each of {n} dimensions, got "
                    f"<{', '.join(map(str, found))}>",
                )
            )
        return found

    stride, dilation = numbers("stride", 1, 1), numbers("dilation", 1, 1)
    padding = numbers("padding", 2, 0)
    return [
        Slide(*s) for s in zip(kernel, stride, padding[::2], padding[1::2], dilation, strict=True)
    ]


def slide_props(found: Sequence[Slide]) -> dict[str, Any]:
    """The properties of a slide: stride, padding and dilation."""
    return {
        "stride": IntsPerDimAttr(tuple(s.stride for s in found)),
        "padding": IntsPerDimAttr(tuple(n for s in found for n in (s.low, s.high))),
        "dilation": IntsPerDimAttr(tuple(s.dilation for s in found)),
    }


def taps(found: Sequence[Slide], positions: Shape) -> Iterator[tuple[Any, Any]]:
    """Yield each index of the kernel, and the elements of padded x under it."""
    for at in product(*(range(s.kernel) for s in found)):
        under = (s.under(k, n) for s, k, n in zip(found, at, positions, strict=True))
        yield (..., *at), (..., *under)


def padded(x: Array, found: Sequence[Slide], value: float = 0.0) -> Array:
    """x padded with a value."""
    ends = [(0, 0)] * (x.ndim - len(found)) + [(s.low, s.high) for s in found]
    return np.pad(x, ends, constant_values=value)


class Tiles:
    """An op that slides, in tiles: a split dimension of `x` becomes two, the devices' windows and
    their elements; one of the result `y`, the windows and the positions in each. The kernel stays
    within a window, so that the dimension of windows can be split."""

    def __init__(self, found: Sequence[Slide], x: Shape, y: Shape, parts: Sequence[int]):
        self.slides: list[Slide] = []
        self.kept: list[bool] = []
        self.cut: list[tuple[int, Windows, Windows]] = []
        self.x, self.y = list(x[:SPATIAL]), list(y[:SPATIAL])
        for i, (s, total, positions, n) in enumerate(
            zip(found, x[SPATIAL:], y[SPATIAL:], parts, strict=True)
        ):
            if n == 1 or s.passes:
                self.slides.append(s)
                self.x.append(total)
                self.y.append(positions)
                continue
            each = -(-positions // n)
            count = -(-positions // each)
            size = (each - 1) * s.stride + s.span
            self.cut.append(
                (SPATIAL + i, Windows(total, count, size, each * s.stride, -s.low),
                 Windows(positions, count, each, each))
            )  # fmt: skip
            self.slides += [Slide(1), Slide(s.kernel, s.stride, dilation=s.dilation)]
            self.x += [count, size]
            self.y += [count, each]

    def of_x(self, b: "OpBuilder", x: SSAValue, lowest: bool = False) -> SSAValue:
        """The windows of x."""
        for dim, windows, _ in reversed(self.cut):
            x = b.unfold(x, dim, windows, lowest)
        return x

    def of_y(self, b: "OpBuilder", y: SSAValue) -> SSAValue:
        """The positions of each window."""
        for dim, _, windows in reversed(self.cut):
            y = b.unfold(y, dim, windows)
        return y

    def to_x(self, b: "OpBuilder", x: SSAValue) -> SSAValue:
        """The sum of windows, of the shape of x."""
        for dim, windows, _ in self.cut:
            x = b.fold(x, dim, windows)
        return x

    def to_y(self, b: "OpBuilder", y: SSAValue) -> SSAValue:
        """The positions of all windows."""
        for dim, _, windows in self.cut:
            y = b.fold(y, dim, windows)
        return y

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(s.kernel for s in self.slides)


def tiles(b: "OpBuilder", found: Sequence[Slide], x: Shape, y: Shape, *values: SSAValue) -> Tiles:
    """The tiles for the layouts of these values, of shape x or y."""
    assert b.mesh is not None
    mesh = b.mesh
    layouts = [b.layout(v) for v in values]
    parts = [max(mesh.extent(l.dims[SPATIAL + i]) for l in layouts) for i in range(len(found))]
    return Tiles(found, x, y, parts)


def kernel_size(found: Sequence[Slide]) -> int:
    return prod(s.kernel for s in found)
