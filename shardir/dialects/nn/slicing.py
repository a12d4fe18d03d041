"""Slices, and their inverse: padding."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from xdsl.dialects.builtin import FloatAttr, f64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    opt_prop_def,
    prop_def,
)

from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Props
from shardir.dialects.nn.selection import SelectOp
from shardir.dialects.nn.types import unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.movement import (
    IndexMap,
    IndexMapOp,
    IntsPerDimAttr,
    SourceIndices,
    ints_of,
    split_dims,
    strided_elements,
)


@op_definition
class SliceOp(IndexMapOp):
    """The indices `starts`, `starts` + `strides`, ... below `limits` of each dimension."""

    name = "nn.slice"
    starts = prop_def(IntsPerDimAttr)
    limits = prop_def(IntsPerDimAttr)
    strides = prop_def(IntsPerDimAttr)
    PART: ClassVar[bool] = True
    assembly_format = f"$x `starts` $starts `limits` $limits `strides` $strides {STRATEGY}"

    @classmethod
    def bounds(cls, shape: Shape, props: Props) -> list[tuple[int, int, int]]:
        """Start, limit and stride of each dimension."""
        starts, limits, strides = (
            ints_of(props, n, len(shape)) for n in ("starts", "limits", "strides")
        )
        for d, n in enumerate(shape):
            if not 0 <= starts[d] <= limits[d] <= n:
                raise ShardirError(
                    coded(
                        "T10",
                        f"expected 0 <= start <= limit <= {n} in dimension {d}, got {starts[d]} to "
                        f"{limits[d]}",
                    )
                )
            if strides[d] < 1:
                raise ShardirError(
                    coded(
                        "T10",
                        f"expected a stride of at least 1 in dimension {d}, got {strides[d]}",
                        use="use nn.flip to reverse a dimension",
                    )
                )
        return list(zip(starts, limits, strides, strict=True))

    @classmethod
    def sources(cls, shape: Shape, props: Props) -> SourceIndices:
        return {
            d: IndexMap(-((start - limit) // stride), start, stride)
            for d, (start, limit, stride) in enumerate(cls.bounds(shape, props))
            if (start, limit, stride) != (0, shape[d], 1)
        }

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        shape, new = unsharded_type(self.x).get_shape(), unsharded_type(self.out).get_shape()
        bounds, out = self.bounds(shape, self.properties), self.x
        most = [d for d in self.sources(shape, self.properties) if 2 * new[d] >= shape[d]]
        for d in split_dims(b, out, most):
            start, _, stride = bounds[d]
            out = strided_elements(b, out, d, start, new[d], stride)
            bounds[d] = 0, new[d], 1
        starts, limits, strides = zip(*bounds, strict=True)
        return (b.slice(out, starts, limits, strides),)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """Pad the cotangent with zeros: between its elements for the strides, then before and after
        them for starts and limits."""
        shape, taken = unsharded_type(self.x).get_shape(), unsharded_type(self.out).get_shape()
        starts, strides = self.starts.data, self.strides.data
        if any(k > 1 for k in strides):
            columns = b.reshape(dy, tuple(k for n in taken for k in (n, 1)))
            gaps = [k for stride in strides for k in (0, stride - 1)]
            dy = b.pad(columns, [0] * len(gaps), gaps)
            dy = b.reshape(dy, tuple(n * k for n, k in zip(taken, strides, strict=True)))
        after = [
            n - start - m * k for n, start, m, k in zip(shape, starts, taken, strides, strict=True)
        ]
        return (b.pad(dy, starts, after, like=self.x),)


@op_definition
class PadOp(IndexMapOp):
    """Each dimension extended by `low` elements of `value` (0) before and `high` after; a negative
    number removes elements."""

    name = "nn.pad"
    low = prop_def(IntsPerDimAttr)
    high = prop_def(IntsPerDimAttr)
    value = opt_prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x `low` $low `high` $high (`value` $value^)? {STRATEGY}"

    @classmethod
    def filling(cls, props: Props) -> float:
        value = props.get("value")
        assert value is None or isinstance(value, FloatAttr)
        return value.value.data if value is not None else 0.0

    @classmethod
    def sources(cls, shape: Shape, props: Props) -> SourceIndices:
        index_maps = {}
        low, high = ints_of(props, "low", len(shape)), ints_of(props, "high", len(shape))
        for d, (n, before, after) in enumerate(zip(shape, low, high, strict=True)):
            if n + before + after < 0 or -before > n or -after > n:
                raise ShardirError(
                    coded(
                        "T10",
                        f"expected to remove at most the {n} elements of dimension {d}, got "
                        f"{before} before and {after} after",
                    )
                )
            if before or after:
                index_maps[d] = IndexMap(n + before + after, -before)
        return index_maps

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        shape, new, out = (
            unsharded_type(self.x).get_shape(),
            unsharded_type(self.out).get_shape(),
            self.x,
        )
        low, high, value = list(self.low.data), list(self.high.data), self.filling(self.properties)
        for d in split_dims(b, out, list(self.sources(shape, self.properties))):
            out = strided_elements(b, out, d, -low[d], new[d])
            if value:
                filling = b.scalar(value, out)
                index = b.iota(d, like=out)
                for how, bound in (("ge", low[d]), ("lt", low[d] + shape[d])):
                    out = b.value(
                        SelectOp, b.compare(how, index, b.scalar(bound, index)), out, filling
                    )
            low[d] = high[d] = 0
        return (b.pad(out, low, high, value),)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        low, high = ([-k for k in sides.data] for sides in (self.low, self.high))
        return (b.pad(dy, low, high, like=self.x),)
