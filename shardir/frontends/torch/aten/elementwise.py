"""Elementwise arithmetic, functions, comparisons and activations."""

from math import log, pi
from typing import Any

import torch

from shardir.build import Value, nn
from shardir.build.values import Real
from shardir.frontends.torch.aten.creation import random
from shardir.frontends.torch.dtypes import DTYPES
from shardir.frontends.torch.translation import AtenEntry, ByType, Translation


def unary(op: AtenEntry) -> AtenEntry:
    """An op of one operand, in the result's dtype."""
    return lambda t, x: op(t.value(x))


def binary(op: AtenEntry, of_bools: AtenEntry | None = None) -> AtenEntry:
    """An op of two operands, in the result's dtype; `of_bools` replaces it for bools."""
    return lambda t, x, y: t.binary(of_bools if of_bools and t.dtype == "i1" else op, x, y)


def compare(how: str) -> AtenEntry:
    """A comparison of two operands in their promoted dtype."""

    def entry(t: Translation, x: Value, y: Value) -> Value:
        x, y = t.promoted(x, y)
        if x.dtype == "i1":
            x, y = x.to("i32"), y.to("i32")
        return nn.compare(x, y, how=how)

    return entry


def logical(op: AtenEntry) -> AtenEntry:
    """A logical op of two operands, whose elements hold if they are not 0."""
    return lambda t, x, y: op(truth(t, x), truth(t, y))


def truth(t: Translation, x: Value) -> Value:
    """Return i1 elements: whether x is not 0."""
    return x if x.dtype == "i1" else nn.compare(x, t.value(0, x.dtype), how="ne")


def _scaled(t: Translation, y: Value, alpha: float) -> Value:
    return t.value(y) if alpha == 1 else t.value(y) * alpha


def _pow(t: Translation, x: Value | Real, exponent: Value | Real) -> Value:
    y, integral = exponent, t.dtype.startswith("i")
    if isinstance(y, Value) or (integral and not 0 <= y <= MAX_PRODUCTS):
        if integral:  # f64 has all integers up to 2^53
            return nn.pow(t.value(x, "f64"), t.value(y, "f64")).to(t.dtype)
        return t.binary(nn.pow, x, y)
    x = t.value(x)
    if integral:
        return _repeated_product(t, x, int(y))
    return POWERS[y](x) if y in POWERS else t.binary(nn.pow, x, y)


def _repeated_product(t: Translation, x: Value, n: int) -> Value:
    """x to the power of n, by repeated squaring."""
    product: Value | None = None
    while n:
        product = (x if product is None else product * x) if n % 2 else product
        n //= 2
        x = x * x if n else x
    return t.full(1) if product is None else product


POWERS = {
    1: lambda x: x, 2: nn.square, 3: lambda x: x * nn.square(x), 0.5: nn.sqrt, -0.5: nn.rsqrt,
    -1: nn.reciprocal,
}  # fmt: skip
"""Exponents with ops of their own, whose gradients are simpler."""

MAX_PRODUCTS = 64
"""The maximum exponent of integers that is computed by products."""


def _div(
    t: Translation, x: Value | Real, y: Value | Real, rounding_mode: str | None = None
) -> Value:
    if rounding_mode is None:
        return t.binary(nn.div, x, y)
    if t.dtype.startswith("i"):
        quotient = t.value(x, "f64") / t.value(y, "f64")
        return (nn.floor(quotient) if rounding_mode == "floor" else nn.trunc(quotient)).to(t.dtype)
    x, y = t.value(x), t.value(y)
    if rounding_mode == "trunc":
        return nn.trunc(x / y)
    # the exact quotient, without rounding: 1 // 0.1 is 9, although 1 / 0.1 is 10
    exact = nn.round((x - nn.remainder(x, y)) / y)
    return nn.stop_gradient(nn.select(*_broadcast(t, y.compare("eq", 0.0), x / y, exact)))


def _fmod(t: Translation, x: Value | Real, y: Value | Real) -> Value:
    """The remainder with the sign of x."""
    x, y = t.value(x), t.value(y)
    r = nn.remainder(x, y)  # with the sign of y
    zero = t.value(0)
    signs_differ = nn.compare(r, zero, how="ne") & (nn.compare(r, zero, how="lt")
                                              ^ nn.compare(x, zero, how="lt"))  # fmt: skip
    return nn.select(*_broadcast(t, signs_differ, r - y, r))


def _broadcast(t: Translation, *xs: Value) -> tuple[Value, ...]:
    return tuple(x.broadcast_to(*t.shape) for x in xs)


def _clamp(t: Translation, x: Value, min: Any = None, max: Any = None) -> Value:
    x = t.value(x)
    if isinstance(min, Value) or isinstance(max, Value):
        return _clamp_by_tensors(t, x, min, max)
    if not x.dtype.startswith(("f", "bf")):
        x = x if min is None else nn.max(x, t.value(min))
        return x if max is None else nn.min(x, t.value(max))
    return nn.clamp(x, min=_real(min), max=_real(max))


def _clamp_by_tensors(t: Translation, x: Value, low: Value | None, high: Value | None) -> Value:
    """x if it is within the bounds, else the bound; the cotangent goes to the selected one. As in
    torch, a lower bound that is not below the upper bound gets none."""
    if low is not None and high is not None:
        shape = torch.broadcast_shapes(low.shape, high.shape)
        low, high = (t.value(v).broadcast_to(*shape) for v in (low, high))
        if low.dtype.startswith(("f", "bf")):
            low = nn.select(low < high, low, nn.stop_gradient(low))
    for how, bound in (("lt", low), ("gt", high)):
        if bound is not None:
            bound = t.value(bound)
            beyond = nn.compare(x, bound, how=how)
            if bound.dtype.startswith(("f", "bf")):
                beyond = beyond | nn.isnan(bound)
            shape = torch.broadcast_shapes(x.shape, bound.shape)
            x = nn.select(*(v.broadcast_to(*shape) for v in (beyond, bound, x)))
    return x


def _real(x: float | None) -> float | None:
    return None if x is None else float(x)


def _gelu(t: Translation, x: Value, approximate: str = "none") -> Value:
    return nn.gelu(x, exact=approximate == "none")


def _softplus(t: Translation, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    if threshold == 20:
        return nn.softplus(x) if beta == 1 else nn.softplus(x * beta) * (1 / beta)
    z = x * beta
    below = z <= float(threshold)
    soft = nn.log1p(nn.exp(nn.select(below, z, t.full(0.0)))) * (1 / beta)
    return nn.select(below, soft, x)


def _elu(t: Translation, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1):
    if input_scale != 1:
        above = x > 0.0
        below = nn.expm1(nn.select(above, t.full(0.0), x) * input_scale) * (alpha * scale)
        return nn.select(above, x if scale == 1 else x * scale, below)
    y = nn.elu(x, alpha=float(alpha))
    return y if scale == 1 else y * scale


def _logit(t: Translation, x: Value, eps: float | None = None) -> Value:
    x = t.value(x)
    x = x if eps is None else nn.clamp(x, min=eps, max=1 - eps)
    return nn.log(x) - nn.log(1.0 - x)  # as in torch, the gradient at 0 and 1 is infinite


def log_sigmoid(t: Translation, x: Value) -> Value:
    return nn.min(x, 0.0) - nn.log1p(nn.exp(-nn.abs(x)))


def _sinc(t: Translation, x: Value) -> Value:
    x = t.value(x)
    zero, one = x.compare("eq", 0.0), t.full(1.0)
    nonzero = nn.select(zero, one, x) * pi
    return nn.select(zero, one, nn.sin(nonzero) / nonzero)


def _rrelu(
    t: Translation, x: Value, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
) -> Value:
    if not training:
        return nn.leaky_relu(x, slope=(lower + upper) / 2)
    slopes = random(t, "uniform", t.shape, t.dtype) * (upper - lower) + float(lower)
    return nn.select(x > 0.0, x, x * slopes)


def _nan_to_num(
    t: Translation, x: Value, nan: float | None = None, posinf: float | None = None,
    neginf: float | None = None,
) -> Value:  # fmt: skip
    if not x.dtype.startswith(("f", "bf")):
        return x
    largest = torch.finfo(next(d for d, name in DTYPES.items() if name == x.dtype)).max
    return nn.nan_to_num(
        x, nan=float(nan or 0.0), posinf=float(largest if posinf is None else posinf),
        neginf=float(-largest if neginf is None else neginf),
    )  # fmt: skip


def _class(op: AtenEntry, of_integers: bool) -> AtenEntry:
    """`isnan` and similar tests; `of_integers` is their result for integers."""
    return lambda t, x: op(x) if x.dtype.startswith(("f", "bf")) else t.full(of_integers)


def rounded(op: AtenEntry) -> AtenEntry:
    """A rounding, which leaves integers unchanged."""
    return lambda t, x: op(x) if x.dtype.startswith(("f", "bf")) else x


SELU = 1.6732632423543772, 1.0507009873554805
"""alpha and scale of selu (Klambauer et al., 2017)."""


def _bitwise(op: AtenEntry) -> AtenEntry:
    return lambda t, x, y: op(t.value(x), t.value(y))


_convert = ByType(lambda t, x: x.to(t.dtype))


def _where(t: Translation, condition: Value, x: Value, y: Value) -> Value:
    return nn.select(
        truth(t, condition).broadcast_to(*t.shape),
        t.value(x).broadcast_to(*t.shape),
        t.value(y).broadcast_to(*t.shape),
    )


TABLE: dict[str, AtenEntry] = {
    # arithmetic
    "add": lambda t, x, y, alpha=1: binary(nn.add, nn.or_)(t, x, _scaled(t, y, alpha)),
    "sub": lambda t, x, y, alpha=1: t.binary(nn.sub, x, _scaled(t, y, alpha)),
    "rsub": lambda t, x, y, alpha=1: t.binary(nn.sub, y, _scaled(t, x, alpha)),
    "mul": binary(nn.mul, nn.and_),
    "div": _div,
    "true_divide": _div,
    "divide": _div,
    "floor_divide": lambda t, x, y: _div(t, x, y, "floor"),
    "remainder": binary(nn.remainder),
    "fmod": _fmod,
    "pow": _pow,
    "float_power": _pow,
    "square": unary(nn.square),
    "lerp": lambda t, x, y, w: nn.lerp(t.value(x), t.value(y), t.value(w)),
    "addcmul": lambda t, x, y, z, value=1: t.value(x) + _scaled(t, t.value(y) * t.value(z), value),
    "addcdiv": lambda t, x, y, z, value=1: t.value(x) + _scaled(t, t.value(y) / t.value(z), value),
    "maximum": binary(nn.max, nn.or_),
    "minimum": binary(nn.min, nn.and_),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda t, x, min: _clamp(t, x, min=min),
    "clamp_max": lambda t, x, max: _clamp(t, x, max=max),
    # functions
    **{
        name: unary(getattr(nn, name))
        for name in (
            "neg",
            "abs",
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "exp2",
            "expm1",
            "log1p",
            "log2",
            "sin",
            "cos",
            "tan",
            "atan",
            "erf",
            "tanh",
            "sigmoid",
            "silu",
        )
    },
    **{name: rounded(getattr(nn, name)) for name in ("floor", "ceil", "round", "trunc")},
    "sign": lambda t, x: x if x.dtype == "i1" else nn.sign(x),
    "relu": lambda t, x: nn.relu(x) if x.dtype.startswith(("f", "bf")) else nn.max(x, 0),
    "log10": lambda t, x: nn.log(t.value(x)) * (1 / log(10)),
    "erfc": lambda t, x: nn.erfc(t.value(x)),
    "sinh": lambda t, x: (nn.exp(t.value(x)) - nn.exp(-t.value(x))) * 0.5,
    "cosh": lambda t, x: (nn.exp(t.value(x)) + nn.exp(-t.value(x))) * 0.5,
    "negative": unary(nn.neg),
    "absolute": unary(nn.abs),
    # activations
    "gelu": _gelu,
    "softplus": _softplus,
    "leaky_relu": lambda t, x, negative_slope=0.01: nn.leaky_relu(x, slope=float(negative_slope)),
    "elu": _elu,
    "celu": lambda t, x, alpha=1.0: _elu(t, x, alpha, 1, 1 / alpha),
    "selu": lambda t, x: nn.elu(x, alpha=SELU[0]) * SELU[1],
    "hardtanh": lambda t, x, min_val=-1.0, max_val=1.0: nn.hardtanh(
        x, min=float(min_val), max=float(max_val)
    ),
    "relu6": lambda t, x: nn.hardtanh(x, min=0.0, max=6.0),
    "hardsigmoid": lambda t, x: nn.hardtanh(x + 3.0, min=0.0, max=6.0) * (1 / 6),
    "hardswish": lambda t, x: x * (nn.hardtanh(x + 3.0, min=0.0, max=6.0) * (1 / 6)),
    "mish": lambda t, x: x * nn.tanh(nn.softplus(x)),
    "logit": _logit,
    "log_sigmoid": log_sigmoid,
    "sinc": _sinc,
    "rrelu": _rrelu,
    "softsign": lambda t, x: x / (nn.abs(x) + 1.0),
    "prelu": lambda t, x, w: nn.select(x > 0.0, x, x * _channels(w, len(x.shape))),
    "glu": lambda t, x, dim=-1: _glu(x, dim % len(x.shape)),
    # comparisons and logic
    **{name: compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "logical_and": logical(nn.and_),
    "logical_or": logical(nn.or_),
    "logical_xor": logical(nn.xor),
    "logical_not": lambda t, x: nn.not_(truth(t, x)),
    "bitwise_and": _bitwise(nn.and_),
    "bitwise_or": _bitwise(nn.or_),
    "bitwise_xor": _bitwise(nn.xor),
    "bitwise_not": lambda t, x: nn.not_(x),
    "__and__": _bitwise(nn.and_),
    "__or__": _bitwise(nn.or_),
    "isnan": _class(nn.isnan, False),
    "isinf": _class(nn.isinf, False),
    "isfinite": _class(nn.isfinite, True),
    "where.self": _where,
    "where.ScalarOther": _where,
    "where.ScalarSelf": _where,
    "where.Scalar": _where,
    "masked_fill": lambda t, x, mask, value: _where(t, mask, value, x),
    "nan_to_num": _nan_to_num,
    # dtypes
    "to": _convert,
    "_to_copy": _convert,
    "type_as": _convert,
    **{name: _convert for name in ("float", "double", "half", "bfloat16", "long", "int", "bool")},
}


def _channels(w: Value, rank: int) -> Value:
    """Reshape a weight for each channel (dimension 1) to broadcast with a tensor of a rank; one
    weight for all channels is unchanged."""
    return w if w.shape in ((), (1,)) else w.reshape(-1, *(1,) * (rank - 2))


def _glu(x: Value, dim: int) -> Value:
    half = x.shape[dim] // 2
    a, b = nn.split(x, sizes=(half, half), axis=dim)
    return a * nn.sigmoid(b)
