"""Reductions, by the text of their bodies, and sorts."""

from collections.abc import Mapping
from math import inf

from shardir.build import Value, nn
from shardir.dialects import nn as ops
from shardir.frontends.stablehlo.form import HloBlock, expression
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import WIDTHS, is_float, wrap

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


def kind_of(t: OpTranslation, body: HloBlock) -> str:
    """Return the kind of reduction of a body of two scalars."""
    text = expression(body)
    kind = KINDS.get(text)
    if kind is None:
        t.refuse(f"a reduction by {text[:80]}; sum, product, maximum, minimum, and, or are known")
    element = body.arguments[0].type.element
    if element == "i1":
        return OF_BOOLS.get(kind, kind)
    if kind in ("all", "any"):
        t.refuse(f"a bitwise {kind} of {element}")
    return kind


def neutral(kind: str, element: str) -> float:
    """Return the number that a reduction of floats or integers ignores."""
    if kind in ("max", "min"):
        if is_float(element):
            return -inf if kind == "max" else inf
        unsigned = element.startswith("u")
        bits = WIDTHS[element]
        if kind == "max":
            return 0 if unsigned else -(2 ** (bits - 1))
        return 2**bits - 1 if unsigned else 2 ** (bits - 1) - 1
    return {"sum": 0, "prod": 1, "all": True, "any": False}[kind]


def _reduce(t: OpTranslation, *operands: Value) -> Value | tuple[Value, ...]:
    count = len(operands) // 2
    xs, firsts = operands[:count], operands[count:]
    body, dims = t.op.regions[0], t["dimensions"]
    if count == 2:
        return _extreme_index(t, body, dims, *operands)
    if count != 1:
        return _several(t, body, dims, xs, firsts)
    return _reduced(t, kind_of(t, body), xs[0], firsts[0], dims)


def _several(
    t: OpTranslation, body: HloBlock, dims: tuple[int, ...], xs: tuple[Value, ...],
    firsts: tuple[Value, ...],
) -> tuple[Value, ...]:  # fmt: skip
    t.refuse(f"a reduction of {len(xs)} values at once, by {expression(body)[:80]}")


def _reduced(t: OpTranslation, kind: str, x: Value, first: Value, dims: tuple[int, ...]) -> Value:
    decided = t.number(x)
    if kind in ("all", "any") and decided is not None:
        out = t.filled(bool(decided), t.shape, "i1")
    elif all(x.shape[d] == 1 for d in dims):
        out = t.reshape(x, t.shape)
    else:
        out = nn.reduce(x, kind=kind, dims=tuple(dims))
        out = wrap(out, t.element) if kind in ("sum", "prod") else out
    if t.number(first) == neutral(kind, t.element):
        return out
    return t.spread(COMBINE[kind](out, t.source(first)))


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
    dims: tuple[int, ...],
    x: Value,
    indices: Value,
    *firsts: Value,
) -> tuple[Value, Value]:
    """The maximum and its first index, of a value and the indices of a dimension."""
    text = expression(body)
    kind = FIRST_OF_MAXIMA.get(text)
    source = t.source(indices).ssa.owner
    if kind is None or len(dims) != 1 or not isinstance(source, ops.IotaOp):
        t.refuse(f"a reduction of two values at once, by {text[:120]}")
    element = t.op.results[0].type.element
    shape, dim = t.source(indices).shape, dims[0] - (len(x.shape) - len(t.source(indices).shape))
    if (
        dim < 0
        or source.dim.value.data != dim
        or any(n != 1 for d, n in enumerate(shape) if d != dim)
    ):
        t.refuse("a reduction of values with indices of another dimension")
    if t.number(firsts[0]) != neutral(kind, element):
        t.refuse("an argmax that begins with another number than the lowest")
    make = nn.argmax if kind == "max" else nn.argmin
    index = make(x, axis=dims[0])
    bounds = 0, max(0, x.shape[dims[0]] - 1)
    index = index.to(indices.dtype) if index.dtype != indices.dtype else index
    t.facts.bounds[index.ssa] = bounds
    return nn.reduce(x, kind=kind, dims=(dims[0],)), index


SORTED = {"LT(0, 1)": False, "GT(0, 1)": True}
"""Whether a comparator of the first operand sorts in descending order."""


def _canonical(index: int) -> str:
    """The text by which JAX maps -0 to 0 and all NaN to one before a comparison of floats."""
    x = f"select(EQ({index}, 0.0), 0.0, {index})"
    return f"select(NE({index}, {index}), nan, {x})"


for _name, _descending in (("LT", False), ("GT", True)):
    SORTED[f"{_name}({_canonical(0)}, {_canonical(1)})"] = _descending


def _sort(t: OpTranslation, *xs: Value) -> tuple[Value, ...]:
    """A sort by the first operand; the others are taken in its order."""
    body = t.op.regions[0]
    text = expression(body)
    if text not in SORTED:
        t.refuse(f"a sort by {text[:160]}; the less or the greater of one operand is known")
    axis = t["dimension"] % len(xs[0].shape)
    values, order = nn.sort(xs[0], axis=axis, descending=SORTED[text])
    rest = []
    for x in xs[1:]:
        source = t.source(x).ssa.owner
        is_index = isinstance(source, ops.IotaOp) and t.source(x).shape == (
            x.shape[axis], *[1] * (len(x.shape) - axis - 1)
        ) and source.dim.value.data == 0  # fmt: skip
        if is_index:
            rest.append(order.to(x.dtype) if x.dtype != "i64" else order)
        else:
            rest.append(nn.take_along_axis(x, order, axis=axis))
    return (values, *rest)


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
