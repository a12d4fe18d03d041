"""Pooling over any number of spatial dimensions: maxima, and means, which are composites of windows
and reductions.

    %y = nn.max_pool %x window <3, 3> stride <2, 2> padding <1, 1, 1, 1>
           : (tensor<8x16x32x32xf32>) -> tensor<8x16x16x16xf32>

x is [batch, channels, spatial...]. Windows of a split dimension are a halo exchange (`nn.unfold`).
"""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from xdsl.dialects.builtin import TensorType, UnitAttr, f32, f64, i64
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import operand_def, opt_prop_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.arithmetic import MaxOp
from shardir.dialects.nn.base import (
    STRATEGY,
    Array,
    Composite,
    Device,
    Props,
    TensorOp,
    Types,
    factor_names,
)
from shardir.dialects.nn.creation import indices
from shardir.dialects.nn.logic import AndOp
from shardir.dialects.nn.movement import IntsPerDimAttr
from shardir.dialects.nn.sliding import (
    SPATIAL,
    Slide,
    Tiles,
    between,
    padded,
    slide_props,
    slides,
    taps,
    tiles,
)
from shardir.dialects.nn.types import float_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


def numbers(props: Props, name: str) -> tuple[int, ...]:
    attr = props[name]
    assert isinstance(attr, IntsPerDimAttr)
    return attr.data


class _Pool(TensorOp, ABC):
    @classmethod
    def check(cls, operands: Types, count: int, what: str) -> Shape:
        """Check that x has `count` spatial dimensions, and return its shape."""
        float_element(cls.name, operands)
        shape = operands[0].get_shape()
        if count < 1 or len(shape) != SPATIAL + count:
            raise ShardirError(
                coded(
                    "T10",
                    f"expected {what} with one number for each spatial dimension of [batch, "
                    f"channels, spatial...], {len(shape) - SPATIAL} of {list(shape)}, got {count}",
                    use="write one for each",
                )
            )
        return shape

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        shapes = [t.get_shape() for t in (*operands, *results)]
        return Factors.of([names], [names], shapes, sliding=names[SPATIAL:])


class _WindowPool(_Pool, ABC):
    window = prop_def(IntsPerDimAttr)
    stride = opt_prop_def(IntsPerDimAttr)
    padding = opt_prop_def(IntsPerDimAttr)

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        window = numbers(props, "window")
        x = cls.check(operands, len(window), "window")
        windows = slides(window, props)
        positions = [s.positions(n) for s, n in zip(windows, x[SPATIAL:], strict=True)]
        if any(2 * max(s.low, s.high) > s.span for s in windows):
            raise ShardirError(
                coded("T10", "expected a padding of at most half of the window, got more")
            )
        return [tensor(operands[0].element_type, (*x[:SPATIAL], *positions))]

    def slides(self) -> list[Slide]:
        return slides(self.window.data, self.properties)


class _MaxPooling(_WindowPool, ABC):
    """A dimension with windows of several elements is unsharded, or the op is computed in tiles."""

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        windows = slides(numbers(props, "window"), props)
        windowed = [f for f, s in zip(names[SPATIAL:], windows, strict=True) if not s.passes]
        shapes = [t.get_shape() for t in (*operands, *results)]
        sides = [names] * len(operands), [names] * len(results)
        return Factors.of(*sides, shapes, replicate=windowed, sliding=windowed)

    def tiles(self, b: "OpBuilder", y: SSAValue) -> tuple[Tiles, Props]:
        """The tiles, and the properties of the pool on a tile."""
        x = self.operands[0]
        shapes = unsharded_type(x).get_shape(), unsharded_type(y).get_shape()
        cut = tiles(b, self.slides(), *shapes, *self.operands)
        props = {"window": IntsPerDimAttr(cut.kernel), **slide_props(cut.slides)}
        del props["dilation"]
        return cut, props


@op_definition
class MaxPoolGradOp(_MaxPooling):
    """Zeros, with dy added at the maximum under each window: at the first of equal elements, at the
    last of several NaN (as in torch), never at the padding"""

    name = "nn.max_pool_grad"
    x = operand_def(TensorType)
    dy = operand_def(TensorType)
    dx = result_def(TensorType)
    assembly_format = (
        f"$x `,` $dy `window` $window (`stride` $stride^)? (`padding` $padding^)? {STRATEGY}"
    )

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, dy = operands
        (y,) = super().infer([x], props)
        if dy != y:
            raise ShardirError(
                coded("T1", f"expected dy of the type of the pool's result, {y}, got {dy}")
            )
        return [x]

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, dy = arrays
        windows, positions = self.slides(), dy.shape[SPATIAL:]
        inner, inside = padded(x, windows, -np.inf), padded(np.ones(x.shape, bool), windows, False)
        out, top = np.zeros_like(inner), np.full(dy.shape, -np.inf, x.dtype)
        chosen = np.full(dy.shape, -1)
        for i, (_, under) in enumerate(taps(windows, positions)):
            value = inner[under]
            replaces = inside[under] & ((chosen < 0) | (value > top) | np.isnan(value))
            chosen[replaces], top[replaces] = i, value[replaces]
        for i, (_, under) in enumerate(taps(windows, positions)):
            out[under] += np.where(chosen == i, dy, 0)
        unpadded = zip(windows, x.shape[SPATIAL:], strict=True)
        return out[(..., *(slice(s.low, s.low + n) for s, n in unpadded))]

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        cut, props = self.tiles(b, self.dy)
        x, dy = cut.of_x(b, self.x, maxima=True), cut.of_y(b, self.dy)
        dx = b.value(MaxPoolGradOp, x, dy, props=props)
        for i, (d, windows, _, _) in enumerate(cut.cut):
            if windows.offset < 0:
                dx = self.without_copies(b, dx, d + i, -windows.offset)
        return (cut.to_x(b, dx),)

    @staticmethod
    def without_copies(b: "OpBuilder", dx: SSAValue, dim: int, low: int) -> SSAValue:
        """Move the gradient of padding to the element that the padding copies: in the first window
        along `dim`, add the first `low` elements of dx to the next one."""
        shape = list(unsharded_type(dx).get_shape())
        window = indices(b, shape[dim], 0, len(shape) - dim, b.layout(dx).dims[dim])
        is_first = b.compare("eq", window, b.scalar(0, window))
        of_padding = b.reduce(between(b, dx, dim + 1, 0, low), "sum", [dim + 1], keep=True)
        before, after = [0] * len(shape), [0] * len(shape)
        before[dim + 1], after[dim + 1] = low, shape[dim + 1] - low - 1
        return b.add(
            dx, b.pad(b.select(is_first, of_padding, b.scalar(0.0, of_padding)), before, after)
        )


@op_definition
class MaxPoolOp(_MaxPooling):
    """The maximum under each window; the first of equal elements gets the gradient, as in torch."""

    name = "nn.max_pool"
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x `window` $window (`stride` $stride^)? (`padding` $padding^)? {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        windows = self.slides()
        return _maximum(padded(arrays[0], windows, -np.inf), windows, device.shape(self.out))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        props = {n: p for n, p in self.properties.items() if n != "strategy"}
        return (b.value(MaxPoolGradOp, self.x, dy, props=props),)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        cut, props = self.tiles(b, self.out)
        return (cut.to_y(b, b.value(MaxPoolOp, cut.of_x(b, self.x, maxima=True), props=props)),)


def _maximum(x: Array, windows: Sequence[Slide], shape: Shape) -> Array:
    """The maximum under each window of padded x."""
    out = np.full(shape, -np.inf, x.dtype)
    for _, under in taps(windows, shape[SPATIAL:]):
        np.maximum(out, x[under], out=out)
    return out


@op_definition
class AvgPoolOp(Composite, _WindowPool):
    """The mean under each window; `exclude` excludes the padding from the count."""

    name = "nn.avg_pool"
    exclude = opt_prop_def(UnitAttr)
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = (
        "$x `window` $window (`stride` $stride^)? (`padding` $padding^)? "
        f"(`exclude` $exclude^)? {STRATEGY}"
    )

    def windows(self, b: "OpBuilder", x: SSAValue) -> SSAValue:
        """x with two dimensions for each spatial one: positions, and elements of a window."""
        sizes, positions = (unsharded_type(v).get_shape()[SPATIAL:] for v in (x, self.results[0]))
        slides = list(zip(self.slides(), sizes, positions, strict=True))
        for i, (s, n, p) in reversed(list(enumerate(slides))):
            x = b.unfold(x, SPATIAL + i, Windows(n, p, s.kernel, s.stride, -s.low))
        return x

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        slides = self.slides()
        window_dims = [SPATIAL + 2 * i + 1 for i in range(len(slides))]
        mean = b.reduce(self.windows(b, self.x), "mean", window_dims)
        if self.exclude is None:
            return (mean,)
        sizes = unsharded_type(self.x).get_shape()[SPATIAL:]
        for d, (s, size) in enumerate(zip(slides, sizes, strict=True), SPATIAL):
            if s.low or s.high:
                mean = b.mul(mean, self.without_padding(b, mean, d, s, size))
        return (mean,)

    @staticmethod
    def without_padding(b: "OpBuilder", y: SSAValue, d: int, s: Slide, size: int) -> SSAValue:
        """At each position of dimension d, the size of the window divided by the number of its
        elements that are not padding."""
        t = unsharded_type(y)
        rank, axes = len(t.get_shape()) - d, b.layout(y).dims[d] if b.mesh is not None else ()
        first = b.scale(indices(b, t.get_shape()[d], 0, rank, axes), s.stride)
        none = b.scalar(0, first)
        low = b.value(MaxOp, b.sub(b.scalar(s.low, first), first), none)
        high = b.value(MaxOp, b.sub(first, b.scalar(size + s.low - s.kernel, first)), none)
        inside = b.sub(b.scalar(s.kernel, first), b.add(low, high))
        return _quotient(b, s.kernel, inside, t.element_type)


@op_definition
class AdaptiveAvgPoolOp(Composite, _Pool):
    """The mean of each of `size` parts of a dimension: part i of n is indices floor(i N / n) to
    ceil((i + 1) N / n)."""

    name = "nn.adaptive_avg_pool"
    size = prop_def(IntsPerDimAttr)
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x `size` $size {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        size = numbers(props, "size")
        x = cls.check(operands, len(size), "size")
        if min(size) < 1 or 0 in x[SPATIAL:]:
            raise ShardirError(
                coded(
                    "T10",
                    f"expected sizes and spatial dimensions above 0, got {list(size)} of {list(x)}",
                )
            )
        return [tensor(operands[0].element_type, (*x[:SPATIAL], *size))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        """A dimension reduced to size 1 has no factor in the result."""
        names = factor_names(len(operands[0].get_shape()))
        size = results[0].get_shape()
        kept = ["" if n == 1 else f for f, n in zip(names, size, strict=True)][SPATIAL:]
        shapes = [t.get_shape() for t in (*operands, *results)]
        return Factors.of(
            [names], [[*names[:SPATIAL], *kept]], shapes, sliding=[f for f in kept if f]
        )

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        x = self.x
        sizes = unsharded_type(x).get_shape()[SPATIAL:]
        for d, (size, n) in enumerate(zip(sizes, self.size.data, strict=True), SPATIAL):
            if n == 1:
                x = b.reduce(x, "mean", [d], keep=True)
            elif size % n == 0:
                part = size // n
                x = b.reduce(b.unfold(x, d, Windows(size, n, part, part, 0)), "mean", [d + 1])
            else:
                x = self.uneven_means(b, x, d, n)
        return (x,)

    @staticmethod
    def uneven_means(b: "OpBuilder", x: SSAValue, d: int, n: int) -> SSAValue:
        """The means of n parts of dimension d, which may overlap. Elements are selected instead of
        multiplied by 0, so that a NaN stays in its parts."""
        t = unsharded_type(x)
        shape = t.get_shape()
        size, rank = shape[d], len(shape) - d + 1
        axes = b.layout(x).dims[d] if b.mesh is not None else ()
        part, index = indices(b, n, 0, rank), indices(b, size, 1, rank, axes)
        first, one = b.scale(part, size), b.scalar(1, part)  # n times the first and the last index
        last = b.scale(b.add(part, one), size)
        inside = b.value(
            AndOp,
            b.compare("gt", b.scale(b.add(index, one), n), first),
            b.compare("lt", b.scale(index, n), last),
        )
        repeated = b.reshape(x, (*shape[:d], 1, *shape[d:]))
        total = b.reduce(b.select(inside, repeated, b.scalar(0.0, x)), "sum", [d + 1])
        count = b.reduce(b.convert(inside, i64), "sum", [1])
        return b.mul(total, _quotient(b, 1, count, t.element_type))


def _quotient(b: "OpBuilder", number: int, by: SSAValue, element: Attribute) -> SSAValue:
    """A number divided by integers, computed in a type that can hold the integers."""
    wide = b.convert(by, f64 if element == f64 else f32)
    return b.convert(b.div(b.scalar(number, wide), wide), element)
