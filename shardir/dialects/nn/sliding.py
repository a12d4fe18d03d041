"""Kernels that slide over dimensions, in convolutions and pools.

An op that slides over a split dimension is computed on windows, one for each device (`Tiles`, with
`nn.unfold`).
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.nn.arithmetic import RemainderOp
from shardir.dialects.nn.base import Array, Props
from shardir.dialects.nn.creation import indices
from shardir.dialects.nn.logic import AndOp
from shardir.dialects.nn.movement import IntsPerDimAttr
from shardir.dialects.nn.types import unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

SPATIAL = 2
"""The first spatial dimension, after the batch and the channels."""


class Slide(NamedTuple):
    """A kernel that slides over one dimension with a padding of `low` and `high`."""

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
        """Whether each result depends on one element only, so that the dimension can be split."""
        return self[:4] == (1, 1, 0, 0)

    def positions(self, size: int) -> int:
        """The number of positions of the kernel over a dimension of `size` elements.

        Raises:
            ShardirError: the kernel does not fit.
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
        values = attr.data if isinstance(attr, IntsPerDimAttr) else (default,) * n * per_dim
        if len(values) != n * per_dim:
            per_dimension = "two numbers, low and high," if per_dim == 2 else "one number"
            raise ShardirError(
                coded(
                    "T10",
                    f"expected {name} with {per_dimension} for each of {n} dimensions, got "
                    f"<{', '.join(map(str, values))}>",
                )
            )
        return values

    stride, dilation = numbers("stride", 1, 1), numbers("dilation", 1, 1)
    padding = numbers("padding", 2, 0)
    return [
        Slide(*s) for s in zip(kernel, stride, padding[::2], padding[1::2], dilation, strict=True)
    ]


def slide_props(windows: Sequence[Slide]) -> dict[str, Any]:
    """The properties of a slide: stride, padding and dilation."""
    return {
        "stride": IntsPerDimAttr(tuple(s.stride for s in windows)),
        "padding": IntsPerDimAttr(tuple(n for s in windows for n in (s.low, s.high))),
        "dilation": IntsPerDimAttr(tuple(s.dilation for s in windows)),
    }


def taps(windows: Sequence[Slide], positions: Shape) -> Iterator[tuple[Any, Any]]:
    """Yield each index of the kernel, and the elements of padded x under it."""
    for index in product(*(range(s.kernel) for s in windows)):
        under = (s.under(k, n) for s, k, n in zip(windows, index, positions, strict=True))
        yield (..., *index), (..., *under)


def padded(x: Array, windows: Sequence[Slide], value: float = 0.0) -> Array:
    """x padded with a value."""
    ends = [(0, 0)] * (x.ndim - len(windows)) + [(s.low, s.high) for s in windows]
    return np.pad(x, ends, constant_values=value)


class Tiles:
    """A sliding op in tiles. A split dimension of `x` becomes two: the devices' windows and their
    elements. A split dimension of the result `y` becomes the windows and their positions. The
    kernel stays within a window, so that the dimension of windows can be split."""

    def __init__(self, found: Sequence[Slide], x: Shape, y: Shape, parts: Sequence[int]):
        self.slides: list[Slide] = []
        self.cut: list[tuple[int, Windows, Windows, Slide]] = []
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
                 Windows(positions, count, each, each), s)
            )  # fmt: skip
            self.slides += [Slide(1), Slide(s.kernel, s.stride, dilation=s.dilation)]
            self.x += [count, size]
            self.y += [count, each]

    def of_x(self, b: "OpBuilder", x: SSAValue, maxima: bool = False) -> SSAValue:
        """The windows of x.

        For products, elements under no position are zeros: a NaN there, times 0, would reach the
        gradient of a weight. For `maxima`, the padding before the first element copies it and
        passes its cotangent to it, even if the whole window is the lowest number; the padding after
        the last element is the lowest number.
        """
        for dim, windows, positions, slide in reversed(self.cut):
            x = b.unfold(x, dim, windows, lowest=maxima)
            if not maxima:
                x = _used(b, x, dim, windows, positions, slide)
            elif (low := -windows.offset) > 0:
                rank, axes = _rest(b, x, dim)
                window = b.scale(indices(b, windows.count, 0, rank, axes), windows.size)
                index = b.add(window, indices(b, windows.size, 1, rank))
                before = b.compare("lt", index, b.scalar(low, index))
                x = b.select(before, between(b, x, dim + 1, low, low + 1), x)
        return x

    def of_y(self, b: "OpBuilder", y: SSAValue) -> SSAValue:
        """The positions of each window."""
        for dim, _, windows, _ in reversed(self.cut):
            y = b.unfold(y, dim, windows)
        return y

    def to_x(self, b: "OpBuilder", x: SSAValue) -> SSAValue:
        """Add windows onto the elements of x."""
        for dim, windows, _, _ in self.cut:
            x = b.fold(x, dim, windows)
        return x

    def to_y(self, b: "OpBuilder", y: SSAValue) -> SSAValue:
        """Merge windows into the positions of y."""
        for dim, _, windows, _ in self.cut:
            y = b.fold(y, dim, windows)
        return y

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(s.kernel for s in self.slides)


def _rest(b: "OpBuilder", x: SSAValue, dim: int) -> tuple[int, Axes]:
    """The number of dimensions from `dim` on, and the axes that split it."""
    return len(unsharded_type(x).get_shape()) - dim, b.layout(x).dims[dim]


def _used(
    b: "OpBuilder", x: SSAValue, dim: int, windows: Windows, positions: Windows, slide: Slide
) -> SSAValue:
    """Replace the elements of windows that are under no position by zeros."""
    last = positions.rows - (positions.count - 1) * positions.size  # positions in the last window
    end = (positions.rows - 1) * slide.stride + slide.span + windows.offset
    is_complete = last == positions.size or end >= windows.rows
    if is_complete and slide.dilation == 1 and slide.stride <= slide.kernel:
        return x
    rank, axes = _rest(b, x, dim)
    window = indices(b, positions.count, 0, rank + 1, axes)
    position = b.add(b.scale(window, positions.size), indices(b, positions.size, 1, rank + 1))
    tap = indices(b, slide.span, 2, rank + 1)
    under = b.value(
        AndOp,
        b.compare("lt", position, b.scalar(positions.rows, position)),
        b.compare("eq", b.value(RemainderOp, tap, b.scalar(slide.dilation, tap)), b.scalar(0, tap)),
    )
    over = Windows(windows.size, positions.size, slide.span, slide.stride)
    times = b.fold(b.convert(under, f32), 1, over)
    return b.select(b.compare("gt", times, b.scalar(0.0, times)), x, b.scalar(0.0, x))


def tiles(b: "OpBuilder", windows: Sequence[Slide], x: Shape, y: Shape, *values: SSAValue) -> Tiles:
    """The tiles for the layouts of `values`, which have shape x or y."""
    assert b.mesh is not None
    mesh = b.mesh
    layouts = [b.layout(v) for v in values]
    parts = [max(mesh.extent(l.dims[SPATIAL + i]) for l in layouts) for i in range(len(windows))]
    return Tiles(windows, x, y, parts)


def between(b: "OpBuilder", x: SSAValue, dim: int, start: int, end: int) -> SSAValue:
    """Elements [start, end) of a dimension."""
    ends = list(unsharded_type(x).get_shape())
    starts = [0] * len(ends)
    starts[dim], ends[dim] = start, end
    return b.slice(x, starts, ends)


def kernel_size(windows: Sequence[Slide]) -> int:
    return prod(s.kernel for s in windows)
