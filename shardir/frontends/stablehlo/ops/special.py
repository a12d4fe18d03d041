"""Special functions of real numbers, by elementary ones: gamma and its derivatives, the zeta
function of Hurwitz, the inverse error function, and the next float."""

import math
from functools import partial

from shardir.build import Value, nn
from shardir.frontends.stablehlo.ops.elementwise import bits_of, in_f32, of_bits
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import WIDTHS

# ---- gamma: the sum of Lanczos (1964) for g = 7, with the coefficients of Godfrey (2001) ----

G = 7
LANCZOS = (
    676.520368121885098567009190444019, -1259.13921672240287047156078755283,
    771.3234287776530788486528258894, -176.61502916214059906584551354,
    12.507343278686904814458936853, -0.13857109526572011689554707,
    9.984369578019570859563e-6, 1.50563273514931155834e-7,
)  # fmt: skip
LANCZOS_FIRST = 0.99999999999980993227684700473478


def _lanczos(x: Value) -> tuple[Value, Value, Value, Value, Value]:
    """Return whether x is reflected, as it is below 1/2; z of gamma(z + 1), of x or 1 - x; the sum
    of the coefficients by z + k, and its derivative; and ln(z + 15/2)."""
    is_reflected = nn.compare(x, 0.5, how="lt")
    z = nn.select(is_reflected, nn.neg(x), nn.sub(x, 1.0))
    total = x.function.constant(LANCZOS_FIRST, dtype=x.dtype)
    slope = x.function.constant(0.0, dtype=x.dtype)
    for k, c in enumerate(LANCZOS, 1):
        part = nn.div(x.function.constant(c, dtype=x.dtype), nn.add(z, float(k)))
        total, slope = nn.add(total, part), nn.sub(slope, nn.div(part, nn.add(z, float(k))))
    log = nn.add(nn.log1p(nn.div(z, G + 0.5)), math.log(G + 0.5))
    return is_reflected, z, total, slope, log


def _lgamma(x: Value) -> Value:
    """ln |gamma(x)|, with gamma(x) gamma(1 - x) = pi / sin(pi x) below 1/2."""
    is_reflected, z, total, _, log = _lanczos(x)
    t = nn.add(z, G + 0.5)
    power = nn.mul(nn.sub(nn.add(z, 0.5), nn.div(t, log)), log)
    out = nn.add(nn.add(power, math.log(2 * math.pi) / 2), nn.log(total))
    size = nn.abs(x)
    rest = nn.sub(size, nn.floor(size))
    rest = nn.select(nn.compare(rest, 0.5, how="gt"), nn.sub(1.0, rest), rest)
    sine = nn.log(nn.sin(nn.mul(rest, math.pi)))
    reflected = nn.sub(nn.sub(math.log(math.pi), sine), out)
    reflected = nn.select(nn.isfinite(sine), reflected, nn.neg(sine))
    out = nn.select(is_reflected, reflected, out)
    return nn.select(nn.isinf(x), size, out)


def _digamma(x: Value) -> Value:
    """The derivative of ln gamma; at 0, -1, ... NaN, and of -0 and 0 the infinite limits."""
    number = partial(x.function.constant, dtype=x.dtype)
    is_reflected, z, total, slope, log = _lanczos(x)
    t = nn.add(z, G + 0.5)
    out = nn.sub(nn.add(log, nn.div(slope, total)), nn.div(number(float(G)), t))
    # the cotangent of pi x, of x reduced to its distance from an integer
    near = nn.mul(nn.add(x, nn.abs(nn.floor(nn.add(x, 0.5)))), math.pi)
    cotangent = nn.div(nn.mul(nn.cos(near), math.pi), nn.sin(near))
    out = nn.select(is_reflected, nn.sub(out, cotangent), out)
    is_pole = nn.and_(nn.compare(x, 0.0, how="le"), nn.compare(x, nn.floor(x), how="eq"))
    return nn.select(is_pole, number(math.nan), out)


# ---- zeta: the formula of Euler and Maclaurin ----

TERMS = 9
"""The terms that are added one by one."""

BERNOULLI = (
    1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798,
    -174611 / 330, 854513 / 138, -236364091 / 2730,
)  # fmt: skip
"""The numbers of Bernoulli of even index, from 2 on."""


def _zeta(s: Value, q: Value) -> Value:
    """The sum of 1 / (q + k)^s for k = 0, 1, ...: with a = q + 9, and B the numbers of Bernoulli,

        sum over k < 9 of (q + k)^-s  +  a^(1-s) / (s-1)  +  a^-s / 2
            +  sum over j of B[2j] / (2j)! s (s+1) ... (s+2j-2) a^(-s-2j+1)

    infinite for s = 1, and for q = 0, -1, ...; NaN for s < 1, and for q < 0 and s that is no
    integer."""
    number = partial(q.function.constant, dtype=q.dtype)
    total = nn.pow(q, nn.neg(s))
    for k in range(1, TERMS):
        total = nn.add(total, nn.pow(nn.add(q, float(k)), nn.neg(s)))
    a = nn.add(q, float(TERMS))
    last = nn.pow(a, nn.neg(s))
    total = nn.add(total, nn.div(nn.mul(last, a), nn.sub(s, 1.0)))
    total = nn.add(total, nn.mul(last, 0.5))
    factor = nn.div(s, a)
    for j, b in enumerate(BERNOULLI, 1):
        term = nn.mul(nn.mul(last, factor), b / math.factorial(2 * j))
        total = nn.add(total, term)
        ahead = nn.mul(nn.add(s, 2.0 * j - 1), nn.add(s, 2.0 * j))
        factor = nn.mul(factor, nn.div(ahead, nn.square(a)))
    is_whole, is_negative = nn.compare(q, nn.floor(q), how="eq"), nn.compare(q, 0.0, how="le")
    is_odd = nn.compare(s, nn.floor(s), how="ne")
    total = nn.select(nn.and_(is_negative, is_odd), number(math.nan), total)
    total = nn.select(nn.and_(is_negative, is_whole), number(math.inf), total)
    total = nn.select(nn.compare(s, 1.0, how="lt"), number(math.nan), total)
    return nn.select(nn.compare(s, 1.0, how="eq"), number(math.inf), total)


def _polygamma(n: Value, x: Value) -> Value:
    """The derivatives of digamma: (-1)^(n+1) n! zeta(n + 1, x); NaN for n that is no index."""
    number = partial(x.function.constant, dtype=x.dtype)
    order = nn.add(n, 1.0)
    half = nn.mul(n, 0.5)
    is_odd = nn.compare(half, nn.floor(half), how="ne")
    out = nn.mul(nn.exp(_lgamma(order)), _zeta(order, x))
    out = nn.select(is_odd, out, nn.neg(out))
    out = nn.select(nn.compare(n, 0.0, how="eq"), _digamma(x), out)
    is_index = nn.and_(nn.compare(n, nn.floor(n), how="eq"), nn.compare(n, 0.0, how="ge"))
    return nn.select(is_index, out, number(math.nan))


# ---- the inverse error function ----

SMALL = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
         -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
LARGE = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
         -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)  # fmt: skip
"""The coefficients of the inverse error function in f32 (Giles, 2012), as in XLA."""


def _erf_inv(x: Value) -> Value:
    """By a polynomial in f32. In f64 two steps of Halley's method go on from it, with the error
    function near 0, and beyond with its complement."""
    number = partial(x.function.constant, dtype=x.dtype)
    w = nn.neg(nn.log1p(nn.neg(nn.square(x))))
    is_small = nn.compare(w, 5.0, how="lt")
    out = _polynomial(nn.select(is_small, nn.sub(w, 2.5), nn.sub(nn.sqrt(w), 3.0)), is_small)
    is_end = nn.compare(nn.abs(x), 1.0, how="eq")
    if x.dtype != "f64":
        return nn.mul(nn.select(is_end, number(math.inf), out), x)
    size = nn.abs(x)
    # beyond the f32 nearest to 1: erfc(y) is about exp(-y^2) / (y sqrt(pi))
    tail = nn.neg(nn.log(nn.sub(1.0, size)))
    first = nn.sqrt(nn.sub(tail, nn.mul(nn.log(nn.mul(tail, math.pi)), 0.5)))
    y = nn.select(nn.compare(w, 15.0, how="lt"), nn.mul(out, size), first)
    is_near = nn.compare(size, 0.5, how="lt")
    for _ in range(2):
        error = nn.select(
            is_near, nn.sub(nn.erf(y), size), nn.sub(nn.sub(1.0, size), nn.erfc(y))
        )  # fmt: skip
        step = nn.mul(nn.mul(error, nn.exp(nn.square(y))), math.sqrt(math.pi) / 2)
        y = nn.sub(y, nn.div(step, nn.add(nn.mul(y, step), 1.0)))
    return nn.mul(nn.select(is_end, number(math.inf), y), nn.sign(x))


def _polynomial(w: Value, is_small: Value) -> Value:
    out: Value | None = None
    for pair in zip(SMALL, LARGE, strict=True):
        c = nn.select(is_small, *(w.function.constant(n, dtype=w.dtype) for n in pair))
        out = c if out is None else nn.add(c, nn.mul(out, w))
    assert out is not None
    return out


def _next_after(t: OpTranslation, x: Value, y: Value) -> Value:
    """The float after x on the way to y. The bits of floats without their sign are integers in
    order."""
    bits, is_up = bits_of(x, t.element), nn.compare(x, y, how="lt")
    one = t.constant(1, bits.dtype)
    is_away = nn.select(nn.compare(x, 0.0, how="gt"), is_up, nn.not_(is_up))
    out = nn.add(bits, nn.select(is_away, one, t.constant(-1, bits.dtype)))
    sign = -(2**63) if t.element == "f64" else 2 ** (WIDTHS[t.element] - 1)
    least = nn.select(is_up, one, t.constant(sign + 1, bits.dtype))
    out = of_bits(nn.select(nn.compare(x, 0.0, how="eq"), least, out), t.element)
    out = nn.select(nn.compare(x, y, how="eq"), y, out)
    return nn.select(nn.or_(nn.isnan(x), nn.isnan(y)), nn.add(x, y), out)


TABLE: dict[str, HloEntry] = {
    "chlo.lgamma": in_f32(_lgamma),
    "chlo.digamma": in_f32(_digamma),
    "chlo.zeta": in_f32(_zeta),
    "chlo.polygamma": in_f32(_polygamma),
    "chlo.erf_inv": in_f32(_erf_inv),
    "chlo.next_after": lambda t, *xs: t.spread(_next_after(t, *map(t.source, xs))),
    "chlo.conj": lambda t, x: x,
}
