"""What each function of numpy is in StableHLO."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardir.backend.stablehlo.literals import FLOATS, NUMPY, ints_text
from shardir.backend.stablehlo.traced import (
    FUNCTIONS,
    UFUNCS,
    TracedArray,
    Ufunc,
    Untraceable,
    numpy,
)

# ---- elementwise ----


def named(name: str) -> Ufunc:
    return lambda x, *others: x.same(name, *others)


def _neutral(name: str, neutral: float) -> Ufunc:
    """A binary op that a number leaves unchanged."""

    def write(x: TracedArray, y: TracedArray) -> TracedArray:
        if y.number == neutral and not math.copysign(1, y.number) < 0:
            return x
        if x.number == neutral and name != "subtract":
            return y
        return x.same(name, y)

    return write


def _compare(how: str) -> Ufunc:
    return lambda x, y: x.compare(how, y)


def _logical(of_numbers: str, of_bools: str) -> Ufunc:
    """An op of numbers, of which i1 has another."""
    return lambda x, y: x.same(of_bools if x.element == "i1" else of_numbers, y)


def _of_floats(write: Ufunc) -> Ufunc:
    """A function of floats, in f64 of integers, as in numpy."""

    def converted(*xs: TracedArray) -> TracedArray:
        return write(*(x if x.element in FLOATS else x.to("f64") for x in xs))

    return converted


def _number(x: TracedArray, value: float) -> TracedArray:
    return x.constant(value, x.element, x.shape)


def _remainder(x: TracedArray, y: TracedArray) -> TracedArray:
    """The remainder with the sign of y; StableHLO's has that of x."""
    rest, zero = x.same("remainder", y), _number(x, 0)
    differs = rest.compare("LT", zero).same("xor", y.compare("LT", zero))
    is_other = rest.compare("NE", zero).same("and", differs)
    return is_other.select(rest.same("add", y), rest)


def _logaddexp(x: TracedArray, y: TracedArray) -> TracedArray:
    difference = x.same("subtract", y)
    rest = difference.same("abs").same("negate").same("exponential").same("log_plus_one")
    total = x.same("maximum", y).same("add", rest)
    # equal infinities have no difference
    return _isnan(difference).select(x.same("add", y), total)


def _isnan(x: TracedArray) -> TracedArray:
    return x.compare("NE", x)


def _isinf(x: TracedArray) -> TracedArray:
    return x.same("abs").compare("EQ", _number(x, math.inf))


def _trunc(x: TracedArray) -> TracedArray:
    return x.compare("LT", _number(x, 0)).select(x.same("ceil"), x.same("floor"))


def _reciprocal(x: TracedArray) -> TracedArray:
    return _number(x, 1).same("divide", x)


def _power(x: TracedArray, y: TracedArray) -> TracedArray:
    return x.same("multiply", x) if y.number == 2 else x.same("power", y)


FLOAT_FUNCTIONS: dict[Any, Ufunc] = {
    np.divide: named("divide"),
    np.exp: named("exponential"),
    np.expm1: named("exponential_minus_one"),
    np.exp2: lambda x: _number(x, 2).same("power", x),
    np.log: named("log"),
    np.log1p: named("log_plus_one"),
    np.log2: lambda x: x.same("log").same("multiply", _number(x, 1 / math.log(2))),
    np.sqrt: named("sqrt"),
    np.reciprocal: _reciprocal,
    np.sin: named("sine"),
    np.cos: named("cosine"),
    np.tan: named("tan"),
    np.arctan: lambda x: x.same("atan2", _number(x, 1)),
    np.tanh: named("tanh"),
    np.floor: named("floor"),
    np.ceil: named("ceil"),
    np.rint: named("round_nearest_even"),
    np.trunc: _trunc,
    np.logaddexp: _logaddexp,
    np.isnan: _isnan,
    np.isinf: _isinf,
    np.isfinite: lambda x: x.op("is_finite", element="i1"),
}

UFUNCS |= {
    np.add: _neutral("add", 0),
    np.subtract: _neutral("subtract", 0),
    np.multiply: _neutral("multiply", 1),
    np.maximum: _logical("maximum", "or"),
    np.minimum: _logical("minimum", "and"),
    np.remainder: _remainder,
    np.negative: named("negate"),
    np.absolute: named("abs"),
    np.square: lambda x: x.same("multiply", x),
    np.power: _power,
    np.equal: _compare("EQ"),
    np.not_equal: _compare("NE"),
    np.less: _compare("LT"),
    np.less_equal: _compare("LE"),
    np.greater: _compare("GT"),
    np.greater_equal: _compare("GE"),
    np.bitwise_and: named("and"),
    np.bitwise_or: named("or"),
    np.bitwise_xor: named("xor"),
    np.invert: named("not"),
    **{function: _of_floats(write) for function, write in FLOAT_FUNCTIONS.items()},
}


def _where(t: TracedArray, condition: Any, x: Any, y: Any) -> TracedArray:
    x, y = t.promoted(x, y)
    condition = t.lift(condition, "i1")
    shape = np.broadcast_shapes(condition.shape, x.shape)
    return condition.spread(shape).select(x.spread(shape), y.spread(shape))


def _clip(t: TracedArray, x: TracedArray, low: Any = None, high: Any = None) -> TracedArray:
    if low is not None and high is not None:
        ends = [x.constant(n, x.element, x.shape) for n in (low, high)]
        return ends[0].same("clamp", x, ends[1])
    return numpy.maximum(x, low) if low is not None else numpy.minimum(x, high)


def _nan_to_num(
    t: TracedArray, x: TracedArray, nan: float, posinf: float, neginf: float, copy: bool = True
) -> TracedArray:
    infinite = _isinf(x)
    above = x.compare("GT", _number(x, 0))
    out = infinite.select(above.select(_number(x, posinf), _number(x, neginf)), x)
    return _isnan(x).select(_number(x, nan), out)


# ---- reductions ----


def _dims(x: TracedArray, axis: Any) -> list[int]:
    if axis is None:
        return [*range(x.ndim)]
    return [d % x.ndim for d in (axis if isinstance(axis, Sequence | range) else [axis])]


def _sum(
    t: TracedArray, x: TracedArray, axis: Any = None, dtype: Any = None, keepdims: bool = False
) -> TracedArray:
    x = x if dtype is None else x.astype(dtype)
    return x.reduced("add", 0, _dims(x, axis), keepdims)


def _mean(t: TracedArray, x: TracedArray, axis: Any = None, keepdims: bool = False) -> TracedArray:
    dims = _dims(x, axis)
    return _sum(t, x, dims, None, keepdims) / int(np.prod([x.shape[d] for d in dims]))


def lowest(element: str, sign: int) -> Any:
    """The number that a maximum (`sign` -1) or minimum (1) ignores."""
    if element in FLOATS:
        return sign * math.inf
    if element == "i1":
        return sign > 0
    info = np.iinfo(NUMPY[element])
    return info.max if sign > 0 else info.min


def _extreme(kind: str, sign: int) -> Callable[..., TracedArray]:
    def write(
        t: TracedArray, x: TracedArray, axis: Any = None, keepdims: bool = False,
        initial: Any = None,
    ) -> TracedArray:  # fmt: skip
        return x.reduced(kind, lowest(x.element, sign), _dims(x, axis), keepdims)

    return write


def _index_of(kind: str, sign: int) -> Callable[..., TracedArray]:
    """The first index of an extreme; NaN counts as one."""

    def write(t: TracedArray, x: TracedArray, axis: int, keepdims: bool = False) -> TracedArray:
        (dim,) = _dims(x, axis)
        extreme = x.reduced(kind, lowest(x.element, sign), [dim], True).spread(x.shape)
        is_extreme = x.compare("EQ", extreme)
        if x.element in FLOATS:
            is_extreme = is_extreme.same("or", _isnan(x))
        ids = x.iota(x.shape, dim, "i64")
        first = is_extreme.select(ids, ids.constant(x.shape[dim], "i64", x.shape))
        return first.reduced("minimum", lowest("i64", 1), [dim], keepdims)

    return write


# ---- shapes ----


def _stack(t: TracedArray, xs: Sequence[Any], axis: int = 0) -> TracedArray:
    values = [t.lift(x) for x in xs]
    at = axis % (values[0].ndim + 1)
    shape = values[0].shape
    columns = [v.reshape((*shape[:at], 1, *shape[at:])) for v in values]
    return columns[0].concatenated(columns[1:], at)


def _concatenate(t: TracedArray, xs: Sequence[Any], axis: int = 0) -> TracedArray:
    values = [t.lift(x) for x in xs]
    return values[0].concatenated(values[1:], axis % values[0].ndim)


def _moveaxis(t: TracedArray, x: TracedArray, source: Any, target: Any) -> TracedArray:
    sources, targets = (
        [d % x.ndim for d in ([a] if isinstance(a, int) else a)] for a in (source, target)
    )
    order = [d for d in range(x.ndim) if d not in sources]
    for at, d in sorted(zip(targets, sources, strict=True)):
        order.insert(at, d)
    return x.transpose(order)


def _squeeze(t: TracedArray, x: TracedArray, axis: Any = None) -> TracedArray:
    dims = _dims(x, axis)
    return x.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def _repeat(t: TracedArray, x: TracedArray, repeats: int, axis: int) -> TracedArray:
    at = axis % x.ndim
    column = x.reshape((*x.shape[: at + 1], 1, *x.shape[at + 1 :]))
    wide = column.spread((*x.shape[: at + 1], repeats, *x.shape[at + 1 :]))
    return wide.reshape((*x.shape[:at], x.shape[at] * repeats, *x.shape[at + 1 :]))


def _full(t: TracedArray, x: TracedArray, value: Any) -> TracedArray:
    return x.constant(value, x.element, x.shape)


# ---- products ----


def einsum(x: TracedArray, y: TracedArray, equation: str) -> TracedArray:
    """A contraction of two values, whose letters are each in two terms."""
    terms, result = equation.split("->")
    left, right = terms.split(",")
    batch = [c for c in left if c in right and c in result]
    summed = [c for c in left if c in right and c not in result]
    free = [[c for c in side if c not in (*batch, *summed)] for side in (left, right)]
    letters = [*batch, *free[0], *free[1]]
    sizes = dict(zip(left + right, (*x.shape, *y.shape), strict=True))
    text = ""
    for name, of in (("batching", batch), ("contracting", summed)):
        if of or name == "contracting":
            sides = (ints_text([side.index(c) for c in of]) for side in (left, right))
            text += f", {name}_dims = {' x '.join(sides)}"
    out = x.op("dot_general", y, shape=[sizes[c] for c in letters], after=text)
    return out.transpose([letters.index(c) for c in result])


def _einsum(t: TracedArray, equation: str, x: Any, y: Any, optimize: bool = False) -> TracedArray:
    x, y = t.lift(x), t.lift(y)
    if "..." in equation:
        raise Untraceable("an equation with an ellipsis")
    return einsum(x, y, equation)


def _matmul(x: TracedArray, y: TracedArray) -> TracedArray:
    lead = "abcdefgh"[: max(x.ndim, y.ndim) - 2]
    if x.shape[:-2] != y.shape[:-2]:
        shape = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        x, y = (v.spread((*shape, *v.shape[-2:])) for v in (x, y))
    return einsum(x, y, f"{lead}ik,{lead}kj->{lead}ij")


UFUNCS[np.matmul] = _matmul

FUNCTIONS |= {
    np.where: _where,
    np.isneginf: lambda t, x: x.compare("EQ", _number(x, -math.inf)),
    np.isposinf: lambda t, x: x.compare("EQ", _number(x, math.inf)),
    np.clip: _clip,
    np.nan_to_num: _nan_to_num,
    np.sum: _sum,
    np.mean: _mean,
    np.max: _extreme("maximum", -1),
    np.min: _extreme("minimum", 1),
    np.argmax: _index_of("maximum", -1),
    np.argmin: _index_of("minimum", 1),
    np.reshape: lambda t, x, shape: x.reshape(shape),
    np.transpose: lambda t, x, axes=None: x.transpose(axes),
    np.stack: _stack,
    np.concatenate: _concatenate,
    np.moveaxis: _moveaxis,
    np.swapaxes: lambda t, x, a, b: x.swapaxes(a, b),
    np.squeeze: _squeeze,
    np.repeat: _repeat,
    np.broadcast_to: lambda t, x, shape: x.spread(shape),
    np.zeros_like: lambda t, x: _full(t, x, 0),
    np.ones_like: lambda t, x: _full(t, x, 1),
    np.full_like: _full,
    np.einsum: _einsum,
}
