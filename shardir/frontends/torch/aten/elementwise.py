"""Arithmetic, functions and comparisons of elements, and activations."""

from math import log
from typing import Any

from shardir.build import Value, nn
from shardir.frontends.torch.translation import AtenEntry, Translation


def unary(op: AtenEntry) -> AtenEntry:
    """An op of one operand, in the result's dtype."""
    return lambda t, x: op(t.value(x))


def binary(op: AtenEntry) -> AtenEntry:
    """An op of two operands, in the result's dtype."""
    return lambda t, x, y: t.binary(op, x, y)


def compare(how: str) -> AtenEntry:
    """A comparison of two operands, in the dtype to which they are promoted."""

    def entry(t: Translation, x: Value, y: Value) -> Value:
        x, y = t.promoted(x, y)
        if x.dtype == "i1":
            x, y = x.to("i32"), y.to("i32")
        return nn.compare(x, y, how=how)

    return entry


def logical(op: AtenEntry) -> AtenEntry:
    """A logical op: its operands are whether elements are not 0."""
    return lambda t, *xs: op(*(truth(t, x) for x in xs))


def truth(t: Translation, x: Value) -> Value:
    """Return i1 elements: those that are not 0."""
    return x if x.dtype == "i1" else nn.compare(x, t.value(0, x.dtype), how="ne")


def _scaled(t: Translation, y: Value, alpha: float) -> Value:
    return t.value(y) if alpha == 1 else t.value(y) * alpha


def _pow(t: Translation, x: Value, y: Value | float) -> Value:
    x = t.value(x)
    if isinstance(y, Value) or y not in POWERS:
        return t.binary(nn.pow, x, y)
    return POWERS[y](x)


POWERS = {
    1: lambda x: x, 2: nn.square, 3: lambda x: x * nn.square(x), 0.5: nn.sqrt, -0.5: nn.rsqrt,
    -1: nn.reciprocal,
}  # fmt: skip
"""Exponents with an op of their own, whose gradient is simpler."""


def _div(t: Translation, x: Value, y: Value, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return t.binary(nn.div, x, y)
    rounded = {"floor": nn.floor, "trunc": nn.trunc}[rounding_mode]
    if t.dtype.startswith("f"):
        return rounded(t.binary(nn.div, x, y))
    return rounded(t.value(x, "f64") / t.value(y, "f64")).to(t.dtype)


def _clamp(t: Translation, x: Value, min: Any = None, max: Any = None) -> Value:
    x = t.value(x)
    if not x.dtype.startswith(("f", "bf")) or isinstance(min, Value) or isinstance(max, Value):
        x = x if min is None else t.binary(nn.max, x, min)
        return x if max is None else t.binary(nn.min, x, max)
    return nn.clamp(x, min=min, max=max)


def _gelu(t: Translation, x: Value, approximate: str = "none") -> Value:
    return nn.gelu(x, exact=approximate == "none")


def _softplus(t: Translation, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    if threshold != 20:
        return nn.select(x * beta > threshold, x, nn.log1p(nn.exp(x * beta)) * (1 / beta))
    return nn.softplus(x) if beta == 1 else nn.softplus(x * beta) * (1 / beta)


def _elu(t: Translation, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1):
    y = nn.elu(x if input_scale == 1 else x * input_scale, alpha=alpha)
    return y if scale == 1 else y * scale


SELU = 1.6732632423543772, 1.0507009873554805
"""alpha and scale of selu (Klambauer et al., 2017)."""


def _bitwise(op: AtenEntry) -> AtenEntry:
    return lambda t, *xs: op(*(t.value(x) for x in xs))


def _convert(t: Translation, x: Value, *_: Any, **__: Any) -> Value:
    return x.to(t.dtype)


def _where(t: Translation, condition: Value, x: Value, y: Value) -> Value:
    return nn.select(
        truth(t, condition).broadcast_to(*t.shape),
        t.value(x).broadcast_to(*t.shape),
        t.value(y).broadcast_to(*t.shape),
    )


TABLE: dict[str, AtenEntry] = {
    # arithmetic
    "add": lambda t, x, y, alpha=1: t.binary(nn.add, x, _scaled(t, y, alpha)),
    "sub": lambda t, x, y, alpha=1: t.binary(nn.sub, x, _scaled(t, y, alpha)),
    "rsub": lambda t, x, y, alpha=1: t.binary(nn.sub, y, _scaled(t, x, alpha)),
    "mul": binary(nn.mul),
    "div": _div,
    "true_divide": _div,
    "divide": _div,
    "floor_divide": lambda t, x, y: _div(t, x, y, "floor"),
    "remainder": binary(nn.remainder),
    "fmod": lambda t, x, y: t.value(x) - nn.trunc(t.value(x) / t.value(y)) * t.value(y),
    "pow": _pow,
    "float_power": _pow,
    "square": unary(nn.square),
    "lerp": lambda t, x, y, w: nn.lerp(x, y, t.value(w)),
    "addcmul": lambda t, x, y, z, value=1: x + y * z * value,
    "addcdiv": lambda t, x, y, z, value=1: x + y / z * value,
    "maximum": binary(nn.max),
    "minimum": binary(nn.min),
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
            "sign",
            "floor",
            "ceil",
            "round",
            "trunc",
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
            "relu",
            "silu",
        )
    },
    "log10": lambda t, x: nn.log(t.value(x)) * (1 / log(10)),
    "erfc": lambda t, x: 1.0 - nn.erf(t.value(x)),
    "sinh": lambda t, x: (nn.exp(t.value(x)) - nn.exp(-t.value(x))) * 0.5,
    "cosh": lambda t, x: (nn.exp(t.value(x)) + nn.exp(-t.value(x))) * 0.5,
    "negative": unary(nn.neg),
    "absolute": unary(nn.abs),
    # activations
    "gelu": _gelu,
    "softplus": _softplus,
    "leaky_relu": lambda t, x, slope=0.01: nn.leaky_relu(x, slope=slope),
    "elu": _elu,
    "celu": lambda t, x, alpha=1.0: nn.elu(x * (1 / alpha), alpha=1.0) * alpha,
    "selu": lambda t, x: nn.elu(x, alpha=SELU[0]) * SELU[1],
    "hardtanh": lambda t, x, min=-1.0, max=1.0: nn.hardtanh(x, min=min, max=max),
    "relu6": lambda t, x: nn.hardtanh(x, min=0.0, max=6.0),
    "hardsigmoid": lambda t, x: nn.hardtanh(x + 3.0, min=0.0, max=6.0) * (1 / 6),
    "hardswish": lambda t, x: x * (nn.hardtanh(x + 3.0, min=0.0, max=6.0) * (1 / 6)),
    "mish": lambda t, x: x * nn.tanh(nn.softplus(x)),
    "logit": lambda t, x: nn.log(x / (1.0 - x)),
    "log_sigmoid": lambda t, x: -nn.softplus(-x),
    "softsign": lambda t, x: x / (nn.abs(x) + 1.0),
    "prelu": lambda t, x, w: nn.select(x > 0.0, x, x * _channels(w, len(x.shape))),
    "glu": lambda t, x, dim=-1: _glu(x, dim % len(x.shape)),
    # comparisons and logic
    **{name: compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "logical_and": logical(nn.and_),
    "logical_or": logical(nn.or_),
    "logical_xor": logical(nn.xor),
    "logical_not": logical(nn.not_),
    "bitwise_and": _bitwise(nn.and_),
    "bitwise_or": _bitwise(nn.or_),
    "bitwise_xor": _bitwise(nn.xor),
    "bitwise_not": _bitwise(nn.not_),
    "__and__": _bitwise(nn.and_),
    "__or__": _bitwise(nn.or_),
    "isnan": lambda t, x: nn.isnan(x),
    "isinf": lambda t, x: nn.isinf(x),
    "isfinite": lambda t, x: nn.isfinite(x),
    "where.self": _where,
    "where.ScalarOther": _where,
    "where.ScalarSelf": _where,
    "where.Scalar": _where,
    "masked_fill": lambda t, x, mask, value: _where(t, mask, value, x),
    "nan_to_num": lambda t, x, nan=None, posinf=None, neginf=None: nn.nan_to_num(
        x, nan=nan, posinf=posinf, neginf=neginf
    ),
    # dtypes
    "to": _convert,
    "_to_copy": _convert,
    "type_as": _convert,
    **{name: _convert for name in ("float", "double", "half", "bfloat16", "long", "int", "bool")},
}


def _channels(w: Value, rank: int) -> Value:
    """A weight for each channel, dimension 1, of a tensor of a rank; or one for all."""
    return w if w.shape in ((), (1,)) else w.reshape(-1, *(1,) * (rank - 2))


def _glu(x: Value, dim: int) -> Value:
    half = x.shape[dim] // 2
    a, b = nn.split(x, sizes=(half, half), axis=dim)
    return a * nn.sigmoid(b)
