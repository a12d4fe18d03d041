"""Attention as other ops: two contractions around a softmax of scores, which are scaled, added to a
bias, and masked.

Dimensions have names, the letters of the second contraction, and those of size 1 have none: it does
not matter where they stand. Names tell which dimensions of all values are the same:

    scores = einsum "bthgd,bshd->bhtgs" %q, %k      m is t, n is s; h are the heads of k, and g
    p      = softmax(scores * scale + bias)         the group of heads of q that share one
    out    = einsum "bhtgs,bshe->bthge" %p, %v
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from xdsl.dialects.builtin import (
    BFloat16Type,
    Float16Type,
    Float32Type,
    Float64Type,
    f32,
)
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Operation, SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.creation import dense_values
from shardir.dialects.nn.elementary import splat
from shardir.dialects.nn.properties import axis_of, dims_of
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.compositions.conditions import Condition, leave_a_key
from shardir.rewriting.compositions.matching import is_annotated
from shardir.rewriting.compositions.named import (
    ANY,
    ONE,
    NamedValue,
    ScaleFactor,
    are_same,
    contraction,
    letters_of,
    shape_of,
)
from shardir.rewriting.compositions.sizes import size_of

NOTHING, NOTHING_IN_F16 = -1e9, -6e4
"""A masked score is at most this: its weight is 0."""

MODERATE = 64.0
"""A score of this size loses no more than six bits of its log-sum-exp."""


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
        biases: the addends of the bias.
        conditions: those under which scores stay, without `causal`.
        is_guarded: whether they may leave no key to a query, whose keys all have one weight then.
        read: q, k and v, in this order, as the contractions read them: with split and repeated
            heads.
        masks: the conditions as the program has them.
    """

    q: NamedValue
    k: NamedValue
    v: NamedValue
    biases: tuple[NamedValue, ...]
    out: tuple[str, ...]
    lead: tuple[str, ...]
    group: str
    heads: str
    row: str
    column: str
    inner: str
    outer: str
    scale: ScaleFactor
    causal: bool
    conditions: tuple[Condition, ...]
    is_guarded: bool
    read: tuple[NamedValue, NamedValue, NamedValue]
    masks: tuple[Condition, ...]

    @property
    def is_repeated(self) -> bool:
        """Whether the program repeats k and v."""
        return bool(self.heads) and not self.group


@dataclass(frozen=True)
class Scores:
    """A value on the way from the operand of the softmax to the products, and what is done to it
    later."""

    at: NamedValue
    scale: ScaleFactor = ONE
    biases: tuple[NamedValue, ...] = ()
    conditions: tuple[Condition, ...] = ()
    filling: float = -inf
    """The scores where a condition does not hold; -inf if there is none."""
    added: tuple[Condition, ...] = ()
    """The conditions where numbers are added that are 0 or low."""
    least: float = -inf
    """The greatest of the low numbers."""


def _types_of(element: Attribute) -> tuple[Attribute, ...]:
    """The element types in which the scores of an attention may be."""
    if isinstance(element, BFloat16Type | Float16Type):
        return element, f32
    return (element,) if _is_wide(element) else ()


def _is_wide(element: Attribute) -> bool:
    return isinstance(element, Float32Type | Float64Type)


def attention_form(root: SSAValue) -> AttentionForm | None:
    """Return the attention that a contraction computes of which an operand is a softmax."""
    op = root.owner
    assert isinstance(op, nn.EinsumOp)
    element = unsharded_type(root).element_type
    for side in (0, 1):
        *operands, out = contraction(op, {c: c for c in letters_of(root)[side]}, "outer")
        p = operands[side]
        while (
            _is_inner(p.value) and p.element in _types_of(element)
            and (before := p.before_move()) is not None
        ):  # fmt: skip
            p = before
        softmax = p.value.owner
        if not isinstance(softmax, nn.SoftmaxOp) or not _is_inner(p.value) or not p.is_proper():
            continue
        column = p.names[axis_of(softmax.properties, "axis", len(p.names))]
        form = _form_of(p, column, operands[1 - side].source(element), out.names, element)
        if form is not None and not (
            _is_differentiated(root) and any(_may_be_low(x, column) for x in form.biases)
        ):
            return form
    return None


def _form_of(
    p: NamedValue, column: str, v: NamedValue, out: Sequence[str], element: Attribute
) -> AttentionForm | None:
    """Return the attention with these weights."""
    softmax = p.value.owner
    assert isinstance(softmax, nn.SoftmaxOp)
    for scores in _scores(Scores(NamedValue(softmax.x, p.names)), column, element):
        if (form := _form(scores, v, tuple(out), column, p, element)) is not None:
            return form
    return None


def _is_inner(value: SSAValue) -> bool:
    return len([*value.uses]) == 1 and not is_annotated(value)


# ---- scores ----


def _scores(scores: Scores, column: str, element: Attribute) -> Iterator[Scores]:
    """Yield the ways in which a value is made of a contraction."""
    if not _is_inner(scores.at.value) or scores.at.element not in _types_of(element):
        return
    op, ways = scores.at.value.owner, list[Scores]()
    if isinstance(op, nn.EinsumOp):
        yield scores
    elif (before := scores.at.before_move()) is not None:
        ways.append(replace(scores, at=before))
    elif (product := scores.at.before_factor()) is not None:
        scale = scores.scale.times(product[1], scores.at)
        ways.append(replace(scores, at=product[0], scale=scale))
    elif isinstance(op, nn.SelectOp):
        ways += _before_mask(scores, op)
    elif isinstance(op, nn.AddOp) and scores.scale.number == 1.0:
        for x, bias in (op.operands, tuple(reversed(op.operands))):
            at, bias = scores.at.operand(x), scores.at.operand(bias)
            if at.sizes != scores.at.sizes:
                continue
            if (mask := _added_mask(bias)) is not None:
                condition, low = mask
                added, least = (*scores.added, condition), max(scores.least, low)
                ways.append(replace(scores, at=at, added=added, least=least))
            bias = bias.source(element)
            if bias.element == element and (not scores.biases or _is_wide(element)):
                ways.append(replace(scores, at=at, biases=(*scores.biases, bias)))
    for way in ways:
        yield from _scores(way, column, element)


def _before_mask(scores: Scores, op: nn.SelectOp) -> Iterator[Scores]:
    """Yield the scores before a mask. The weights of masked scores that are finite, but low, are 0,
    unless no others are left."""
    stays = splat(op.rhs) is not None
    x, filling = (op.lhs, splat(op.rhs)) if stays else (op.rhs, splat(op.lhs))
    at, condition = scores.at.operand(x), Condition(scores.at.operand(op.condition), stays)
    if filling is None or scores.scale.number <= 0 or at.sizes != scores.at.sizes:
        return
    filling *= scores.scale.number
    is_f16 = isinstance(scores.at.element, Float16Type)
    if filling > (NOTHING_IN_F16 if is_f16 else NOTHING):
        return
    if scores.conditions and filling != scores.filling:
        return  # queries with masked keys alone have the higher filling
    if scores.biases and filling > -inf:
        return  # the bias is added to masked scores
    yield replace(scores, at=at, conditions=(*scores.conditions, condition), filling=filling)


def _added_mask(bias: NamedValue) -> tuple[Condition, float] | None:
    """The condition where a bias is 0, and its number elsewhere, which is low."""
    while (before := bias.before_move()) is not None:
        bias = before
    op = bias.value.owner
    if not isinstance(op, nn.SelectOp):
        return None
    left, right = splat(op.lhs), splat(op.rhs)
    low = left if right == 0.0 else right
    if low is None or low > NOTHING or 0.0 not in (left, right):
        return None
    return Condition(bias.operand(op.condition), left == 0.0), low


def _may_be_low(bias: NamedValue, column: str) -> bool:
    """Whether a bias may mask all keys of a query by finite numbers. A gradient needs the
    log-sum-exp of these low scores, which has no digits of their differences. Known elements are
    looked at, and the size of others is estimated."""
    op = bias.value.owner
    if isinstance(op, nn.ConstantOp) and column in bias.names:
        top = dense_values(op.value).max(axis=bias.names.index(column))
        return not bool((abs(top) <= MODERATE).all())
    return size_of(bias.value) >= -NOTHING_IN_F16


def _is_differentiated(v: SSAValue) -> bool:
    """Whether a value is in a private function, such as a loss, which a step may differentiate."""
    f = v.owner.parent_op() if isinstance(v.owner, Operation) else None
    return isinstance(f, FuncOp) and f.sym_visibility is not None


# ---- dimensions ----


def _form(
    scores: Scores, v: NamedValue, out: tuple[str, ...], column: str, p: NamedValue,
    element: Attribute,
) -> AttentionForm | None:  # fmt: skip
    sides = _sides(scores, column, element)
    if sides is None:
        return None
    q, k, scale = sides
    read = q, k, v
    in_q, in_k, in_v, in_out = ({n for n in x if n} for x in (q.names, k.names, v.names, out))
    lead = (in_q & in_k) - {"inner"}
    rows, outer = in_q - in_k, in_v - lead - {column}
    if (
        any(not x.is_proper() or x.element != element for x in read)
        or in_k != lead | {"inner", column} or in_v != lead | {column} | outer
        or in_out != lead | rows | outer or len(outer) != 1 or outer & rows or len(rows) > 2
    ):  # fmt: skip
        return None
    conditions = (*scores.conditions, *scores.added)
    masks = [c.at for c in conditions] + [*scores.biases]
    parts = [part for c in conditions for part in c.parts()]
    causal = [part for part in parts if part.causal_row(column) in rows]
    known = {part.causal_row(column) for part in causal}
    if len(known) > 1:
        return None
    (row,) = known or {
        max(sorted(rows), key=lambda n: (any(n in m.names for m in masks), q.sizes[n]), default="")
    }
    (group,) = rows - {row} or {""}
    lowest = max(scores.filling, scores.least)
    if scores.biases and lowest > -inf:
        return None  # a bias may be as low
    is_guarded = False
    if lowest > -inf:
        is_guarded = not leave_a_key(parts, row, column, p)
    if is_guarded and scores.added:
        return None  # the scores of a query without keys differ
    if causal and not is_guarded:
        conditions = tuple(part for part in parts if part not in causal)
    heads = ""
    for first in [n for n in q.names if n in lead] if group else ():
        split = q.before_split(first, group)
        if split is not None and all((first in m.names) == (group in m.names) for m in masks):
            q, heads = split.source(element), first
    repeats = [] if group else [r for x in (k, v) if (r := x.before_repeat()) is not None]
    if len(repeats) == 2 and repeats[0][1] == repeats[1][1] in lead:
        (k, heads), (v, _) = repeats
    order = [*(n for n in q.names if n in lead and n != heads), *([heads] if heads else [])]
    (last,) = outer
    return AttentionForm(
        q, k, v, scores.biases, out, tuple(order), group, heads, row, column, "inner", last, scale,
        bool(causal) and not is_guarded, conditions, is_guarded, read,
        scores.conditions,
    )  # fmt: skip


def _sides(
    scores: Scores, column: str, element: Attribute
) -> tuple[NamedValue, NamedValue, ScaleFactor] | None:
    """Return q and k of scores, and the factor of their products."""
    op = scores.at.value.owner
    assert isinstance(op, nn.EinsumOp)
    letters = letters_of(scores.at.value)[2]
    *operands, _ = contraction(op, dict(zip(letters, scores.at.names, strict=True)), "inner")
    (left, by_left), (right, by_right) = (x.unscaled(element) for x in operands)
    scale = scores.scale.by(by_left).by(by_right)
    q, k = (left, right) if column in right.names else (right, left)
    if not column or column in q.names or column not in k.names:
        return None
    return (q, k, scale) if "inner" in q.names and "inner" in k.names else None


# ---- gradients ----


def sums_products(weights: SSAValue, dp: SSAValue, total: SSAValue) -> bool:
    """Whether a value is the sum of weights times their cotangents in each row, computed as that of
    the result of an attention times its cotangent, as FlashAttention does."""
    p = NamedValue.of(weights, [f"d{d}" for d in range(len(shape_of(weights)))])
    softmax = weights.owner
    assert isinstance(softmax, nn.SoftmaxOp)
    column = p.names[axis_of(softmax.properties, "axis", len(p.names))]
    cotangent, sums = _contracted(p.operand(dp), "outer"), p.operand(total).source(ANY)
    if is_annotated(sums.value):
        return False
    sides = _contracted(sums, "outer")
    if sides is None and (product := _summed(sums, "outer")) is not None:
        product = product.source(ANY)
        op = product.value.owner
        if isinstance(op, nn.MulOp) and not is_annotated(product.value):
            left, right = (product.operand(x).source(ANY) for x in op.operands)
            sides = left, right
    if cotangent is None or sides is None or not column:
        return False
    dy, v = cotangent if column in cotangent[1].names else reversed(cotangent)
    if not dy.is_proper() or not v.is_proper():
        return False
    for cotangent_of_out, out in (sides, reversed(sides)):
        parts = _contracted(out, column)
        if parts is None or not are_same(cotangent_of_out, dy):
            continue
        if any(are_same(x, p.source(ANY)) and are_same(y, v) for x, y in (parts, parts[::-1])):
            return True
    return False


def _summed(sums: NamedValue, other: str) -> NamedValue | None:
    """The operand of a sum over one dimension, which is called `other`."""
    op = sums.value.owner
    if not isinstance(op, nn.ReduceOp) or op.kind.data != "sum":
        return None
    rank = len(shape_of(op.x))
    dims = dims_of(op.properties, "dims", rank)
    if len(dims) != 1:
        return None
    left = [*sums.names[: dims[0]], *sums.names[dims[0] + (op.keep is not None) :]]
    return NamedValue.of(op.x, [*left[: dims[0]], other, *left[dims[0] :]])


@dataclass(frozen=True)
class ProductOverSum:
    """A contraction over the sums of an operand along the dimension that it sums, "column".

    Attributes:
        side: the number of the operand.
    """

    quotient: NamedValue
    product: NamedValue
    side: int
    summed: NamedValue


def product_over_sum(root: SSAValue) -> ProductOverSum | None:
    """Return the contraction that a quotient divides by the sums of an operand."""
    op = root.owner
    assert isinstance(op, nn.DivOp)
    quotient = NamedValue.of(root, [f"d{d}" for d in range(len(shape_of(root)))])
    product, sums = (quotient.operand(x).source() for x in op.operands)
    op, summed = product.value.owner, _summed(sums, "column")
    if not isinstance(op, nn.EinsumOp) or summed is None or product.sizes != quotient.sizes:
        return None
    if any(is_annotated(x.value) for x in (product, sums, summed)):
        return None
    letters = dict(zip(letters_of(op.out)[2], product.names, strict=True))
    for side, x in enumerate(contraction(op, letters, "column")[:2]):
        if x.is_proper() and "column" in x.names and are_same(x, summed):
            return ProductOverSum(quotient, product, side, x)
    return None


def _contracted(x: NamedValue, other: str) -> tuple[NamedValue, NamedValue] | None:
    """The sources of both operands of the contraction that a value is a move of."""
    x = x.source(ANY)
    if not isinstance(op := x.value.owner, nn.EinsumOp):
        return None
    letters = letters_of(x.value)[2]
    left, right, _ = contraction(op, dict(zip(letters, x.names, strict=True)), other)
    return left.source(ANY), right.source(ANY)


@dataclass(frozen=True)
class AttentionGradForm:
    """An attention and its gradient.

    Attributes:
        out: the result of the attention; None where it is computed elsewhere, and its weights are
            computed again.
        dy: its cotangent.
        cotangents: those of q, k and v, by their number, each with its ratio to the cotangent.
    """

    forward: AttentionForm
    out: NamedValue | None
    dy: NamedValue
    cotangents: Mapping[int, tuple[NamedValue, float]]


def attention_gradient(root: SSAValue) -> AttentionGradForm | None:
    """Return the attention, with its gradient, of which a value is the cotangent of the scores. The
    weights and all cotangents have no other readers."""
    op = root.owner
    assert isinstance(op, nn.SoftmaxGradOp)
    softmax, rank = op.y.owner, len(shape_of(op.y))
    axis = axis_of(op.properties, "axis", rank)
    if not isinstance(softmax, nn.SoftmaxOp) or axis != axis_of(softmax.properties, "axis", rank):
        return None
    p = NamedValue.of(op.y, [f"d{d}" for d in range(rank)])
    dp, column = NamedValue.of(op.dy, p.names), p.names[axis]
    while _is_inner(dp.value) and (before := dp.before_move()) is not None:
        dp = before
    if not isinstance(product := dp.value.owner, nn.EinsumOp) or not _is_inner(dp.value):
        return None
    if not column or is_annotated(p.value) or is_annotated(root):
        return None
    letters = letters_of(dp.value)[2]
    *sides, _ = contraction(product, dict(zip(letters, dp.names, strict=True)), "outer")
    dy, v = sides if column in sides[1].names else reversed(sides)
    element = dp.element
    dy, v = dy.source(element), v.source(element)
    if column in dy.names or not all(x.is_proper() and x.element == element for x in (dy, v)):
        return None
    out, found = None, dict[int, tuple[NamedValue, ScaleFactor]]()
    for user, side, at in p.ends():
        if user is op:
            continue
        product = _product(user, side, at, "outer")
        if product is None:
            return None
        other, result = product
        if column in result.names:
            if 2 in found or not are_same(other.source(element), dy):
                return None
            found[2] = result, ONE
        else:
            if out is not None or result.element != element:
                return None
            if not are_same(other.source(element), v):
                return None
            out = result
    names = {n for x in (p, dy) for n in x.names if n} - {column}
    form = _form_of(p, column, v, out.names if out is not None else sorted(names), element)
    if form is not None and any(_may_be_low(x, column) for x in form.biases):
        return None
    if form is None or {*dy.sizes} != {n for n in form.out if n}:
        return None
    ends = _cotangent_ends(NamedValue(root, p.names), ONE, form.masks, form.is_guarded)
    for user, side, at, factor in ends or ():
        if (product := _product(user, side, at, "inner")) is None:
            return None
        (other, by_other), result = product[0].unscaled(element), product[1]
        i = 1 if column in result.names else 0
        if i in found or not are_same(other, form.read[1 - i]):
            return None
        found[i] = result, factor.by(by_other)
    if ends is None or not {0, 1} & {*found}:
        return None
    cotangents = {}
    for i, (result, factor) in found.items():
        goal = form.scale if i < 2 else ONE
        heads = form.heads if i and form.is_repeated else ""
        settled = _settled(result, factor, goal, heads, element)
        if settled is None or {*settled[0].sizes} != {*form.read[i].sizes}:
            return None
        cotangents[i] = settled
    return AttentionGradForm(form, out, dy, cotangents)


def _product(
    user: Operation, side: int, at: NamedValue, other: str
) -> tuple[NamedValue, NamedValue] | None:
    """The other operand of a contraction, and its result."""
    if not isinstance(user, nn.EinsumOp):
        return None
    letters = letters_of(user.out)[side]
    left, right, out = contraction(user, dict(zip(letters, at.names, strict=True)), other)
    return (right, left)[side], out


def _cotangent_ends(
    at: NamedValue, factor: ScaleFactor, masks: Sequence[Condition], is_guarded: bool
) -> list[tuple[Operation, int, NamedValue, ScaleFactor]] | None:
    """Return the readers of a cotangent, behind the gradients of masks and factors: the number of
    the operand, the operand, and by which number it was multiplied. None if another op is among
    them, or a mask is not though queries may have no key: the weights of masked keys, and so their
    cotangents, are 0 otherwise."""
    ends = list[tuple[Operation, int, NamedValue, ScaleFactor]]()
    for user, side, x in at.ends():
        further: list[tuple[Operation, int, NamedValue, ScaleFactor]] | None
        if isinstance(user, nn.EinsumOp):
            further = [(user, side, x, factor)]
            if masks and is_guarded:
                return None
        elif (product := x.after_factor(user)) is not None:
            scaled = factor.times(product[1], product[0])
            further = _cotangent_ends(product[0], scaled, masks, is_guarded)
        elif isinstance(user, nn.SelectOp) and side:
            stays = side == 1
            condition = Condition(x.operand(user.condition), stays)
            after = NamedValue(user.out, x.names)
            is_zero = splat(user.rhs if stays else user.lhs) == 0.0
            left = [m for m in masks if not m.is_same(condition)]
            if not is_zero or len(left) != len(masks) - 1 or not x.has_shape_of(after):
                return None
            further = _cotangent_ends(after, factor, left, is_guarded)
        else:
            return None
        if further is None or is_annotated(x.value):
            return None
        ends += further
    return ends


def _settled(
    x: NamedValue, factor: ScaleFactor, goal: ScaleFactor, repeated: str, element: Attribute
) -> tuple[NamedValue, float] | None:
    """Follow a cotangent until it has an element type and a factor, and is summed over repeated
    heads; return it with the ratio of the factors."""
    while True:
        ratio = factor.over(goal)
        if x.element == element and ratio.is_close(1.0) and not repeated:
            return x, 1.0
        op = x.inner_user()
        if op is None:
            break
        if repeated and (summed := x.after_repeat(repeated)) is not None:
            x, repeated = summed, ""
        elif (moved := x.after_move(op)) is not None:
            x = moved
        elif (product := x.after_factor(op)) is not None:
            x, factor = product[0], factor.times(product[1], product[0])
        else:
            break
    if x.element != element or repeated:
        return None
    return x, ratio.number
