"""The ops of an attention, and of its gradient, whose form is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf

from xdsl.dialects.builtin import AnyFloat, UnitAttr, f32
from xdsl.ir import Attribute, SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.properties import dims_attr, float_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.text import word
from shardir.rewriting.compositions.attention import AttentionForm, AttentionGradForm
from shardir.rewriting.compositions.matching import decimal
from shardir.rewriting.compositions.named import NamedValue, shape_of
from shardir.rewriting.compositions.raising import Builder


@dataclass(frozen=True)
class Operands:
    """The operands and properties of an attention: q, k, v and perhaps a mask. `attends` says which
    queries attend to a key; None where all do."""

    values: tuple[SSAValue, ...]
    props: Mapping[str, Attribute | None]
    attends: SSAValue | None


def attention(b: Builder, f: AttentionForm, out: SSAValue) -> SSAValue:
    """Make an attention; return the new value of its result."""
    operands = _operands(b, f)
    y = b.value(nn.AttentionOp, *operands.values, **operands.props)
    return _restored(b, f, y, [*_rows(f), f.outer], NamedValue(out, f.out))


def attention_with_gradient(b: Builder, f: AttentionGradForm) -> dict[SSAValue, SSAValue]:
    """Make an attention and its gradient; return the new values."""
    form, roots = f.forward, {i: x.value for i, (x, _) in f.cotangents.items()}
    b.before(b.root, *([f.out.value] if f.out is not None else []))
    operands, new = _operands(b, form), {}
    y, lse = b.results(nn.AttentionOp, *operands.values, logsumexp=UnitAttr(), **operands.props)
    if f.out is not None:
        new[f.out.value] = _restored(b, form, y, [*_rows(form), form.outer], f.out)
    b.before(b.root, *roots.values())
    q, k, v, *masks = operands.values
    merged = f.dy.before_split(form.heads, form.group) if form.heads else None
    dims = [*form.lead, form.row, form.outer]
    if merged is None:
        merged, dims = f.dy, [*form.lead, *_group(form), form.row, form.outer]
    dy = b.reshape(arranged(b, merged.source(f.dy.element), dims), shape_of(y))
    grads = [*b.results(nn.AttentionGradOp, q, k, v, dy, y, lse, *masks, **operands.props)]
    if operands.attends is not None and 0 in roots:
        grads[0] = b.value(nn.SelectOp, operands.attends, grads[0], _zero(b, q))
    names = ([*_rows(form), form.inner], [*_shared(form), form.column, form.inner],
             [*_shared(form), form.column, form.outer])  # fmt: skip
    for i, (root, ratio) in f.cotangents.items():
        grad = grads[i]
        if ratio != 1.0:
            grad = b.value(nn.MulOp, grad, b.number(ratio, root.element))
        new[root.value] = _restored(b, form, grad, names[i], root)
    return new


def _group(f: AttentionForm) -> list[str]:
    return [f.group] if f.group else []


def _rows(f: AttentionForm) -> list[str]:
    """The dimensions of q but the last: a group is merged with the heads, if there are heads."""
    return [*f.lead, *([] if f.heads else _group(f)), f.row]


def _shared(f: AttentionForm) -> list[str]:
    """The leading dimensions of k and v: one head for a group without heads."""
    return [*f.lead, *([] if f.heads else ["" for _ in _group(f)])]


def _operands(b: Builder, f: AttentionForm) -> Operands:
    q = arranged(b, f.q, [*_rows(f), f.inner])
    k, v = (
        arranged(b, x, [*_shared(f), f.column, last])
        for x, last in ((f.k, f.inner), (f.v, f.outer))
    )
    mask, attends = _mask(b, f, (*shape_of(q)[:-1], shape_of(k)[-2])), None
    if f.is_guarded:
        assert mask is not None
        mask, attends = _guard(b, mask)
        q = b.value(nn.SelectOp, attends, q, _zero(b, q))
    props = {"causal": UnitAttr() if f.causal else None, "scale": _scale(f, q)}
    return Operands((q, k, v, *([] if mask is None else [mask])), props, attends)


def _scale(f: AttentionForm, q: SSAValue) -> Attribute | None:
    """The scale; None for the default."""
    if f.scale.is_close(f.q.sizes.get(f.inner, 1) ** -0.5):
        return None
    element = unsharded_type(q).element_type
    is_wide = isinstance(element, AnyFloat) and element.bitwidth >= 32
    return float_attr(decimal(f.scale.number, element if is_wide else f32))


def _mask(b: Builder, f: AttentionForm, scores: Sequence[int]) -> SSAValue | None:
    """The bias, or the conditions, or both, with the dimensions of scores."""
    dims = [*f.lead, *_group(f), f.row, f.column]

    def of_scores(x: NamedValue) -> SSAValue:
        whole = zip([*_rows(f), f.column], scores, strict=True)
        sizes = [n if name in x.names else 1 for name, n in whole]
        while len(sizes) > 2 and sizes[0] == 1:
            del sizes[0]
        return b.reshape(arranged(b, x, dims), sizes)

    conditions = [of_scores(c.at) for c in f.conditions]
    for i, c in enumerate(f.conditions):
        if not c.stays:
            conditions[i] = b.value(nn.NotOp, conditions[i])
    both = [reduce(lambda x, y: b.value(nn.AndOp, x, y), conditions)] if conditions else []
    if not f.biases:
        return both[0] if both else None
    bias = reduce(lambda x, y: b.value(nn.AddOp, x, y), map(of_scores, f.biases))
    if not both:
        return bias
    return b.value(nn.SelectOp, both[0], bias, b.number(-inf, f.biases[0].element))


def _guard(b: Builder, mask: SSAValue) -> tuple[SSAValue, SSAValue]:
    """Return a mask by which queries without keys attend to all keys, and the other queries.
    Scores of 0 then have the one weight, and no gradient, that masked scores of one number have."""
    attends = b.reduced(mask, "any", [len(shape_of(mask)) - 1])
    return b.value(nn.CompareOp, mask, attends, how=word(nn.ComparisonAttr, "eq")), attends


def _zero(b: Builder, like: SSAValue) -> SSAValue:
    return b.number(0.0, unsharded_type(like).element_type)


def arranged(b: Builder, x: NamedValue, order: Sequence[str]) -> SSAValue:
    """A value whose dimensions are those of `order`, of size 1 where it has none of a name."""
    names, value = [n for n in x.names if n], x.value
    wanted = [n for n in order if n in names]
    if names != wanted:
        squeezed = b.reshape(value, [*x.sizes.values()])
        value = b.value(nn.TransposeOp, squeezed, perm=dims_attr(*map(names.index, wanted)))
    return b.reshape(value, [x.sizes.get(n, 1) for n in order])


def _restored(
    b: Builder, f: AttentionForm, y: SSAValue, names: list[str], like: NamedValue
) -> SSAValue:  # fmt: skip
    """A result with the dimensions of a value, in its order: the group is apart from the heads."""
    order = [n for n in like.names if n]
    if f.heads and f.group in order:
        at = order.index(f.heads)
        if order[at + 1 : at + 2] == [f.group]:
            order.remove(f.group)
        else:
            names = [*names]
            names.insert(names.index(f.heads) + 1, f.group)
            y = b.reshape(y, [like.sizes.get(n, 1) for n in names])
    return b.reshape(arranged(b, NamedValue.of(y, names), order), shape_of(like.value))
