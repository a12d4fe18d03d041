"""Attention as other ops: two contractions around a softmax of scores, which are scaled, added to a
bias, and masked.

Dimensions have names, the letters of the second contraction, and those of size 1 have none: it does
not matter where they stand. Names tell which dimensions of all values are the same:

    scores = einsum "bthgd,bshd->bhtgs" %q, %k      m is t, n is s; h are the heads of k, and g
    p      = softmax(scores * scale + bias)         the group of heads of q that share one
    out    = einsum "bhtgs,bshe->bthge" %p, %v
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from xdsl.dialects.builtin import Float32Type, Float64Type
from xdsl.ir import SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.elementary import splat
from shardir.dialects.nn.properties import axis_of, dims_of
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.compositions.matching import is_annotated

NOTHING = -1e9
"""A masked score is at most this: its weight is 0."""

CAUSAL = {("ge", True), ("lt", False)}
"""How the index of a query compares with that of a key, and whether their score stays."""

MIRRORED = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}


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
    def sizes(self) -> dict[str, int]:
        return {n: s for n, s in zip(self.names, shape_of(self.value), strict=True) if n}

    def is_proper(self) -> bool:
        """Whether no two dimensions have one name, as in a diagonal."""
        return len(self.sizes) == len([n for n in self.names if n])

    def operand(self, x: SSAValue) -> "NamedValue":
        """An operand of the elementwise op that has this result."""
        return NamedValue.of(x, self.names[len(self.names) - len(shape_of(x)) :])

    def before_move(self) -> "NamedValue | None":
        """The operand of a transpose, or of a reshape that inserts or removes dimensions of size
        1."""
        op = self.value.owner
        if is_annotated(self.value):
            return None
        if isinstance(op, nn.TransposeOp):
            perm = dims_of(op.properties, "perm", len(self.names))
            return NamedValue(op.x, tuple(self.names[perm.index(d)] for d in range(len(perm))))
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

    def source(self) -> "NamedValue":
        """The value of which this one has the elements, in another order."""
        x = self
        while (before := x.before_move()) is not None:
            x = before
        return x

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


@dataclass(frozen=True)
class AttentionForm:
    """The operands and the result of an attention, and the names of their dimensions.

    Attributes:
        lead: those that q, k and v share.
        group: the heads of q that share one of k and v; "" for one.
        heads: the last of `lead`, of which q has more: it is merged with the group, or k and v are
            repeated; "" if there is none.
        row: the queries; "" for one.
        column: the keys.
        inner: the dimension over which products of q and k are summed.
        outer: the dimension that v alone has.
    """

    q: NamedValue
    k: NamedValue
    v: NamedValue
    mask: NamedValue | None
    out: NamedValue
    lead: tuple[str, ...]
    group: str
    heads: str
    row: str
    column: str
    inner: str
    outer: str
    scale: float
    causal: bool


@dataclass(frozen=True)
class Scores:
    """A value on the way from the operand of the softmax to the products, and what is done to it
    later."""

    at: NamedValue
    scale: float = 1.0
    bias: NamedValue | None = None
    row: str = ""
    """The queries of a causal mask."""
    filling: float = -inf
    """The scores where this mask does not hold."""


def attention_form(root: SSAValue, side: int) -> AttentionForm | None:
    """Return the attention that a contraction computes whose operand `side` is a softmax."""
    op = root.owner
    assert isinstance(op, nn.EinsumOp)
    letters = letters_of(root)
    p, v = (NamedValue.of(op.operands[i], letters[i]) for i in (side, 1 - side))
    softmax = p.value.owner
    if not isinstance(softmax, nn.SoftmaxOp) or not _is_inner(p.value) or not p.is_proper():
        return None
    if not isinstance(unsharded_type(root).element_type, Float32Type | Float64Type):
        return None  # JAX rounds products of narrower types elsewhere
    column = p.names[axis_of(softmax.properties, "axis", len(p.names))]
    for scores in _scores(Scores(NamedValue(softmax.x, p.names)), column):
        form = _form(scores, v.source(), NamedValue.of(root, letters[2]), column)
        if form is not None:
            return form
    return None


def _is_inner(value: SSAValue) -> bool:
    return len([*value.uses]) == 1 and not is_annotated(value)


# ---- scores ----


def _scores(scores: Scores, column: str) -> Iterator[Scores]:
    """Yield the ways in which a value is made of a contraction."""
    if not _is_inner(scores.at.value):
        return
    op = scores.at.value.owner
    if isinstance(op, nn.EinsumOp):
        yield scores
    elif (before := scores.at.before_move()) is not None:
        yield from _scores(replace(scores, at=before), column)
    elif (product := scores.at.before_factor()) is not None:
        x, factor = product
        yield from _scores(replace(scores, at=x, scale=scores.scale * factor), column)
    elif isinstance(op, nn.SelectOp):
        if (whole := _before_mask(scores, op, column)) is not None:
            yield from _scores(whole, column)
    elif isinstance(op, nn.AddOp) and scores.bias is None and scores.scale == 1.0:
        for x, bias in (op.operands, tuple(reversed(op.operands))):
            at = scores.at.operand(x)
            if at.sizes == scores.at.sizes:
                bias = scores.at.operand(bias).source()
                yield from _scores(replace(scores, at=at, bias=bias), column)


def _before_mask(scores: Scores, op: nn.SelectOp, column: str) -> Scores | None:
    """The scores before a causal mask. It leaves a key to each query: the weights of scores that
    are finite, but low, are 0."""
    is_kept = splat(op.rhs) is not None
    x, filling = (op.lhs, splat(op.rhs)) if is_kept else (op.rhs, splat(op.lhs))
    at, condition = scores.at.operand(x), scores.at.operand(op.condition)
    compare = condition.value.owner
    if filling is None or scores.row or scores.scale <= 0 or at.sizes != scores.at.sizes:
        return None
    if filling * scores.scale > NOTHING or not isinstance(compare, nn.CompareOp):
        return None
    left, right = (_counted(condition.operand(x)) for x in compare.operands)
    how = compare.how.data
    if left == column:
        left, right, how = right, left, MIRRORED.get(how, "")
    if not left or left == column or right != column or (how, is_kept) not in CAUSAL:
        return None
    return replace(scores, at=at, row=left, filling=filling)


def _counted(x: NamedValue) -> str:
    """The dimension along which a value is 0, 1, 2, ...; "" for other values."""
    x = x.source()
    op = x.value.owner
    if not isinstance(op, nn.IotaOp):
        return ""
    return x.names[axis_of(op.properties, "dim", len(x.names))]


# ---- dimensions ----


def _form(scores: Scores, v: NamedValue, out: NamedValue, column: str) -> AttentionForm | None:
    sides = _sides(scores.at, column)
    if sides is None or (scores.bias is not None and scores.filling > -inf):
        return None  # a bias may be as low as the filling
    q, k, inner, scale = sides
    in_q, in_k, in_v, in_out = ({n for n in x.names if n} for x in (q, k, v, out))
    lead = (in_q & in_k) - {inner}
    rows, outer = in_q - in_k, in_v - lead - {column}
    if (
        not all(x.is_proper() for x in (q, k, v, out))
        or in_k != lead | {inner, column} or in_v != lead | {column} | outer
        or in_out != lead | rows | outer or len(outer) != 1 or outer & rows
        or len(rows) > 2 or not {scores.row} - {""} <= rows
    ):  # fmt: skip
        return None
    row = scores.row or max(rows, key=q.sizes.__getitem__, default="")
    (group,) = rows - {row} or {""}
    heads, bias = "", scores.bias
    for first in lead if group else ():
        split = q.before_split(first, group)
        if split is not None and (
            bias is None or (first in bias.names) == (group in bias.names)
        ):  # fmt: skip
            q, heads = split.source(), first
    repeats = [] if group else [r for x in (k, v) if (r := x.before_repeat()) is not None]
    if len(repeats) == 2 and repeats[0][1] == repeats[1][1] in lead:
        (k, heads), (v, _) = repeats
    order = [*(n for n in q.names if n in lead and n != heads), *([heads] if heads else [])]
    (last,) = outer
    return AttentionForm(
        q, k, v, bias, out, tuple(order), group, heads, row, column, inner, last,
        scores.scale * scale, bool(scores.row),
    )  # fmt: skip


def _sides(products: NamedValue, column: str) -> tuple[NamedValue, NamedValue, str, float] | None:
    """Return q and k of products, the name of their inner dimension, and their factor."""
    op = products.value.owner
    assert isinstance(op, nn.EinsumOp)
    left, right, out = letters_of(products.value)
    names = dict(zip(out, products.names, strict=True))
    scale, values = 1.0, []
    for x, letters in zip(op.operands, (left, right), strict=True):
        side = NamedValue.of(x, [names.get(c, f"inner {c}") for c in letters]).source()
        while (product := side.before_factor()) is not None:
            side, scale = product[0].source(), scale * product[1]
        values.append(side)
    q, k = values if column in values[1].names else reversed(values)
    inner = {n for x in values for n in x.names if n.startswith("inner")}
    if not column or column in q.names or column not in k.names or len(inner) != 1:
        return None
    (summed,) = inner
    return (q, k, summed, scale) if summed in q.names and summed in k.names else None
