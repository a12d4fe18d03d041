"""Elementwise ops. Operands that broadcast are replaced by their sources, and a result of sources
alone is broadcast afterwards."""

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from shardir.build import Value, nn
from shardir.dialects import nn as ops
from shardir.frontends.stablehlo.folding import known
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import DTYPES, RANGES, WIDTHS, is_float, wrap

ONE_IN_BITS = 0x3F800000
"""The bits of 1.0 in f32: with 23 random bits below they are a number in [1, 2)."""


def elementwise(make: Callable[..., Value], wraps: bool = False) -> HloEntry:
    """Make the entry of a function of elements; `wraps` if integers may leave their range."""

    def entry(t: OpTranslation, *operands: Value) -> Value:
        out = make(*map(t.source, operands))
        return t.spread(wrap(out, t.element) if wraps else out)

    return entry


def _entry(make: Callable[..., Value]) -> HloEntry:
    """Make the entry of a function of the translation and of the sources of the operands."""
    return lambda t, *xs: t.spread(make(t, *map(t.source, xs)))


COMPARISONS = {"EQ": "eq", "NE": "ne", "LT": "lt", "LE": "le", "GT": "gt", "GE": "ge"}


def _compare(t: OpTranslation, x: Value, y: Value) -> Value:
    how = COMPARISONS[t["comparison_direction"]]
    if t["compare_type"] == "TOTALORDER":
        return _compare_in_total_order(t, how, x, y)
    if not is_float(t.type(0).element) and (decided := _decided(t, how, x, y)) is not None:
        return t.constant(decided, "i1")
    return nn.compare(x, y, how=how)


def _compare_in_total_order(t: OpTranslation, how: str, x: Value, y: Value) -> Value:
    """NaN counts as the maximum. Operands are as JAX makes them: without -0, and with one NaN."""
    if not all(_is_canonical(t, v) for v in (x, y)) or how in ("eq", "ne"):
        t.refuse("a total order of floats, in which -0 and 0 differ, and the bits of NaN")
    if how in ("gt", "le"):
        x, y = y, x
    is_less = nn.compare(x, y, how="lt")
    is_less = nn.or_(is_less, nn.and_(nn.not_(nn.isnan(x)), nn.isnan(y)))
    return is_less if how in ("lt", "gt") else nn.not_(is_less)


def _is_canonical(t: OpTranslation, x: Value) -> bool:
    """Whether a value is `select(x != x, nan, select(x == 0, 0, x))`, or a known number but -0."""
    numbers = known(x)
    if numbers is not None:
        return not (np.signbit(numbers) & (numbers == 0)).any()
    op = x.ssa.owner
    if not isinstance(op, ops.SelectOp) or not isinstance(op.rhs.owner, ops.SelectOp):
        return False
    nan, zero = (t.number(Value(x.function, v)) for v in (op.lhs, op.rhs.owner.lhs))
    return nan is not None and math.isnan(nan) and zero == 0


def _decided(t: OpTranslation, how: str, x: Value, y: Value) -> bool | None:
    """Return the result of a comparison that follows from the bounds of its operands."""
    a, b = t.range_of(x), t.range_of(y)
    if a is None or b is None:
        return None
    if how in ("gt", "ge"):
        a, b, how = b, a, {"gt": "lt", "ge": "le"}[how]
    less = {"lt": (a[1] < b[0], a[0] >= b[1]), "le": (a[1] <= b[0], a[0] > b[1])}
    always, never = less.get(how, (False, False))
    return True if always else False if never else None


def _select(t: OpTranslation, condition: Value, x: Value, y: Value) -> Value:
    decided = t.number(condition)
    if decided is not None:
        return x if decided else y
    return nn.select(condition, x, y)


def _logical(make: Callable[..., Value], neutral: bool) -> HloEntry:
    """Make the entry of `and` (of which True is neutral) or `or`."""

    def entry(t: OpTranslation, x: Value, y: Value) -> Value:
        if t.element == "i1":
            for a, b in ((x, y), (y, x)):
                decided = t.number(a)
                if decided is not None:
                    return b if bool(decided) is neutral else a
        return t.spread(make(t.source(x), t.source(y)))

    return entry


def _not(t: OpTranslation, x: Value) -> Value:
    low, count = RANGES.get(t.element, (-1, 0))
    return nn.xor(x, count - 1) if low == 0 else nn.not_(x)


def _abs(t: OpTranslation, x: Value) -> Value:
    return wrap(nn.abs(x), t.element)


def _divide(t: OpTranslation, x: Value, y: Value) -> Value:
    """The quotient; of integers rounded towards 0. In f64 it is exact for 32 bits."""
    if is_float(t.element):
        return nn.div(x, y)
    if t.element == "i64":
        t.refuse("a division of 64-bit integers, which shardir has not; use 32 bits")
    return nn.trunc(nn.div(x.to("f64"), y.to("f64"))).to(t.dtype)


def _remainder(t: OpTranslation, x: Value, y: Value) -> Value:
    """The remainder of a division that rounds towards 0: it has the sign of x."""
    if t.element.startswith("u"):
        return nn.remainder(x, y)
    rest = nn.remainder(nn.abs(x), nn.abs(y))
    return nn.mul(nn.sign(x), rest)


def _power(t: OpTranslation, x: Value, y: Value) -> Value:
    if is_float(t.element):
        if t.number(y) == 2:
            return nn.square(x)
        return nn.pow(x, y)
    exponent = t.number(y)
    if exponent is None or not 0 <= exponent <= 16:
        t.refuse("a power of integers whose exponent is no constant from 0 to 16")
    out = t.constant(1)
    for _ in range(int(exponent)):
        out = wrap(nn.mul(x, out), t.element)
    return out


def _convert(t: OpTranslation, x: Value) -> Value:
    source, target = t.type(0).element, t.element
    if target == "i1" and source != "i1":
        return nn.compare(x, t.constant(0, DTYPES[source]), how="ne")
    if source == "ui64" and is_float(target) and not _is_small(t, x):
        t.refuse("64-bit unsigned integers that may be 2^53 or more, as floats")
    out = x
    if x.dtype != t.dtype:
        (out,) = t.function.op(ops.ConvertOp, [x], dtype=t.dtype)
    is_within = source in ("i1", target) or (target == "ui32" and source in ("ui8", "ui16"))
    return out if is_within else wrap(out, target)


def _clamp(t: OpTranslation, low: Value, x: Value, high: Value) -> Value:
    ends = t.number(low), t.number(high)
    if is_float(t.element) and all(isinstance(n, float) for n in ends):
        return nn.clamp(x, min=ends[0], max=ends[1])
    return nn.min(nn.max(x, low), high)


def _shift_left(t: OpTranslation, x: Value, y: Value) -> Value:
    return wrap(nn.mul(x, 2 ** _amount(t, y)), t.element)


def _amount(t: OpTranslation, y: Value) -> int:
    amount = t.number(y)
    if amount is None:
        t.refuse("a shift by a number that is no constant")
    width = WIDTHS[t.element]
    if not 0 <= amount < min(width, 62):
        t.refuse(f"a shift of {width} bits by {amount}")
    return int(amount)


def _shift_right(logical: bool) -> HloEntry:
    def entry(t: OpTranslation, x: Value, y: Value) -> Value:
        amount, x = _amount(t, y), t.source(x)
        width, signed = WIDTHS[t.element], not t.element.startswith("u")
        if width == 64 and not _is_small(t, x):
            t.refuse("a shift to the right of 64-bit integers; use 32 bits")
        bounds = t.range_of(x)
        if logical and signed and width < 64:
            x = nn.and_(x.to("i64"), 2**width - 1)
        out = nn.floor(nn.mul(x.to("f64"), 0.5**amount)).to("i64").to(t.dtype)
        if bounds is not None and bounds[0] >= 0:
            t.facts.bounds[out.ssa] = bounds[0] >> amount, bounds[1] >> amount
        elif logical and amount:
            t.facts.bounds[out.ssa] = 0, (2**width - 1) >> amount
        return t.spread(out)

    return entry


def _is_small(t: OpTranslation, x: Value) -> bool:
    """Whether integers are known to be not negative, and exact in f64."""
    bounds = t.range_of(x)
    return bounds is not None and 0 <= bounds[0] <= bounds[1] < 2**53


def _of_small(entry: HloEntry) -> HloEntry:
    """Refuse an op that reads ui64 as numbers, unless they are known to be small."""

    def checked(t: OpTranslation, *xs: Value) -> Any:
        for i, x in enumerate(xs):
            if t.type(i).element == "ui64" and not _is_small(t, t.source(x)):
                t.refuse("64-bit unsigned integers that may be 2^53 or more; use 32 bits")
        return entry(t, *xs)

    return checked


def _bitcast(t: OpTranslation, x: Value) -> Value:
    """Random bits below the exponent of 1.0 are a number in [1, 2): `1 + bits / 2^23`."""
    source, target = t.type(0).element, t.element
    if source == target:
        return x
    op = t.source(x).ssa.owner
    if (source, target) == ("ui32", "f32") and isinstance(op, ops.OrOp):
        for bits, one in (op.operands, op.operands[::-1]):
            bounds = t.range_of(Value(x.function, bits))
            of_one = t.number(Value(x.function, one))
            if of_one == ONE_IN_BITS and bounds is not None and 0 <= bounds[0] <= bounds[1] < 2**23:
                return nn.add(nn.mul(Value(x.function, bits).to("f32"), 2.0**-23), 1.0)
    number = t.number(x)
    if number is not None and (source, target) == ("f32", "ui32"):
        return t.constant(struct.unpack("<I", struct.pack("<f", number))[0])
    t.refuse(f"the bits of {source} as {target}")


def _reduce_precision(t: OpTranslation, x: Value) -> Value:
    bits = t["exponent_bits"], t["mantissa_bits"]
    kinds = {(8, 7): "bf16", (5, 10): "f16", (8, 23): "f32", (11, 52): "f64"}
    if bits not in kinds:
        t.refuse(f"a precision of {bits[0]} bits of exponent and {bits[1]} of mantissa")
    return x.to(kinds[bits]).to(t.dtype)


def _round_away(t: OpTranslation, x: Value) -> Value:
    return nn.mul(nn.sign(x), nn.floor(nn.add(nn.abs(x), 0.5)))


def _cbrt(t: OpTranslation, x: Value) -> Value:
    return nn.mul(nn.sign(x), nn.pow(nn.abs(x), 1 / 3))


SMALL = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
         -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
LARGE = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
         -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)  # fmt: skip
"""The coefficients of the inverse error function in f32 (Giles, 2012), as in XLA."""


def _erf_inv(t: OpTranslation, x: Value) -> Value:
    if t.element == "f64":
        t.refuse("the inverse error function of f64; use f32")
    w = nn.neg(nn.log1p(nn.neg(nn.square(x))))
    is_small = nn.compare(w, 5.0, how="lt")
    out = None
    w = nn.select(is_small, nn.sub(w, 2.5), nn.sub(nn.sqrt(w), 3.0))
    for small, large in zip(SMALL, LARGE, strict=True):
        c = nn.select(is_small, t.constant(small, w.dtype), t.constant(large, w.dtype))
        out = c if out is None else nn.add(c, nn.mul(out, w))
    return nn.mul(out, x)


def _atan2(t: OpTranslation, y: Value, x: Value) -> Value:
    """The angle of a point, in its quadrant; 0 at the origin."""
    angle = nn.atan(nn.div(y, x))
    turn = nn.select(nn.compare(y, 0.0, how="lt"), t.constant(-math.pi), t.constant(math.pi))
    angle = nn.select(nn.compare(x, 0.0, how="lt"), nn.add(angle, turn), angle)
    at_origin = nn.and_(nn.compare(x, 0.0, how="eq"), nn.compare(y, 0.0, how="eq"))
    return nn.select(at_origin, t.constant(0.0), angle)


def _asin(x: Value) -> Value:
    return nn.atan(nn.div(x, nn.sqrt(nn.mul(nn.sub(1.0, x), nn.add(x, 1.0)))))


def _asinh(x: Value) -> Value:
    size, square = nn.abs(x), nn.square(x)
    rest = nn.div(square, nn.add(nn.sqrt(nn.add(square, 1.0)), 1.0))
    return nn.mul(nn.sign(x), nn.log1p(nn.add(size, rest)))


OF_OTHERS: dict[str, Callable[..., Value]] = {
    "sinh": lambda x: nn.mul(nn.sub(nn.expm1(x), nn.expm1(nn.neg(x))), 0.5),
    "cosh": lambda x: nn.mul(nn.add(nn.exp(x), nn.exp(nn.neg(x))), 0.5),
    "asin": _asin,
    "acos": lambda x: nn.sub(math.pi / 2, _asin(x)),
    "asinh": _asinh,
    "acosh": lambda x: nn.log(nn.add(x, nn.sqrt(nn.mul(nn.add(x, 1.0), nn.sub(x, 1.0))))),
    "atanh": lambda x: nn.mul(nn.sub(nn.log1p(x), nn.log1p(nn.neg(x))), 0.5),
    "erfc": lambda x: nn.sub(1.0, nn.erf(x)),
}
"""Functions of CHLO that are made of others."""

SIMPLE: dict[str, Callable[..., Any]] = {
    "maximum": nn.max, "minimum": nn.min, "floor": nn.floor, "ceil": nn.ceil, "exponential": nn.exp,
    "exponential_minus_one": nn.expm1, "log": nn.log, "log_plus_one": nn.log1p, "sqrt": nn.sqrt,
    "rsqrt": nn.rsqrt, "sine": nn.sin, "cosine": nn.cos, "tan": nn.tan, "tanh": nn.tanh,
    "logistic": nn.sigmoid, "round_nearest_even": nn.round, "is_finite": nn.isfinite,
    "xor": nn.xor, "erf": nn.erf, "sign": nn.sign,
    "square": nn.square, "atan": nn.atan, "is_inf": nn.isinf,
}  # fmt: skip

TABLE: dict[str, HloEntry] = {
    **{f"stablehlo.{name}": elementwise(make) for name, make in SIMPLE.items()},
    **{f"chlo.{name}": elementwise(make) for name, make in SIMPLE.items()},
    "stablehlo.add": lambda t, x, y: (
        _logical(nn.or_, False) if t.element == "i1" else elementwise(nn.add, wraps=True)
    )(t, x, y),
    "stablehlo.subtract": elementwise(nn.sub, wraps=True),
    "stablehlo.multiply": lambda t, x, y: (
        _logical(nn.and_, True) if t.element == "i1" else elementwise(nn.mul, wraps=True)
    )(t, x, y),
    "stablehlo.negate": elementwise(nn.neg, wraps=True),
    "stablehlo.abs": _entry(_abs),
    "stablehlo.divide": _entry(_divide),
    "stablehlo.remainder": _entry(_remainder),
    "stablehlo.power": _entry(_power),
    "stablehlo.compare": _entry(_compare),
    "stablehlo.select": _entry(_select),
    "stablehlo.and": _logical(nn.and_, True),
    "stablehlo.or": _logical(nn.or_, False),
    "stablehlo.not": _entry(_not),
    "stablehlo.convert": _entry(_convert),
    "stablehlo.clamp": _entry(_clamp),
    "stablehlo.shift_left": _entry(_shift_left),
    "stablehlo.shift_right_logical": _shift_right(True),
    "stablehlo.shift_right_arithmetic": _shift_right(False),
    "stablehlo.bitcast_convert": _entry(_bitcast),
    "stablehlo.reduce_precision": _entry(_reduce_precision),
    "stablehlo.round_nearest_afz": _entry(_round_away),
    "stablehlo.cbrt": _entry(_cbrt),
    "chlo.erf_inv": _entry(_erf_inv),
    **{f"chlo.{name}": elementwise(make) for name, make in OF_OTHERS.items()},
    "stablehlo.atan2": _entry(_atan2),
}
for _name in ("compare", "divide", "remainder", "maximum", "minimum", "power", "clamp"):
    TABLE[f"stablehlo.{_name}"] = _of_small(TABLE[f"stablehlo.{_name}"])
