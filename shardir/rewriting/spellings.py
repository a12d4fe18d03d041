"""Short spellings of single ops: `b.add(x, y)` for an `nn.add`, and so on.

The interface, with their meanings, is `shardir/dialects/builder.py`.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import copysign, inf

from xdsl.dialects.builtin import (
    AnyFloat,
    DenseIntOrFPElementsAttr,
    IntegerType,
    TensorType,
    UnitAttr,
    i64,
)
from xdsl.ir import Attribute, SSAValue

from shardir.algebra.layout import Layout, Shape, replicated
from shardir.algebra.windows import Windows
from shardir.dialects import nn
from shardir.dialects.builder import OpBuilder
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import Props, TensorOp
from shardir.dialects.nn.properties import dims_attr, float_attr, int_attr, string_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.text import word
from shardir.rewriting.stages import stage_before


def nearest(number: float, element: AnyFloat) -> float:
    """Return the number, or an infinite one if it is beyond the largest of the element type."""
    try:
        element.pack([number])
    except OverflowError:
        return copysign(inf, number)
    return number


@lru_cache(maxsize=4096)
def _number_attr(
    number: float, sign: float, element: Attribute
) -> DenseIntOrFPElementsAttr[IntegerType | AnyFloat]:
    """Return the attribute of a number, whose sign tells 0.0 from -0.0, which are equal."""
    exact = nearest(number, element) if isinstance(element, AnyFloat) else int(number)
    return nn.dense_attr(tensor(element, ()), [exact])


class Spellings(OpBuilder):
    """Spellings of single ops, in terms of `op` and `results`."""

    def add(self, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.AddOp, x, y)

    def sub(self, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.SubOp, x, y)

    def mul(self, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.MulOp, x, y)

    def div(self, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.DivOp, x, y)

    def neg(self, x: SSAValue) -> SSAValue:
        return self.value(nn.NegOp, x)

    def constant(self, number: float, element: Attribute) -> SSAValue:
        data = _number_attr(number, copysign(1.0, number), element)
        return self.value(nn.ConstantOp, props={"value": data}, result=tensor(element, ()))

    def scalar(self, number: float, like: SSAValue) -> SSAValue:
        return self.constant(number, unsharded_type(like).element_type)

    def reduce(self, x: SSAValue, kind: str, dims: Sequence[int], keep: bool = False) -> SSAValue:
        props: dict[str, Attribute] = {
            "kind": word(nn.ReductionKindAttr, kind),
            "dims": dims_attr(*dims),
        }
        if keep:
            props["keep"] = nn.UNIT
        return self.value(nn.ReduceOp, x, props=props)

    def broadcast(
        self, x: SSAValue, dims: Sequence[int], shape: Shape, like: SSAValue | None = None
    ) -> SSAValue:
        return self.value(
            nn.BroadcastOp, x, props={"dims": dims_attr(*dims)},
            result=tensor(unsharded_type(x).element_type, shape), like=like,
        )  # fmt: skip

    def reshape(self, x: SSAValue, shape: Shape, like: SSAValue | None = None) -> SSAValue:
        if unsharded_type(x).get_shape() == shape:
            return x
        return self.value(
            nn.ReshapeOp, x, result=tensor(unsharded_type(x).element_type, shape), like=like
        )

    def split_shards(self, x: SSAValue, axis: int) -> SSAValue | None:
        assert self.mesh is not None
        shape, axes = unsharded_type(x).get_shape(), self.layout(x).dims[axis]
        n = self.mesh.extent(axes)
        if n == 1 or not self.mesh.even(shape[axis], axes):
            return None
        return self.reshape(x, (*shape[:axis], n, shape[axis] // n, *shape[axis + 1 :]))

    def iota(self, dim: int, like: SSAValue) -> SSAValue:
        type = tensor(i64, unsharded_type(like).get_shape())
        return self.value(nn.IotaOp, props={"dim": int_attr(dim)}, result=type, like=like)

    def transpose(self, x: SSAValue, perm: Sequence[int]) -> SSAValue:
        return self.value(nn.TransposeOp, x, props={"perm": dims_attr(*perm)})

    def pad(
        self,
        x: SSAValue,
        low: Sequence[int],
        high: Sequence[int],
        value: float = 0.0,
        like: SSAValue | None = None,
    ) -> SSAValue:
        if not (any(low) or any(high)):
            return x
        if all(k <= 0 for k in (*low, *high)):
            ends = [n + k for n, k in zip(unsharded_type(x).get_shape(), high, strict=True)]
            return self.slice(x, [-k for k in low], ends, like=like)
        props: dict[str, Attribute] = {
            "low": nn.IntsPerDimAttr(tuple(low)),
            "high": nn.IntsPerDimAttr(tuple(high)),
        }
        if value:
            props["value"] = float_attr(value)
        return self.value(nn.PadOp, x, props=props, like=like)

    def slice(
        self,
        x: SSAValue,
        starts: Sequence[int],
        limits: Sequence[int],
        strides: Sequence[int] = (),
        like: SSAValue | None = None,
    ) -> SSAValue:
        steps = tuple(strides) or (1,) * len(starts)
        untouched = (0,) * len(steps) == tuple(starts) and set(steps) <= {1}
        if untouched and tuple(limits) == unsharded_type(x).get_shape():
            return x
        props = {
            "starts": nn.IntsPerDimAttr(tuple(starts)),
            "limits": nn.IntsPerDimAttr(tuple(limits)),
            "strides": nn.IntsPerDimAttr(steps),
        }
        return self.value(nn.SliceOp, x, props=props, like=like)

    def split(self, x: SSAValue, sizes: Sequence[int], axis: int) -> Sequence[SSAValue]:
        props = {"sizes": nn.IntsPerDimAttr(tuple(sizes)), "axis": int_attr(axis)}
        return self.op(nn.SplitOp, x, props=props).results

    def zeros(self, type: TensorType, like: SSAValue | None = None) -> SSAValue:
        zero = self.constant(0.0, type.element_type)
        return self.broadcast(zero, [], type.get_shape(), like=like)

    def unfold(self, x: SSAValue, dim: int, w: Windows, lowest: bool = False) -> SSAValue:
        shape = unsharded_type(x).get_shape()
        props: dict[str, Attribute] = {"lowest": nn.UNIT} if lowest else {}
        return self._windows(
            nn.UnfoldOp, x, dim, w, (*shape[:dim], w.count, w.size, *shape[dim + 1 :]), props
        )

    def fold(self, x: SSAValue, dim: int, w: Windows) -> SSAValue:
        shape = unsharded_type(x).get_shape()
        return self._windows(nn.FoldOp, x, dim, w, (*shape[:dim], w.rows, *shape[dim + 2 :]), {})

    def _windows(
        self, kind: type[TensorOp], x: SSAValue, dim: int, w: Windows, shape: Shape, props: Props
    ) -> SSAValue:
        numbers = {"dim": int_attr(dim), "step": int_attr(w.step), "offset": int_attr(w.offset)}
        result = tensor(unsharded_type(x).element_type, shape)
        return self.value(kind, x, props={**numbers, **props}, result=result)

    def einsum(self, equation: str, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.EinsumOp, x, y, props={"equation": string_attr(equation)})

    def convert(self, x: SSAValue, element: Attribute, partial: bool = False) -> SSAValue:
        t = unsharded_type(x)
        if t.element_type == element:
            return x
        props: Props = {"partial": UnitAttr()} if partial else {}
        return self.value(nn.ConvertOp, x, props=props, result=tensor(element, t.get_shape()))

    def compare(self, how: str, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.CompareOp, x, y, props={"how": word(nn.ComparisonAttr, how)})

    def select(self, condition: SSAValue, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.SelectOp, condition, x, y)

    def total(self, scalars: Sequence[SSAValue]) -> SSAValue:
        by_place: dict[tuple[Layout | None, int | None], SSAValue] = {}
        for x in scalars:
            key = None if self.mesh is None else self.layout(x), stage_before(x)
            by_place[key] = self.add(by_place[key], x) if key in by_place else x
        parts = list(by_place.values())
        if self.mesh is not None:
            every = [a for x in parts for a in self.layout(x).partial]
            sub_axes = {d for d in self.mesh.cut(tuple(every), tuple(every))}
            crossing = any(self.mesh.overlap(a, b) for a in sub_axes for b in sub_axes if a != b)
            scalar = replicated(self.mesh.name, 0)
            union = self.mesh.simplify(tuple(sorted(sub_axes, key=self.mesh.order)))
            shared = scalar if crossing else scalar.with_partial(union)
            parts = [self.redistribute(x, shared) for x in parts]
        sum = parts[0]
        for x in parts[1:]:
            sum = self.add(sum, x)
        return self.complete(sum)

    def sum_to(self, x: SSAValue, like: SSAValue) -> SSAValue:
        have, want = unsharded_type(x).get_shape(), unsharded_type(like).get_shape()
        if have == want:
            return x
        extra = len(have) - len(want)
        ones = [extra + i for i, n in enumerate(want) if n == 1 and have[extra + i] != 1]
        dims = [*range(extra), *ones]
        summed = self.reduce(x, "sum", dims) if dims else x
        return self.reshape(summed, want)
