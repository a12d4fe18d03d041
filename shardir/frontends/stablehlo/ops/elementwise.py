"""Elementwise ops. Operands that broadcast are replaced by their sources, and a result of sources
alone is broadcast afterwards."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardir.build import Value, nn
from shardir.dialects import nn as ops
from shardir.frontends.stablehlo.folding import known
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import (
    BITS,
    DTYPES,
    RANGES,
    UNSIGNED,
    WIDTHS,
    in_order_of,
    is_float,
    shifted_right,
    wrap,
)


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
    if how not in ("eq", "ne"):
        x, y = _ordered(t, x, y)
    return nn.compare(x, y, how=how)


def _ordered(t: OpTranslation, *xs: Value) -> list[Value]:
    """Return operands of the same type by whose order in our element type they are ordered."""
    element = t.type(len(t.op.operands) - 1).element
    if all(_is_small(t, x) for x in xs):
        return [*xs]
    return [in_order_of(x, element) for x in xs]


def _extreme(make: Callable[..., Value]) -> HloEntry:
    """Make the entry of the minimum or maximum of values."""

    def of(t: OpTranslation, *xs: Value) -> Value:
        if t.element != "ui64" or all(_is_small(t, x) for x in xs):
            return make(*xs)
        return in_order_of(make(*_ordered(t, *xs)), t.element)

    return _entry(of)


def _compare_in_total_order(t: OpTranslation, how: str, x: Value, y: Value) -> Value:
    """NaN counts as the maximum for operands as JAX makes them: without -0, and with one NaN.
    Others are ordered by their bits: NaN by their signs, and -0 before 0."""
    if how in ("eq", "ne") or not all(_is_canonical(t, v) for v in (x, y)):
        element = t.type(0).element
        return nn.compare(*(_in_total_order(v, element) for v in (x, y)), how=how)
    if how in ("gt", "le"):
        x, y = y, x
    is_less = nn.compare(x, y, how="lt")
    is_less = nn.or_(is_less, nn.and_(nn.not_(nn.isnan(x)), nn.isnan(y)))
    return is_less if how in ("lt", "gt") else nn.not_(is_less)


def _in_total_order(x: Value, element: str) -> Value:
    """Return integers in the total order of floats: the bits, those of negative ones inverted but
    for the sign."""
    bits = nn.bitcast(x if element == "f64" else x.to("f32"), dtype=INTEGERS[element])
    width = BITS[bits.dtype]
    return nn.xor(bits, nn.and_(nn.shift_right(bits, width - 1), 2 ** (width - 1) - 1))


INTEGERS = {"f64": "i64", "f32": "i32", "bf16": "i32", "f16": "i32"}
"""The type of the bits of floats, or of wider ones that have their values."""


def _is_canonical(t: OpTranslation, x: Value) -> bool:
    """Whether a value is `select(x != x, nan, select(x == 0, 0, x))`, or a known number but -0."""
    numbers = known(x)
    if numbers is not None:
        return not (np.signbit(numbers) & (numbers == 0)).any()
    op = x.ssa.owner
    if isinstance(op, ops.ReshapeOp):
        op = op.x.owner
    if not isinstance(op, ops.SelectOp) or not isinstance(op.rhs.owner, ops.SelectOp):
        return False
    nan, zero = (t.number(Value(x.function, v)) for v in (op.lhs, op.rhs.owner.lhs))
    return nan is not None and math.isnan(nan) and zero == 0


def _decided(t: OpTranslation, how: str, x: Value, y: Value) -> bool | None:
    """Return the result of a comparison that follows from the bounds of its operands."""
    a, b = t.range_of(x), t.range_of(y)
    if a is None or b is None or (t.type(0).element == "ui64" and min(a[0], b[0]) < 0):
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
    return nn.div(x, y) if is_float(t.element) else _quotient(t, x, y)


def _quotient(t: OpTranslation, x: Value, y: Value) -> Value:
    """The quotient of integers, rounded towards 0. As in XLA, x / 0 has all bits, and the least
    number / -1 is itself."""
    if t.element == "ui64" and not (_is_small(t, x) and _is_small(t, y)):
        return _unsigned_quotient(t, x, y)
    bounds = t.range_of(y)
    if bounds is not None and (bounds[0] > 0 or bounds[1] < -1):
        return nn.quotient(x, y)
    is_zero = nn.compare(y, 0, how="eq")
    is_unit = nn.or_(is_zero, nn.compare(y, -1, how="eq"))
    out = nn.quotient(x, nn.select(is_unit, t.constant(1), y))
    all_bits = t.constant(2 ** WIDTHS[t.element] - 1 if t.element in UNSIGNED - {"ui64"} else -1)
    special = nn.select(is_zero, all_bits, nn.neg(x))
    return wrap(nn.select(is_unit, special, out), t.element)


def _unsigned_quotient(t: OpTranslation, x: Value, y: Value) -> Value:
    """By halves, which are not negative (Warren, Hacker's Delight, 9-3)."""
    x_first, y_first = (in_order_of(v, "ui64") for v in (x, y))
    is_large, is_zero = nn.compare(y, 0, how="lt"), nn.compare(y, 0, how="eq")
    at_least = nn.compare(x_first, y_first, how="ge")
    one = t.constant(1)
    divisor = nn.select(nn.or_(is_large, is_zero), one, y)
    half = nn.shift_left(nn.quotient(shifted_right(x, 1, 64), divisor), 1)
    rest = nn.sub(x, nn.mul(half, divisor))
    is_more = nn.compare(in_order_of(rest, "ui64"), in_order_of(divisor, "ui64"), how="ge")
    out = nn.add(half, nn.select(is_more, one, t.constant(0)))
    large = nn.select(at_least, one, t.constant(0))
    return nn.select(is_zero, t.constant(-1), nn.select(is_large, large, out))


def _remainder(t: OpTranslation, x: Value, y: Value) -> Value:
    """The remainder of a division that rounds towards 0: it has the sign of x."""
    if not is_float(t.element):
        dividend, divisor = t.range_of(x), t.range_of(y)
        if dividend is not None and divisor is not None and dividend[0] >= 0 and divisor[0] > 0:
            return nn.remainder(x, y)
        return wrap(nn.sub(x, nn.mul(_quotient(t, x, y), y)), t.element)
    rest = nn.remainder(nn.abs(x), nn.abs(y))
    return nn.select(nn.compare(x, 0.0, how="lt"), nn.neg(rest), rest)


def _power(t: OpTranslation, x: Value, y: Value) -> Value:
    if is_float(t.element):
        if t.number(y) == 2:
            return nn.square(x)
        return nn.pow(x, y)
    exponent = t.number(y)
    if exponent is not None and 0 <= exponent <= 16:
        out = t.constant(1)
        for _ in range(int(exponent)):
            out = wrap(nn.mul(x, out), t.element)
        return out
    return _integer_power(t, x, y)


def _integer_power(t: OpTranslation, x: Value, y: Value) -> Value:
    """By squaring. A negative exponent gives 0, but for the bases 1 and -1."""
    one, zero, width = t.constant(1), t.constant(0), WIDTHS[t.element]
    out, power = one, x
    for k in range(width):
        is_odd = nn.compare(nn.and_(nn.shift_right(y, k), 1), 0, how="ne")
        out = nn.select(is_odd, wrap(nn.mul(out, power), t.element), out)
        if k < width - 1:
            power = wrap(nn.mul(power, power), t.element)
    if t.element in UNSIGNED:
        return out
    is_unit = nn.compare(nn.abs(x), 1, how="eq")
    is_negative = nn.compare(y, 0, how="lt")
    return nn.select(nn.and_(is_negative, nn.not_(is_unit)), zero, out)


def _convert(t: OpTranslation, x: Value) -> Value:
    source, target = t.type(0).element, t.element
    if target == "i1" and source != "i1":
        return nn.compare(x, t.constant(0, DTYPES[source]), how="ne")
    if source == "ui64" and is_float(target) and not _is_small(t, x):
        half = nn.or_(shifted_right(x, 1, 64), nn.and_(x, 1)).to(t.dtype)
        return nn.select(nn.compare(x, 0, how="lt"), nn.add(half, half), x.to(t.dtype))
    if is_float(source) and target == "ui64":
        x = x.to("f64") if source == "f16" else x
        is_high = nn.compare(x, 2.0**63, how="ge")
        low = nn.select(is_high, nn.sub(x, 2.0**63), nn.clamp(x, min=0.0)).to("i64")
        return nn.select(is_high, nn.xor(low, -(2**63)), low)
    out = x = _saturated(x, target) if is_float(source) and target in RANGES else x
    if x.dtype != t.dtype:
        (out,) = t.function.op(ops.ConvertOp, [x], dtype=t.dtype)
    is_within = source in ("i1", target) or (target == "ui32" and source in ("ui8", "ui16"))
    return out if is_within else wrap(out, target)


def _saturated(x: Value, element: str) -> Value:
    """Return floats within the range of an integer type, in a type that has its ends. NaN stays:
    it is converted to a number that wraps to 0."""
    low, count = RANGES[element]
    if WIDTHS[element] > 8:
        x = x.to("f64" if x.dtype == "f64" or WIDTHS[element] > 16 else "f32")
    return nn.clamp(x, min=float(low), max=float(low + count - 1))


def _clamp(t: OpTranslation, low: Value, x: Value, high: Value) -> Value:
    ends = t.number(low), t.number(high)
    if is_float(t.element) and all(isinstance(n, float) for n in ends):
        return nn.clamp(x, min=ends[0], max=ends[1])
    if t.element != "ui64":
        return nn.min(nn.max(x, low), high)
    low, x, high = _ordered(t, low, x, high)
    return in_order_of(nn.min(nn.max(x, low), high), t.element)


def _shift_left(t: OpTranslation, x: Value, y: Value) -> Value:
    is_within, amount = _amount(t, y)
    return _where(t, is_within, wrap(nn.shift_left(x, amount), t.element), 0)


def _shift_right_logical(t: OpTranslation, x: Value, y: Value) -> Value:
    is_within, amount = _amount(t, y)
    width, bounds = WIDTHS[t.element], t.range_of(x)
    if bounds is not None and bounds[0] >= 0:
        out = nn.shift_right(x, amount)
    else:
        out = shifted_right(x, amount, width)
        bounds = (0, 2**width - 1)
    number = t.number(y)
    if number and is_within is True:
        t.facts.bounds[out.ssa] = bounds[0] >> int(number), bounds[1] >> int(number)
        return out
    return wrap(_where(t, is_within, out, 0), t.element)


def _shift_right_arithmetic(t: OpTranslation, x: Value, y: Value) -> Value:
    """Of unsigned integers too, the first bit is copied."""
    gap = BITS[t.dtype] - WIDTHS[t.element]
    if t.element in UNSIGNED and gap:
        x = nn.shift_right(nn.shift_left(x, gap), gap)
    is_within, amount = _amount(t, y)
    sign = nn.shift_right(x, BITS[t.dtype] - 1)
    return wrap(_where(t, is_within, nn.shift_right(x, amount), sign), t.element)


def _amount(t: OpTranslation, y: Value) -> tuple[Value | bool, Value | int]:
    """Return whether an amount is less than the bits of the type, and the amount, 0 if it is
    not."""
    width, number = WIDTHS[t.element], t.number(y)
    if number is not None:
        is_within = 0 <= number < width
        return is_within, int(number) if is_within else 0
    bounds = t.range_of(y)
    if bounds is not None and 0 <= bounds[0] <= bounds[1] < width:
        return True, y
    is_within = nn.and_(nn.compare(y, 0, how="ge"), nn.compare(y, width, how="lt"))
    return is_within, nn.select(is_within, y, t.constant(0))


def _where(t: OpTranslation, condition: Value | bool, x: Value, other: Value | int) -> Value:
    """Return x where the condition holds, else another value."""
    if condition is True:
        return x
    if isinstance(other, int):
        other = t.constant(other)
    return t.spread(other) if condition is False else nn.select(condition, x, other)


def _is_small(t: OpTranslation, x: Value) -> bool:
    """Whether integers are known to be not negative, and exact in f64."""
    bounds = t.range_of(x)
    return bounds is not None and 0 <= bounds[0] <= bounds[1] < 2**53


def bits_of(x: Value, element: str) -> Value:
    """Return the bits of numbers as unsigned integers, those of 64 bits in i64."""
    if element in ("f64", "i64", "ui64"):
        return nn.bitcast(x, dtype="i64") if element == "f64" else x
    if is_float(element):
        x = nn.bitcast(x, dtype="i32")
    return wrap(x, f"ui{WIDTHS[element]}") if WIDTHS[element] < 32 else wrap(x.to("i64"), "ui32")


def of_bits(x: Value, element: str) -> Value:
    """Return the numbers of an element type that have these bits."""
    if element in ("f64", "i64", "ui64"):
        return nn.bitcast(x, dtype="f64") if element == "f64" else x
    x = x if x.dtype == DTYPES.get(element) else x.to("i64" if element == "ui32" else "i32")
    return nn.bitcast(x, dtype=element) if is_float(element) else wrap(x, element)


def _bitcast(t: OpTranslation, x: Value) -> Value:
    """The same bits in another type. To narrower types a number becomes the numbers along a new
    last dimension, the lowest bits first; to wider ones, those of the last dimension become one."""
    source, target = t.type(0).element, t.element
    if source == target:
        return x
    if "i1" in (source, target):
        t.refuse("the bits of i1")
    x = x if len(x.shape) == len(t.type(0).shape) else t.spread(x, t.type(0).shape)
    before, after = WIDTHS[source], WIDTHS[target]
    if before == after:
        return of_bits(bits_of(x, source), target)
    bits = bits_of(x, source)
    if before > after:
        parts = [
            shifted_right(bits.to("i64"), k, 64) if k else bits for k in range(0, before, after)
        ]
        parts = [nn.and_(p.to("i64"), 2**after - 1) for p in parts]
        return of_bits(nn.stack(*parts, axis=len(x.shape)), target)
    last, out = len(x.shape) - 1, None
    for k in range(after // before):
        part = t.reshape(t.part(bits, last, k, 1), x.shape[:-1]).to("i64")
        part = nn.shift_left(part, k * before) if k else part
        out = part if out is None else nn.or_(out, part)
    assert out is not None
    return of_bits(out, target)


def _population_count(t: OpTranslation, x: Value) -> Value:
    """Sums of neighbouring fields of bits: of 2, 4, 8, ... bits."""
    return _convert_count(t, _count_bits(bits_of(x, t.element).to("i64"), WIDTHS[t.element]))


def _convert_count(t: OpTranslation, count: Value) -> Value:
    return count if t.dtype == "i64" else count.to(t.dtype)


def _count_bits(bits: Value, width: int) -> Value:
    size = 1
    while size < width:
        mask = sum((2**size - 1) << k for k in range(0, 64, 2 * size))
        mask = mask - 2**64 if mask >= 2**63 else mask
        bits = nn.add(nn.and_(bits, mask), nn.and_(nn.shift_right(bits, size), mask))
        size *= 2
    return bits


def _leading_zeros(t: OpTranslation, x: Value) -> Value:
    """The bits above the first one: those that are 0 when all below it are set."""
    width = WIDTHS[t.element]
    bits, size = bits_of(x, t.element).to("i64"), 1
    while size < width:
        bits = nn.or_(bits, shifted_right(bits, size, 64))
        size *= 2
    return _convert_count(t, nn.sub(width, _count_bits(bits, width)))


FIELDS = {"f64": (11, 52), "f32": (8, 23), "bf16": (8, 7), "f16": (5, 10)}
"""The bits of the exponent and of the mantissa of each float type."""


def _reduce_precision(t: OpTranslation, x: Value) -> Value:
    """Round to even. As in XLA, what exceeds the greatest exponent is infinite, and what is below
    the least one of normal numbers is 0."""
    exponent, mantissa = FIELDS[t.element]
    to_exponent, to_mantissa = t["exponent_bits"], t["mantissa_bits"]
    if (exponent, mantissa, to_exponent, to_mantissa) == (8, 23, 8, 7):
        return x.to("bf16").to(t.dtype)
    bits = before = bits_of(x, t.element).to("i64")
    if (dropped := mantissa - to_mantissa) > 0:
        last = nn.and_(nn.shift_right(bits, dropped), 1)
        bits = nn.and_(nn.add(nn.add(bits, last), 2 ** (dropped - 1) - 1), -(2**dropped))
    if to_exponent < exponent:
        all_ones, bias, span = (2 ** (n - k) - 1 for n, k in
                                ((exponent, 0), (exponent, 1), (to_exponent, 1)))  # fmt: skip
        field = nn.and_(nn.shift_right(bits, mantissa), all_ones)
        sign = nn.and_(bits, -(2**63) if t.element == "f64" else 2 ** (WIDTHS[t.element] - 1))
        is_high = nn.compare(field, bias + span, how="gt")
        bits = nn.select(is_high, nn.or_(sign, all_ones << mantissa), bits)
        bits = nn.select(nn.compare(field, bias - span, how="le"), sign, bits)
    return x if bits is before else nn.select(nn.isnan(x), x, of_bits(bits, t.element))


def _sign(t: OpTranslation, x: Value) -> Value:
    """The sign; NaN of NaN."""
    return nn.select(nn.isnan(x), x, nn.sign(x)) if is_float(t.element) else nn.sign(x)


def _round_away(t: OpTranslation, x: Value) -> Value:
    whole = nn.trunc(x)
    is_half = nn.compare(nn.abs(nn.sub(x, whole)), 0.5, how="ge")
    return nn.select(is_half, nn.add(whole, nn.sign(x)), whole)


def _cbrt(t: OpTranslation, x: Value) -> Value:
    return nn.mul(nn.sign(x), nn.pow(nn.abs(x), 1 / 3))


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


def _half_exp(x: Value) -> Value:
    """Return e^x / 2, which is finite wherever sinh and cosh are."""
    return nn.exp(nn.sub(x, math.log(2)))


def _sinh(x: Value) -> Value:
    small = nn.expm1(x)
    small = nn.mul(nn.add(small, nn.div(small, nn.add(small, 1.0))), 0.5)
    is_small = nn.compare(nn.abs(x), 1.0, how="lt")
    return nn.select(is_small, small, nn.sub(_half_exp(x), _half_exp(nn.neg(x))))


OF_OTHERS: dict[str, Callable[..., Value]] = {
    "sinh": _sinh,
    "cosh": lambda x: nn.add(_half_exp(x), _half_exp(nn.neg(x))),
    "asin": _asin,
    "acos": lambda x: nn.sub(math.pi / 2, _asin(x)),
    "asinh": _asinh,
    "acosh": lambda x: nn.log(nn.add(x, nn.sqrt(nn.mul(nn.add(x, 1.0), nn.sub(x, 1.0))))),
    "atanh": lambda x: nn.mul(nn.sub(nn.log1p(x), nn.log1p(nn.neg(x))), 0.5),
}
"""Functions of CHLO that are made of others, in f32 and f64."""


def in_f32(make: Callable[..., Value]) -> HloEntry:
    """Make the entry of a function that is computed in f32 of floats of 16 bits."""

    def of(t: OpTranslation, *xs: Value) -> Value:
        if WIDTHS[t.element] != 16:
            return make(*xs)
        return make(*(x.to("f32") for x in xs)).to(t.dtype)

    return _entry(of)


SIMPLE: dict[str, Callable[..., Any]] = {
    "floor": nn.floor, "ceil": nn.ceil, "exponential": nn.exp,
    "exponential_minus_one": nn.expm1, "log": nn.log, "log_plus_one": nn.log1p, "sqrt": nn.sqrt,
    "rsqrt": nn.rsqrt, "sine": nn.sin, "cosine": nn.cos, "tan": nn.tan, "tanh": nn.tanh,
    "logistic": nn.sigmoid, "round_nearest_even": nn.round, "is_finite": nn.isfinite,
    "xor": nn.xor, "erf": nn.erf, "erfc": nn.erfc,
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
    "stablehlo.maximum": _extreme(nn.max),
    "stablehlo.minimum": _extreme(nn.min),
    "stablehlo.negate": elementwise(nn.neg, wraps=True),
    "stablehlo.abs": _entry(_abs),
    "stablehlo.sign": _entry(_sign),
    "stablehlo.real": lambda t, x: x,
    "stablehlo.imag": lambda t, x: t.filled(0, t.shape),
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
    "stablehlo.shift_right_logical": _entry(_shift_right_logical),
    "stablehlo.shift_right_arithmetic": _entry(_shift_right_arithmetic),
    "stablehlo.popcnt": _entry(_population_count),
    "stablehlo.count_leading_zeros": _entry(_leading_zeros),
    "stablehlo.bitcast_convert": _bitcast,
    "stablehlo.reduce_precision": _entry(_reduce_precision),
    "stablehlo.round_nearest_afz": _entry(_round_away),
    "stablehlo.cbrt": _entry(_cbrt),
    **{f"chlo.{name}": in_f32(make) for name, make in OF_OTHERS.items()},
    "stablehlo.atan2": _entry(_atan2),
}
