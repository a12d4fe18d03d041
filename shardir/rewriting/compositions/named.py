"""Values whose dimensions have names, the same for all values of a composition.

Dimensions of size 1 have none: it does not matter where they stand. Names pass through transposes,
reshapes that insert or remove dimensions of size 1, and conversions of floats, in both directions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose

from xdsl.dialects.builtin import AnyFloat, NoneAttr
from xdsl.ir import Attribute, Operation, SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.elementary import splat
from shardir.dialects.nn.properties import dims_of
from shardir.dialects.nn.types import element_name, unsharded_type
from shardir.rewriting.compositions.matching import PRECISION, is_annotated, is_same


def letters_of(v: SSAValue) -> tuple[str, str, str]:
    """Return the letters of an einsum: of both operands, and of the result."""
    op = v.owner
    assert isinstance(op, nn.EinsumOp)
    operands, out = op.equation.data.split("->")
    left, right = operands.split(",")
    return left, right, out


def shape_of(v: SSAValue) -> tuple[int, ...]:
    return unsharded_type(v).get_shape()


@dataclass(frozen=True)
class ScaleFactor:
    """A number, and the relative precision to which it is known."""

    number: float = 1.0
    precision: float = 0.0

    def times(self, number: float, product: "NamedValue | None" = None) -> "ScaleFactor":
        """The product with a number of a product's element type."""
        name = element_name(product.element) if product is not None else "f64"
        return ScaleFactor(self.number * number, max(self.precision, PRECISION.get(name, 0.0)))

    def by(self, other: "ScaleFactor") -> "ScaleFactor":
        return ScaleFactor(self.number * other.number, max(self.precision, other.precision))

    def over(self, other: "ScaleFactor") -> "ScaleFactor":
        return ScaleFactor(self.number / other.number, max(self.precision, other.precision))

    def is_close(self, number: float) -> bool:
        return isclose(self.number, number, rel_tol=self.precision)


ONE = ScaleFactor()


ANY = NoneAttr()
"""No element type: the source of a value in any element type."""


@dataclass(frozen=True)
class NamedValue:
    """A value, and the name of each of its dimensions; "" for those of size 1."""

    value: SSAValue
    names: tuple[str, ...]

    @staticmethod
    def of(value: SSAValue, names: Sequence[str]) -> "NamedValue":
        sizes = shape_of(value)
        return NamedValue(
            value, tuple(n if s != 1 else "" for n, s in zip(names, sizes, strict=True))
        )

    @property
    def element(self) -> Attribute:
        return unsharded_type(self.value).element_type

    @property
    def sizes(self) -> dict[str, int]:
        return {n: s for n, s in zip(self.names, shape_of(self.value), strict=True) if n}

    def has_shape_of(self, other: "NamedValue") -> bool:
        return shape_of(self.value) == shape_of(other.value)

    def is_proper(self) -> bool:
        """Whether no two dimensions have one name, as in a diagonal."""
        return len(self.sizes) == len([n for n in self.names if n])

    def operand(self, x: SSAValue) -> "NamedValue":
        """An operand of the elementwise op that has this result."""
        return NamedValue.of(x, self.names[len(self.names) - len(shape_of(x)) :])

    # ---- towards operands ----

    def before_move(self) -> "NamedValue | None":
        """The operand of a transpose, of a reshape that inserts or removes dimensions of size 1, or
        of a conversion of floats."""
        op = self.value.owner
        if is_annotated(self.value):
            return None
        if isinstance(op, nn.TransposeOp):
            perm = dims_of(op.properties, "perm", len(self.names))
            return NamedValue(op.x, tuple(self.names[perm.index(d)] for d in range(len(perm))))
        if isinstance(op, nn.ConvertOp):
            before = NamedValue(op.x, self.names)
            are_floats = all(isinstance(x.element, AnyFloat) for x in (self, before))
            return before if are_floats else None
        return self._before_reshape(self.sizes)

    def before_split(self, first: str, second: str) -> "NamedValue | None":
        """The operand of a reshape that makes two neighbours of one dimension, now `first`."""
        names, sizes = [*self.sizes], self.sizes
        if second not in names or names[names.index(second) - 1 : names.index(second)] != [first]:
            return None
        sizes[first] *= sizes.pop(second)
        return None if is_annotated(self.value) else self._before_reshape(sizes)

    def _before_reshape(self, sizes: dict[str, int]) -> "NamedValue | None":
        """The operand of a reshape, if its dimensions have these sizes, and others 1."""
        op = self.value.owner
        if not isinstance(op, nn.ReshapeOp):
            return None
        shape, names = shape_of(op.x), iter(sizes)
        if [n for n in shape if n != 1] != [*sizes.values()]:
            return None
        return NamedValue(op.x, tuple(next(names) if n != 1 else "" for n in shape))

    def before_repeat(self) -> "tuple[NamedValue, str] | None":
        """The operand of a reshape of a broadcast that repeats each element along a dimension, and
        the name of this dimension."""
        op = self.value.owner
        if not isinstance(op, nn.ReshapeOp) or any(map(is_annotated, (self.value, op.x))):
            return None
        if not isinstance(broadcast := op.x.owner, nn.BroadcastOp):
            return None
        wide = shape_of(op.x)
        dims = dims_of(broadcast.properties, "dims", len(wide))
        added = [d for d in range(len(wide)) if d not in dims]
        if len(added) != 1 or not (at := added[0]) or list(dims) != sorted(dims):
            return None
        merged = (*wide[: at - 1], wide[at - 1] * wide[at], *wide[at + 1 :])
        if merged != shape_of(self.value) or shape_of(broadcast.x) != wide[:at] + wide[at + 1 :]:
            return None
        return NamedValue.of(broadcast.x, self.names), self.names[at - 1]

    def source(self, element: Attribute | None = None) -> "NamedValue":
        """The value of which this one has the elements, in another order, and perhaps converted
        from an element type; by default from its own."""
        x, element = self, element or self.element
        while (before := x.before_move()) is not None:
            if x.element == element != before.element:
                break
            x = before
        return x

    def unscaled(self, element: Attribute) -> "tuple[NamedValue, ScaleFactor]":
        """The source of which this value is a multiple, and the factor."""
        x, factor = self.source(element), ONE
        while (product := x.before_factor()) is not None:
            factor = factor.times(product[1], x)
            x = product[0].source(element)
        return x, factor

    def before_factor(self) -> "tuple[NamedValue, float] | None":
        """The operand of a product with a number, and the number."""
        op = self.value.owner
        if not isinstance(op, nn.MulOp | nn.DivOp) or is_annotated(self.value):
            return None
        left, right = map(splat, op.operands)
        if right:
            x, factor = op.lhs, 1 / right if isinstance(op, nn.DivOp) else right
        elif left and isinstance(op, nn.MulOp):
            x, factor = op.rhs, left
        else:
            return None
        before = self.operand(x)
        return (before, factor) if before.sizes == self.sizes and abs(factor) < inf else None

    # ---- towards results ----

    def inner_user(self) -> Operation | None:
        """The one op that reads this value, if it has no layout."""
        users = [use.operation for use in self.value.uses]
        return users[0] if len(users) == 1 and not is_annotated(self.value) else None

    def after_move(self, op: Operation) -> "NamedValue | None":
        """The result of an op whose operand this is, as in `before_move`."""
        if isinstance(op, nn.TransposeOp):
            perm = dims_of(op.properties, "perm", len(self.names))
            return NamedValue(op.out, tuple(self.names[d] for d in perm))
        if isinstance(op, nn.ConvertOp):
            after = NamedValue(op.out, self.names)
            return after if isinstance(after.element, AnyFloat) else None
        if not isinstance(op, nn.ReshapeOp):
            return None
        shape, names = shape_of(op.out), iter(self.sizes)
        if [n for n in shape if n != 1] != [*self.sizes.values()]:
            return None
        return NamedValue(op.out, tuple(next(names) if n != 1 else "" for n in shape))

    def after_factor(self, op: Operation) -> "tuple[NamedValue, float] | None":
        """The product of this operand of an op and a number, and the number."""
        if not isinstance(op, nn.MulOp | nn.DivOp):
            return None
        product = NamedValue(op.out, self.names)
        if shape_of(op.out) != shape_of(self.value) or (before := product.before_factor()) is None:
            return None
        return (product, before[1]) if before[0].value is self.value else None

    def after_repeat(self, name: str) -> "NamedValue | None":
        """The sum of the elements that `before_repeat` repeats along a dimension."""
        op, at, shape = self.inner_user(), self.names.index(name), shape_of(self.value)
        if not isinstance(op, nn.ReshapeOp):
            return None
        split, (before, after) = shape_of(op.out), (shape[:at], shape[at + 1 :])
        if len(split) != len(shape) + 1 or (*split[:at], *split[at + 2 :]) != (*before, *after):
            return None
        wide = NamedValue.of(op.out, (*self.names[: at + 1], "repeat", *self.names[at + 1 :]))
        while (op := wide.inner_user()) is not None and isinstance(op, nn.ConvertOp):
            wide = NamedValue(op.out, wide.names)
        if not isinstance(op, nn.ReduceOp) or op.kind.data != "sum" or op.keep is not None:
            return None
        if dims_of(op.properties, "dims", len(split)) != (at + 1,):
            return None
        return NamedValue.of(op.out, self.names)

    def ends(self) -> "Iterator[tuple[Operation, int, NamedValue]]":
        """Yield the ops that read this value, or what moves make of it, with the number of the
        operand."""
        for use in self.value.uses:
            moved = self.after_move(use.operation)
            if moved is None or is_annotated(moved.value):
                yield use.operation, use.index, self
            else:
                yield from moved.ends()


def are_same(x: NamedValue, y: NamedValue) -> bool:
    return x.names == y.names and is_same(x.value, y.value)


def contraction(
    op: nn.EinsumOp, known: Mapping[str, str], other: str
) -> tuple[NamedValue, NamedValue, NamedValue]:
    """Both operands and the result of a contraction; a letter that has no known name gets
    `other`."""
    values = zip((op.lhs, op.rhs, op.out), letters_of(op.out), strict=True)
    left, right, out = (NamedValue.of(v, [known.get(c, other) for c in text]) for v, text in values)
    return left, right, out
