"""Builds tensor ops inside passes: types inferred, layouts too, redistributions where needed.

The same gradient code serves the plain program, where no value has a layout, and the laid-out
one, where each new op is placed at least cost and its operands are brought to where it needs them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects.builtin import (
    AnyFloat,
    LocationAttr,
    StringAttr,
    TensorType,
    i64,
)
from xdsl.ir import Attribute, Operation, SSAValue

from shardir.algebra.factors import place
from shardir.algebra.layout import Layout, Shape, replicated
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import seconds
from shardir.algebra.windows import Windows
from shardir.dialects import nn
from shardir.dialects.dist import (
    RedistributeOp,
    laid_out,
    layout_of,
    tensor,
    with_layout,
)
from shardir.dialects.nn.base import (
    Composite,
    Props,
    TensorOp,
    dims_attr,
    float_attr,
    has_parts,
    int_attr,
    plain,
    rule_of,
    splits_whole,
)
from shardir.dialects.text import word


class Builder:
    """Makes ops and hands each to `insert`."""

    def __init__(self, mesh: Mesh | None, insert: Callable[[Operation], object]):
        self.mesh, self.insert = mesh, insert
        self.location: LocationAttr | None = None
        self.attributes: dict[str, Attribute] = {}
        self.name_hint: str | None = None
        self._moved: dict[tuple[SSAValue, Layout], SSAValue] = {}
        self._complete: dict[SSAValue, SSAValue] = {}

    def op(
        self,
        kind: type[TensorOp],
        *operands: SSAValue,
        props: Props | None = None,
        result: TensorType | Sequence[TensorType] | None = None,
        like: SSAValue | Layout | None = None,
    ) -> TensorOp:
        """A new op.

        `result` states the types where they can't be inferred (layouts are ignored); `like` is the
        layout to aim at where the operands do not decide: a layout, or a value that has it.
        """
        props = props or {}
        types = [plain(v) for v in operands]
        outs = _result_types(kind, types, props, result)
        if self.mesh is not None:
            operands = tuple(self._complete.get(v, v) for v in operands)
            operands, outs = self._place(kind, operands, types, outs, props, like)
        new = kind.create(
            operands=operands, result_types=outs, properties=props, attributes=self.attributes,
            location=self.location,
        )  # fmt: skip
        if self.name_hint is not None:
            new.results[0].name_hint = self.name_hint
        self.insert(new)
        return new

    def _place(
        self,
        kind: type[TensorOp],
        operands: Sequence[SSAValue],
        types: Sequence[TensorType],
        outs: Sequence[TensorType],
        props: Props,
        like: SSAValue | Layout | None,
    ) -> tuple[tuple[SSAValue, ...], list[TensorType]]:
        assert self.mesh is not None
        factors = rule_of(kind, tuple(types), tuple(outs), props)
        layouts = tuple(self.layout(v) for v in operands)
        hint = like if isinstance(like, Layout) or like is None else self.layout(like)
        hints = tuple(
            hint.complete if hint is not None and len(hint.dims) == len(t.get_shape()) else None
            for t in outs
        )
        if not operands and hint is None:
            hints = tuple(replicated(self.mesh.name, len(t.get_shape())) for t in outs)
        shapes = tuple(t.get_shape() for t in (*types, *outs))
        placement = place(factors, layouts, hints, self.mesh, shapes)
        moved = tuple(
            self.redistribute(v, want) for v, want in zip(operands, placement.operands, strict=True)
        )
        return moved, [
            laid_out(t.element_type, t.get_shape(), l)
            for t, l in zip(outs, placement.results, strict=True)
        ]

    def layout(self, value: SSAValue) -> Layout:
        """The layout of a value; replicated when it has none."""
        assert self.mesh is not None
        return layout_of(value) or replicated(self.mesh.name, len(plain(value).get_shape()))

    def redistribute(self, value: SSAValue, layout: Layout) -> SSAValue:
        """The value in another layout; the same redistribution is made once."""
        if self.mesh is None or self.layout(value) == layout:
            return value
        if (found := self._moved.get((value, layout))) is not None:
            return found
        new = self.redistribution(value, layout)
        self._moved[value, layout] = new
        return new

    def seconds(self, value: SSAValue, layout: Layout) -> tuple[float, float]:
        """What it takes to have the value in a layout: of bytes, and of latencies."""
        have = self.layout(value)
        if self.mesh is None or have == layout or (value, layout) in self._moved:
            return 0.0, 0.0
        return seconds(plain(value).get_shape(), self.mesh, have, layout)

    def known(self, value: SSAValue, same: SSAValue) -> None:
        """`same` is the value in another layout: it is not to be redistributed to that again, and
        where it is the sum of contributions it is what ops use."""
        self._moved.setdefault((value, self.layout(same)), same)
        if self.layout(value).partial and not self.layout(same).partial:
            self._complete.setdefault(value, same)

    def complete(self, value: SSAValue) -> SSAValue:
        """The value with its contributions brought together, split as it is."""
        return value if self.mesh is None else self.redistribute(value, self.layout(value).complete)

    def redistribution(self, value: SSAValue, layout: Layout) -> SSAValue:
        """A new redistribution of the value."""
        type = with_layout(plain(value), layout)
        new = RedistributeOp.create(operands=[value], result_types=[type], location=self.location)
        new.out.name_hint = value.name_hint
        self.insert(new)
        return new.out

    def results(
        self,
        kind: type[TensorOp],
        *operands: SSAValue,
        props: Props | None = None,
        result: TensorType | Sequence[TensorType] | None = None,
        like: SSAValue | Layout | None = None,
    ) -> Sequence[SSAValue]:
        """The results of a new op, see `op`; or of its parts, where it is a composite, or wants a
        dimension whole that is split."""
        outs = _result_types(kind, [plain(v) for v in operands], props or {}, result)
        apart = issubclass(kind, Composite)
        if not apart and self.mesh is not None and has_parts(kind):
            types = tuple(plain(v) for v in operands)
            factors = rule_of(kind, types, tuple(outs), props or {})
            apart = splits_whole(factors, [self.layout(v) for v in operands])
        if not apart:
            return self.op(kind, *operands, props=props, result=result, like=like).results
        op = kind.create(operands=operands, result_types=outs, properties=props or {})
        made = op.decompose(self)
        op.erase()
        assert made is not None
        return made

    def value(self, kind: type[TensorOp], *operands: SSAValue, **options: Any) -> SSAValue:
        """The only result of a new op; see `results`."""
        return self.results(kind, *operands, **options)[0]

    # ---- spellings ----

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
        """A scalar constant."""
        type = tensor(element, ())
        data = nn.dense_attr(type, [number if isinstance(element, AnyFloat) else int(number)])
        return self.value(nn.ConstantOp, props={"value": data}, result=type)

    def number(self, number: float, like: SSAValue) -> SSAValue:
        """A scalar constant of the element type of `like`."""
        return self.constant(number, plain(like).element_type)

    def scale(self, x: SSAValue, number: float) -> SSAValue:
        """x times a number."""
        return self.mul(x, self.number(number, x))

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
        """x with its dimensions at `dims` of `shape`, repeated along the others."""
        return self.value(
            nn.BroadcastOp, x, props={"dims": dims_attr(*dims)},
            result=tensor(plain(x).element_type, shape), like=like,
        )  # fmt: skip

    def reshape(self, x: SSAValue, shape: Shape, like: SSAValue | None = None) -> SSAValue:
        if plain(x).get_shape() == shape:
            return x
        return self.value(nn.ReshapeOp, x, result=tensor(plain(x).element_type, shape), like=like)

    def in_parts(self, x: SSAValue, axis: int) -> SSAValue | None:
        """x with its split dimension `axis` as two: the shards, still split, and the rows of each.
        None where it is whole, or the shards are not of one size."""
        assert self.mesh is not None
        shape, axes = plain(x).get_shape(), self.layout(x).dims[axis]
        n = self.mesh.extent(axes)
        if n == 1 or not self.mesh.even(shape[axis], axes):
            return None
        return self.reshape(x, (*shape[:axis], n, shape[axis] // n, *shape[axis + 1 :]))

    def iota(self, dim: int, like: SSAValue) -> SSAValue:
        """The i64 indices along `dim` of a value of the shape of `like`."""
        type = tensor(i64, plain(like).get_shape())
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
        """x with rows of `value` before and after each dimension; negative numbers take rows
        away."""
        if not (any(low) or any(high)):
            return x
        if all(k <= 0 for k in (*low, *high)):
            ends = [n + k for n, k in zip(plain(x).get_shape(), high, strict=True)]
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
        """The rows from `starts` to `limits` of each dimension, all or one in `strides`."""
        steps = tuple(strides) or (1,) * len(starts)
        if (0,) * len(steps) == tuple(starts) and tuple(limits) == plain(x).get_shape() and (
            set(steps) <= {1}
        ):  # fmt: skip
            return x
        props = {
            "starts": nn.IntsPerDimAttr(tuple(starts)),
            "limits": nn.IntsPerDimAttr(tuple(limits)),
            "strides": nn.IntsPerDimAttr(steps),
        }
        return self.value(nn.SliceOp, x, props=props, like=like)

    def split(self, x: SSAValue, sizes: Sequence[int], axis: int) -> Sequence[SSAValue]:
        """Pieces of x along `axis`."""
        props = {"sizes": nn.IntsPerDimAttr(tuple(sizes)), "axis": int_attr(axis)}
        return self.op(nn.SplitOp, x, props=props).results

    def zeros(self, type: TensorType, like: SSAValue | None = None) -> SSAValue:
        """Zeros of a type, whose layout is ignored."""
        zero = self.constant(0.0, type.element_type)
        return self.broadcast(zero, [], type.get_shape(), like=like)

    def unfold(self, x: SSAValue, dim: int, w: Windows, least: bool = False) -> SSAValue:
        """The windows of a dimension."""
        shape = plain(x).get_shape()
        props: dict[str, Attribute] = {"least": nn.UNIT} if least else {}
        return self._windows(
            nn.UnfoldOp, x, dim, w, (*shape[:dim], w.count, w.size, *shape[dim + 1 :]), props
        )

    def fold(self, x: SSAValue, dim: int, w: Windows) -> SSAValue:
        """What windows add up to."""
        shape = plain(x).get_shape()
        return self._windows(nn.FoldOp, x, dim, w, (*shape[:dim], w.rows, *shape[dim + 2 :]), {})

    def _windows(
        self, kind: type[TensorOp], x: SSAValue, dim: int, w: Windows, shape: Shape, props: Props
    ) -> SSAValue:
        numbers = {"dim": int_attr(dim), "step": int_attr(w.step), "offset": int_attr(w.offset)}
        result = tensor(plain(x).element_type, shape)
        return self.value(kind, x, props={**numbers, **props}, result=result)

    def einsum(self, equation: str, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.EinsumOp, x, y, props={"equation": StringAttr(equation)})

    def convert(self, x: SSAValue, element: Attribute) -> SSAValue:
        t = plain(x)
        if t.element_type == element:
            return x
        return self.value(nn.ConvertOp, x, result=tensor(element, t.get_shape()))

    def compare(self, how: str, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.CompareOp, x, y, props={"how": word(nn.ComparisonAttr, how)})

    def select(self, condition: SSAValue, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.value(nn.SelectOp, condition, x, y)

    def total(self, scalars: Sequence[SSAValue]) -> SSAValue:
        """The sum of scalars, complete: contributions are added on each device, and then brought
        together once, whatever the axes over which each was partial."""
        by_layout: dict[Layout | None, SSAValue] = {}
        for x in scalars:
            key = None if self.mesh is None else self.layout(x)
            by_layout[key] = self.add(by_layout[key], x) if key in by_layout else x
        parts = list(by_layout.values())
        if self.mesh is not None:
            every = [a for x in parts for a in self.layout(x).partial]
            sub_axes = {d for d in self.mesh.cut(tuple(every), tuple(every))}
            crossing = any(self.mesh.overlap(a, b) for a in sub_axes for b in sub_axes if a != b)
            whole = replicated(self.mesh.name, 0)
            union = self.mesh.simplify(tuple(sorted(sub_axes, key=self.mesh.order)))
            shared = whole if crossing else whole.with_partial(union)
            parts = [self.redistribute(x, shared) for x in parts]
        sum = parts[0]
        for x in parts[1:]:
            sum = self.add(sum, x)
        return self.complete(sum)

    def sum_to(self, x: SSAValue, like: SSAValue) -> SSAValue:
        """The gradient of numpy's broadcasting: sums over the dimensions that `like` lacks."""
        have, want = plain(x).get_shape(), plain(like).get_shape()
        if have == want:
            return x
        extra = len(have) - len(want)
        ones = [extra + i for i, n in enumerate(want) if n == 1 and have[extra + i] != 1]
        dims = [*range(extra), *ones]
        summed = self.reduce(x, "sum", dims) if dims else x
        return self.reshape(summed, want)


def _result_types(
    kind: type[TensorOp],
    operands: Sequence[TensorType],
    props: Props,
    result: TensorType | Sequence[TensorType] | None,
) -> list[TensorType]:
    """The types of an op's results: stated, or inferred."""
    if result is None:
        return kind.infer(operands, props)
    stated = [result] if isinstance(result, TensorType) else result
    return [tensor(t.element_type, t.get_shape()) for t in stated]
