"""Convolutions over any number of spatial dimensions, and their transposes.

    %y = nn.conv %x, %w stride <2, 2> padding <1, 1, 1, 1>
           : (tensor<8x3x32x32xf32>, tensor<16x3x3x3xf32>) -> tensor<8x16x16x16xf32>

x is [batch, channels, spatial...], the weight [channels of y, channels of x in a group, kernel...],
y [batch, channels of y, positions...]. The number of groups is the number of channels of x divided
by the channels of a group. A convolution is linear in both operands, and the gradients of three ops
are the ops themselves: y from x and w, x from y and w (transposed convolution), w from x and y.

The batch, the channels and the groups can be split. The result is partial over the axes that split
the summed channels, the weight's gradient over the axes of the batch. A split spatial dimension is
computed in windows (`Tiles`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import operand_def, opt_prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types
from shardir.dialects.nn.movement import IntsPerDimAttr
from shardir.dialects.nn.sliding import (
    SPATIAL,
    Slide,
    Tiles,
    padded,
    slide_props,
    slides,
    taps,
    tiles,
)
from shardir.dialects.nn.types import arithmetic_element, float_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

SLIDES = f"(`stride` $stride^)? (`padding` $padding^)? (`dilation` $dilation^)? {STRATEGY}"


class Convolving(TensorOp, ABC):
    """Computes one of x, w and y from the other two. `padding` has two numbers per dimension:
    before it and after it."""

    PRECISION: ClassVar[str] = "narrow"

    stride = opt_prop_def(IntsPerDimAttr)
    padding = opt_prop_def(IntsPerDimAttr)
    dilation = opt_prop_def(IntsPerDimAttr)
    out = result_def(TensorType)
    MULTILINEAR: ClassVar[bool] = True
    GLOBAL_TYPES: ClassVar[bool] = True

    @classmethod
    def element(cls, types: Types) -> Attribute:
        """Return the element type. Raises ShardirError unless the op takes it."""
        return float_element(cls.name, types)

    @classmethod
    @abstractmethod
    def ends(cls, operands: Sequence, results: Sequence) -> Sequence:
        """Select x, w and y from operands and results, given as types, shapes or values."""

    @classmethod
    def check(cls, operands: Types, results: Types, props: Props) -> None:
        """Raises ShardirError unless the shapes of x, w and y fit."""
        cls.element((*operands, *results))
        x, w, y = (t.get_shape() for t in cls.ends(operands, results))
        expected = convolved_shape(x, w, props)
        if y != expected:
            message = (
                f"expected y of shape {list(expected)} for x {list(x)} and weight {list(w)}, "
                f"got {list(y)}"
            )
            raise ShardirError(coded("T1", message))

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        cls.check(operands, results, props)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        x, w, _ = (t.get_shape() for t in cls.ends(operands, results))
        groups, windows = groups_of(x, w), slides(w[SPATIAL:], props)
        sizes = {"g": groups, "c": w[1], "o": w[0] // groups}
        one = [f for f in ("c", "o") if sizes[f] != 1 or groups == 1]
        several = ["g"] if groups > 1 else []
        inner, outer = (" ".join([*several, *(f for f in one if f == end)]) for end in "co")
        spatial = [f"s{i}" for i in range(len(windows))]
        names = (
            ["n", inner, *spatial],
            [outer, "c" if "c" in one else "", *[""] * len(windows)],
            ["n", outer, *spatial],
        )
        shapes = [t.get_shape() for t in (*operands, *results)]
        operand_factors, result_factors = cls.sides(names)
        replicated = [f for f, s in zip(spatial, windows, strict=True) if not s.passes]
        factors = Factors.of(
            operand_factors, result_factors, shapes, replicate=replicated, sliding=replicated
        )
        return factors.with_sizes(sizes)

    @classmethod
    def flops(cls, sizes: Mapping[str, int], shapes: Sequence[Shape]) -> int:
        _, w, y = cls.ends(shapes[:2], shapes[2:])
        return 2 * prod(y) * prod(w[1:])

    @classmethod
    @abstractmethod
    def sides(cls, names: Sequence[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
        """Split what `names` has for x, w and y into operands and results."""

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        shape = device.shape(self.out)
        if not prod(shape):  # perhaps a device without groups
            return np.zeros(shape, arrays[0].dtype)
        return self.compute(shape, *arrays)

    @abstractmethod
    def compute(self, shape: Shape, *arrays: Array) -> Array:
        """The result, whose shape is not empty."""

    @property
    def shapes_of_ends(self) -> tuple[Shape, Shape, Shape]:
        x, w, y = (unsharded_type(v).get_shape() for v in self.ends(self.operands, self.results))
        return x, w, y

    def slides(self) -> list[Slide]:
        weight = self.ends(self.operands, self.results)[1]
        return slides(unsharded_type(weight).get_shape()[SPATIAL:], self.properties)

    def like(
        self, b: "OpBuilder", kind: "type[Convolving]", first: SSAValue, second: SSAValue,
        result: SSAValue | None = None,
    ) -> SSAValue:  # fmt: skip
        """Another of the three ops, with the options of this convolution."""
        props = {n: p for n, p in self.properties.items() if n != "strategy"}
        result_type = unsharded_type(result) if result is not None else None
        return b.value(kind, first, second, props=props, result=result_type, like=result)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        x, w, y = self.shapes_of_ends
        ends = self.ends(self.operands, self.results)
        laid = [v for v in (ends[0], ends[2]) if v in self.operands]
        cut = tiles(b, self.slides(), x, y, *laid)
        props = slide_props(cut.slides)
        return (self.in_tiles(b, cut, props, (*w[:SPATIAL], *cut.kernel)),)

    @abstractmethod
    def in_tiles(self, b: "OpBuilder", cut: Tiles, props: Props, kernel: Shape) -> SSAValue:
        """The result, computed on the windows; `kernel` is the shape of their weight."""


def groups_of(x: Shape, w: Shape) -> int:
    """The number of groups of the channels: a weight has the channels of x in one group."""
    return x[1] // w[1] if w[1] else 1


def convolved_shape(x: Shape, w: Shape, props: Props) -> Shape:
    """Return the shape of a convolution's result.

    Raises:
        ShardirError: x and the weight do not fit.
    """
    if len(x) < 3 or len(x) != len(w):
        message = (
            f"expected x [batch, channels, spatial...] and a weight of the same rank, "
            f"got {list(x)} and {list(w)}"
        )
        raise ShardirError(
            coded(
                "T10",
                message,
                use="use a weight [channels of y, channels of x in a group, kernel...]",
            )
        )
    groups = groups_of(x, w)
    if x[1] != w[1] * groups or groups < 1 or w[0] % groups:
        message = (
            f"expected groups of {w[1]} channels whose number divides {w[0]}, "
            f"got {x[1]} channels of x"
        )
        raise ShardirError(coded("T10", message, use="correct the weight"))
    windows = slides(w[SPATIAL:], props)
    positions = (s.positions(n) for s, n in zip(windows, x[SPATIAL:], strict=True))
    return (x[0], w[0], *positions)


def _grouped(x: Array, groups: int, dim: int) -> Array:
    """Split a dimension of channels into groups and channels per group."""
    per_group = _per_group(x.shape[dim], groups)
    return x.reshape(*x.shape[:dim], groups, per_group, *x.shape[dim + 1 :])


def _per_group(channels: int, groups: int) -> int:
    """The number of channels per group; 1 on a device without groups, since only groups of one
    channel are split."""
    return channels // groups if groups else 1


def _flat(x: Array) -> Array:
    """Flatten the positions of grouped channels into one dimension."""
    return x.reshape(*x.shape[:3], prod(x.shape[3:]))


@op_definition
class ConvOp(Convolving):
    """The product of the kernel with each window of x, summed over the kernel and the channels of a
    group (a cross-correlation, as in torch). Integers wrap."""

    name = "nn.conv"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    assembly_format = f"$x `,` $weight {SLIDES}"

    @classmethod
    def element(cls, types: Types) -> Attribute:
        return arithmetic_element(cls.name, types)

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, w = (t.get_shape() for t in operands)
        return [tensor(cls.element(operands), convolved_shape(x, w, props))]

    INFERRED: ClassVar[bool] = True

    @classmethod
    def ends(cls, operands: Sequence, results: Sequence) -> Sequence:
        return operands[0], operands[1], results[0]

    @classmethod
    def sides(cls, names: Sequence[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
        return [names[0], names[1]], [names[2]]

    def compute(self, shape: Shape, *arrays: Array) -> Array:
        x, w = arrays
        windows = self.slides()
        groups = groups_of(x.shape, w.shape)
        xs, ws = _grouped(padded(x, windows), groups, 1), _grouped(w, groups, 0)
        out = np.zeros((shape[0], groups, _per_group(shape[1], groups), *shape[2:]), x.dtype)
        for tap, under in taps(windows, shape[SPATIAL:]):
            out += np.einsum("ngc...,goc->ngo...", xs[under], ws[tap])
        return out.reshape(shape)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (
            self.like(b, ConvTransposeOp, dy, self.weight, self.x),
            self.like(b, ConvWeightOp, self.x, dy, self.weight),
        )

    def in_tiles(self, b: "OpBuilder", cut: Tiles, props: Props, kernel: Shape) -> SSAValue:
        weight = b.reshape(self.weight, kernel)
        return cut.to_y(b, b.value(ConvOp, cut.of_x(b, self.x), weight, props=props))


@op_definition
class ConvTransposeOp(Convolving):
    """The transposed convolution: each element of y times the kernel, added onto its window of x.
    The result's type specifies the spatial sizes."""

    name = "nn.conv_transpose"
    y = operand_def(TensorType)
    weight = operand_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$y `,` $weight {SLIDES}"

    @classmethod
    def ends(cls, operands: Sequence, results: Sequence) -> Sequence:
        return results[0], operands[1], operands[0]

    @classmethod
    def sides(cls, names: Sequence[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
        return [names[2], names[1]], [names[0]]

    def compute(self, shape: Shape, *arrays: Array) -> Array:
        y, w = arrays
        windows = self.slides()
        groups = groups_of(shape, w.shape)
        ys, ws = _grouped(y, groups, 1), _grouped(w, groups, 0)
        out = _grouped(padded(np.zeros(shape, y.dtype), windows), groups, 1)
        for tap, under in taps(windows, y.shape[SPATIAL:]):
            out[under] += np.einsum("ngo...,goc->ngc...", ys, ws[tap])
        inside = tuple(
            slice(s.low, s.low + n) for s, n in zip(windows, shape[SPATIAL:], strict=True)
        )
        return out[(..., *inside)].reshape(shape)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (
            self.like(b, ConvOp, dy, self.weight),
            self.like(b, ConvWeightOp, dy, self.y, self.weight),
        )

    def in_tiles(self, b: "OpBuilder", cut: Tiles, props: Props, kernel: Shape) -> SSAValue:
        weight = b.reshape(self.weight, kernel)
        shape = tensor(unsharded_type(self.out).element_type, tuple(cut.x))
        result = b.value(ConvTransposeOp, cut.of_y(b, self.y), weight, props=props, result=shape)
        return cut.to_x(b, result)


@op_definition
class ConvWeightOp(Convolving):
    """The gradient of the weight: the product of x and y, summed over the batch and all positions.
    The result's type specifies the size of the kernel."""

    name = "nn.conv_weight"
    x = operand_def(TensorType)
    y = operand_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$x `,` $y {SLIDES}"

    @classmethod
    def ends(cls, operands: Sequence, results: Sequence) -> Sequence:
        return operands[0], results[0], operands[1]

    @classmethod
    def sides(cls, names: Sequence[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
        return [names[0], names[2]], [names[1]]

    def compute(self, shape: Shape, *arrays: Array) -> Array:
        x, y = arrays
        windows = self.slides()
        groups = groups_of(x.shape, shape)
        xs, ys = _grouped(padded(x, windows), groups, 1), _grouped(y, groups, 1)
        out = np.zeros((groups, _per_group(shape[0], groups), *shape[1:]), x.dtype)
        for tap, under in taps(windows, y.shape[SPATIAL:]):
            out[tap] += np.einsum("ngcs,ngos->goc", _flat(xs[under]), _flat(ys))
        return out.reshape(shape)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return self.like(b, ConvTransposeOp, self.y, dy, self.x), self.like(b, ConvOp, self.x, dy)

    def in_tiles(self, b: "OpBuilder", cut: Tiles, props: Props, kernel: Shape) -> SSAValue:
        shape = tensor(unsharded_type(self.out).element_type, kernel)
        operands = cut.of_x(b, self.x), cut.of_y(b, self.y)
        result = b.value(ConvWeightOp, *operands, props=props, result=shape)
        return b.reshape(result, unsharded_type(self.out).get_shape())
