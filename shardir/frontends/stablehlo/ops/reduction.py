"""Reductions, by the text of their bodies, and sorts."""

from collections.abc import Mapping, Sequence
from math import inf, prod

from shardir.build import Value, nn
from shardir.dialects import nn as ops
from shardir.frontends.stablehlo.form import HloBlock, expression
from shardir.frontends.stablehlo.regions import components, inlined, of_tensors
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import RANGES, in_order_of, is_float, wrap

KINDS: Mapping[str, str] = {
    f"{name}({order})": kind
    for name, kind in (
        ("add", "sum"), ("multiply", "prod"), ("maximum", "max"), ("minimum", "min"),
        ("and", "all"), ("or", "any"),
    )
    for order in ("0, 1", "1, 0")
}  # fmt: skip
"""The kind of reduction of each body."""

OF_BOOLS = {"sum": "any", "prod": "all", "max": "any", "min": "all"}
"""The reductions of i1 by arithmetic."""

COMBINE = {
    "sum": nn.add, "prod": nn.mul, "max": nn.max, "min": nn.min, "all": nn.and_, "any": nn.or_,
}  # fmt: skip


def known_kind(body: HloBlock) -> str | None:
    """Return the kind of reduction of a body of two scalars; None for other computations."""
    kind = KINDS.get(expression(body))
    if kind is not None and body.arguments[0].type.element == "i1":
        return OF_BOOLS.get(kind, kind)
    return None if kind in ("all", "any") else kind


def neutral(kind: str, element: str) -> float:
    """Return the number that a reduction of floats or integers ignores; those of ui64 are in the
    order of i64."""
    if kind in ("max", "min"):
        if is_float(element):
            return -inf if kind == "max" else inf
        low, count = RANGES.get(element, (-(2**63), 2**64))
        if element == "i32":
            low, count = -(2**31), 2**32
        return low if kind == "max" else low + count - 1
    return {"sum": 0, "prod": 1, "all": True, "any": False}[kind]


def _reduce(t: OpTranslation, *operands: Value) -> Sequence[Value]:
    count = len(operands) // 2
    body = inlined(t.op.regions[0], t.callee)
    return reduced(t, body, operands[:count], operands[count:], t["dimensions"])


def reduced(
    t: OpTranslation, body: HloBlock, xs: Sequence[Value], firsts: Sequence[Value],
    dims: Sequence[int],
) -> list[Value]:  # fmt: skip
    """Reduce values of one shape over dimensions: each on its own by a known kind, as a maximum
    with its index, or by the body itself."""
    parts = components(body)
    kinds = [known_kind(part) for part in parts or ()]
    if kinds and None not in kinds:
        return [
            _reduced(t, kind, x, first, dims, part.arguments[0].type.element)
            for part, kind, x, first in zip(parts or (), kinds, xs, firsts, strict=True)
            if kind is not None
        ]
    if len(xs) == 2 and (extreme := _extreme_index(t, body, dims, *xs, *firsts)) is not None:
        return [*extreme]
    return _by_halves(t, body, xs, firsts, dims)


def _by_halves(
    t: OpTranslation, body: HloBlock, xs: Sequence[Value], firsts: Sequence[Value],
    dims: Sequence[int],
) -> list[Value]:  # fmt: skip
    """Reduce by any associative computation of scalars: it combines all neighbours at once, until
    one element is left."""
    if any(op.regions for op in body.ops):
        t.refuse(f"a reduction by {expression(body)[:80]}, which has regions")
    kept = [d for d in range(len(xs[0].shape)) if d not in dims]
    shape = tuple(xs[0].shape[d] for d in kept)
    size = prod(xs[0].shape[d] for d in dims)
    values = [t.reshape(t.transpose(x, [*dims, *kept]), (size, *shape)) for x in xs]
    first = [t.spread(t.source(f), (1, *shape)) for f in firsts]
    while size > 1:
        half, rest = size // 2, size % 2
        pairs = [t.reshape(t.part(v, 0, 0, 2 * half), (half, 2, *shape)) for v in values]
        sides = [
            [t.reshape(t.part(p, 1, k, 1), (half, *shape)) for p in pairs] for k in (0, 1)
        ]  # fmt: skip
        out = t.run(of_tensors(body, (half, *shape)), [*sides[0], *sides[1]])
        if rest:
            last = [t.part(v, 0, size - 1, 1) for v in values]
            out = [nn.concat(o, l, axis=0) for o, l in zip(out, last, strict=True)]
        values, size = list(out), half + rest
    out = t.run(of_tensors(body, (1, *shape)), [*first, *values]) if size else first
    return [t.reshape(v, shape) for v in out]


def _reduced(
    t: OpTranslation, kind: str, x: Value, first: Value, dims: Sequence[int], element: str
) -> Value:  # fmt: skip
    if element == "ui64" and kind in ("max", "min"):
        x, first = in_order_of(x, element), in_order_of(first, element)
        return in_order_of(_combined(t, kind, x, first, dims, element), element)
    return _combined(t, kind, x, first, dims, element)


def _combined(
    t: OpTranslation, kind: str, x: Value, first: Value, dims: Sequence[int], element: str
) -> Value:  # fmt: skip
    shape = tuple(n for d, n in enumerate(x.shape) if d not in dims)
    decided = t.number(x)
    if kind in ("all", "any") and decided is not None:
        out = t.filled(bool(decided), shape, "i1")
    elif all(x.shape[d] == 1 for d in dims):
        out = t.reshape(x, shape)
    elif 0 in (x.shape[d] for d in dims):
        return t.spread(t.source(first), shape)
    else:
        out = nn.reduce(x, kind=kind, dims=tuple(dims))
        out = wrap(out, element) if kind in ("sum", "prod") else out
    if t.number(first) == neutral(kind, element):
        return out
    return t.spread(wrap(COMBINE[kind](out, t.source(first)), element), shape)


FIRST_OF_MAXIMA = {
    "select(or(GT(0, 2), NE(0, 0)), 0, 2); "
    "select(or(or(GT(0, 2), NE(0, 0)), and(EQ(0, 2), LT(1, 3))), 1, 3)": "max",
    "select(or(LT(0, 2), NE(0, 0)), 0, 2); "
    "select(or(or(LT(0, 2), NE(0, 0)), and(EQ(0, 2), LT(1, 3))), 1, 3)": "min",
    "select(GT(0, 2), 0, 2); select(or(GT(0, 2), and(EQ(0, 2), LT(1, 3))), 1, 3)": "max",
    "select(LT(0, 2), 0, 2); select(or(LT(0, 2), and(EQ(0, 2), LT(1, 3))), 1, 3)": "min",
}
"""The bodies of JAX's argmax and argmin: arguments 0 and 2 are values, 1 and 3 their indices."""


def _extreme_index(
    t: OpTranslation,
    body: HloBlock,
    dims: Sequence[int],
    x: Value,
    indices: Value,
    *firsts: Value,
) -> tuple[Value, Value] | None:
    """Return the maximum and its first index, of a value and the indices of a dimension; None for
    other reductions."""
    kind = FIRST_OF_MAXIMA.get(expression(body))
    source = t.source(indices).ssa.owner
    if kind is None or len(dims) != 1 or not isinstance(source, ops.IotaOp):
        return None
    element = t.op.results[0].type.element
    shape, dim = t.source(indices).shape, dims[0] - (len(x.shape) - len(t.source(indices).shape))
    if (
        dim < 0
        or source.dim.value.data != dim
        or any(n != 1 for d, n in enumerate(shape) if d != dim)
    ):
        return None
    if element in ("i1", "ui64") or t.number(firsts[0]) != neutral(kind, element):
        return None
    make = nn.argmax if kind == "max" else nn.argmin
    index = make(x, axis=dims[0])
    bounds = 0, max(0, x.shape[dims[0]] - 1)
    index = index.to(indices.dtype) if index.dtype != indices.dtype else index
    t.facts.bounds[index.ssa] = bounds
    return nn.reduce(x, kind=kind, dims=(dims[0],)), index


def _canonical(index: int) -> str:
    """The text by which JAX maps -0 to 0 and all NaN to one before a comparison of floats."""
    x = f"select(EQ({index}, 0.0), 0.0, {index})"
    return f"select(NE({index}, {index}), nan, {x})"


def sort_keys(text: str) -> list[tuple[int, bool]] | None:
    """Return the keys of a comparator's text, the first one first: which operand, and whether its
    order is descending; None for other comparators. Later keys count where earlier ones are equal:
    `or(LT(0, 1), and(EQ(0, 1), LT(2, 3)))`."""
    for key in range(MAX_KEYS):
        for form in (str, _canonical):
            pair = f"({form(2 * key)}, {form(2 * key + 1)})"
            for name, descending in (("LT", False), ("GT", True)):
                if text == name + pair:
                    return [(key, descending)]
                head = f"or({name}{pair}, and(EQ{pair}, "
                if text.startswith(head) and text.endswith("))"):
                    rest = sort_keys(text[len(head) : -2])
                    return None if rest is None else [(key, descending), *rest]
    return None


MAX_KEYS = 16
"""Bounds the operands that a sort compares."""


def _sort(t: OpTranslation, *xs: Value) -> list[Value]:
    """A stable sort by the last key, then by the one before it, and so on; all operands are taken
    in the order of the keys."""
    text = expression(inlined(t.op.regions[0], t.callee))
    keys = sort_keys(text)
    if keys is None:
        t.refuse(f"a sort by {text[:160]}; the less and the greater of operands in turn are known")
    axis = t["dimension"] % len(xs[0].shape)
    order: Value | None = None
    values: Value | None = None
    for key, descending in reversed(keys):
        element = t.type(key).element
        x = xs[key].to("i32") if element == "i1" else in_order_of(xs[key], element)
        x = x if order is None else nn.take_along_axis(x, order, axis=axis)
        values, by_key = nn.sort(x, axis=axis, descending=descending)
        values = nn.compare(values, 0, how="ne") if element == "i1" else values
        values = in_order_of(values, element)
        order = by_key if order is None else nn.take_along_axis(order, by_key, axis=axis)
    out = []
    for i, x in enumerate(xs):
        if i == keys[0][0] and values is not None:
            out.append(values)
        elif order is not None and _is_position(t, x, axis):
            out.append(order.to(x.dtype) if x.dtype != "i64" else order)
        else:
            out.append(nn.take_along_axis(x, order, axis=axis))
    return out


def _is_position(t: OpTranslation, x: Value, axis: int) -> bool:
    """Whether a value is the position of its elements along a dimension."""
    source = t.source(x)
    op, shape = source.ssa.owner, (x.shape[axis], *[1] * (len(x.shape) - axis - 1))
    return isinstance(op, ops.IotaOp) and source.shape == shape and op.dim.value.data == 0


def _top_k(t: OpTranslation, x: Value) -> tuple[Value, Value]:
    values, indices = nn.topk(x, k=t["k"], axis=len(x.shape) - 1)
    t.facts.bounds[indices.ssa] = 0, x.shape[-1] - 1
    indices = indices.to("i32")
    t.facts.bounds[indices.ssa] = 0, x.shape[-1] - 1
    return values, indices


TABLE: dict[str, HloEntry] = {
    "stablehlo.reduce": _reduce,
    "stablehlo.sort": _sort,
    "chlo.top_k": _top_k,
}
