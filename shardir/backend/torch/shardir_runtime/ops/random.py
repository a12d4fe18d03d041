"""Random numbers that depend only on a key and their index: equal bits on every mesh.

Element i (row-major, in the global tensor) of the tensor named by `key` is the i-th output of
splitmix64 started at a hash of the key, transformed. A rank computes only its own elements.
Logarithm, sine and root use only + - * /, whose rounding IEEE 754 fixes, since libraries and
devices differ in the last bit. shardir/dialects/random.py is the version of this file for numpy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_CHUNK = 1 << 15  # elements at a time: their intermediate values stay in the cache

# ln(m) = 2 s (1 + s^2/3 + s^4/5 + ...) with s = (m-1)/(m+1), for m in [sqrt(1/2), sqrt(2));
# sin(y) = y (1 - y^2/3! + y^4/5! - ...) for |y| <= pi/2. Both good to 1e-12, highest power first.
_LOG = [2.0 / k for k in range(15, 0, -2)]
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, -1, -1)]
_HALF_EXPONENT = 0x3FF0000000000000 >> 1  # of 1.0


def _to_signed(value: int) -> int:
    """Return 64 bits as torch's int64, whose arithmetic wraps around."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def seed_of(key: str) -> int:
    """Hash a text to 64 bits (FNV-1a)."""
    state = 0xCBF29CE484222325
    for byte in key.encode():
        state = (state ^ byte) * 0x100000001B3 & _MASK
    return state


def outputs(seed: int | Tensor, index: Tensor) -> Tensor:
    """Return the outputs of splitmix64 at these indices."""
    first = seed + _to_signed(_GOLDEN) if isinstance(seed, Tensor) else _to_signed(seed + _GOLDEN)
    z = index * _to_signed(_GOLDEN) + first
    for shift, factor in _MIX:
        z.bitwise_xor_(_shift_right(z, shift)).mul_(_to_signed(factor))
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, by: int) -> Tensor:
    """Shift right with zeros; torch's own shift keeps the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result.mul_(x).add_(coefficient)
    return result


def _root(x: Tensor) -> Tensor:
    """Return the square root by Newton's iteration, starting at half the exponent."""
    root = ((x.view(torch.int64) >> 1) + _HALF_EXPONENT).view(torch.float64)
    for _ in range(4):
        root = (root + x / root) * 0.5
    return root


def _uniform(bits: Tensor) -> Tensor:
    """Return 53 bits as a number in [0, 1)."""
    return _shift_right(bits, 11).double() * 2.0**-53


def _normal(bits: Tensor) -> Tensor:
    """Transform the two halves by Box and Muller: sqrt(-2 ln u) cos(2 pi v)."""
    u = _shift_right(bits, 32).double() + 0.5  # times 2^-32: between 0 and 1, and neither
    mantissa, exponent = torch.frexp(u)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    exponent = (exponent.long() - low.long() - 32).double()
    s = (mantissa - 1) / (mantissa + 1)
    log = _polynomial(_LOG, s * s) * s + exponent * math.log(2.0)
    v = (bits & 0xFFFFFFFF).double() * 2.0**-32
    y = ((v - 0.5).abs() - 0.25) * (2 * math.pi)  # cos(2 pi v) = sin(y)
    return _root(log * -2.0) * (_polynomial(_SIN, y * y) * y)


def seed_at(key: Tensor, stream: int) -> Tensor:
    """Return the seed of a stream of a key (an i64 scalar): output number `stream` of splitmix64
    started at the key."""
    return outputs(key, torch.full_like(key, stream))


def keep_mask(p: float, seed: Tensor, index: Tensor) -> Tensor:
    """Return the mask of the indices whose uniform number is at least p."""
    return _shift_right(outputs(seed, index), 11) >= math.ceil(p * 2.0**53)


def _values(kind: str, params: Mapping[str, Any], seed: int | Tensor, index: Tensor) -> Tensor:
    bits = outputs(seed, index)
    if kind == "uniform":
        low, high = float(params.get("low", 0.0)), float(params.get("high", 1.0))
        return _uniform(bits) * (high - low) + low
    if kind == "bernoulli":
        return _uniform(bits) < params["p"]
    if kind == "normal":
        return _normal(bits) * float(params.get("std", 1.0)) + float(params.get("mean", 0.0))
    if kind == "integers":  # high is not among them
        low, high = int(params.get("low", 0)), int(params["high"])
        return _shift_right(bits, 1) % (high - low) + low
    raise ValueError(f"no such kind of random numbers: {kind!r}")


def fill(
    kind: str,
    params: Mapping[str, Any],
    shape: Sequence[int],
    slices: Sequence[tuple[int, int]],
    key: str | Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return a part of a random tensor of a global shape, on the device of `key`.

    slices: the range [start, stop) of each dimension. key: the name of the tensor, or its seed.
    kind: normal (mean, std), uniform (low, high), integers (low, high), bernoulli (p), constant
    (value), values (data, flat or nested).
    """
    local = [stop - start for start, stop in slices]
    if kind == "constant":
        return torch.full(local, params["value"], dtype=dtype)
    if kind == "values":
        full = torch.tensor(params["data"], dtype=dtype).reshape(list(shape))
        for dim, (start, stop) in enumerate(slices):
            full = full.narrow(dim, start, stop - start)
        return full.contiguous()
    seed = key if isinstance(key, Tensor) else seed_of(key)
    out = torch.empty(local, dtype=dtype, device=key.device if isinstance(key, Tensor) else "cpu")
    flat = out.view(-1)
    for begin, end, index in runs(shape, slices, out.device):
        values = _values(kind, params, seed, index)
        if dtype in (torch.float16, torch.bfloat16):
            values = values.float()  # rounded in two steps, as everywhere
        flat[begin:end] = values.to(dtype)
    return out


def runs(
    shape: Sequence[int], slices: Sequence[tuple[int, int]], device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ranges [begin, end) of the flat elements of a part, and the row-major index of each
    element in the global tensor."""
    total = math.prod(stop - start for start, stop in slices)
    most = _CHUNK if device.type == "cpu" else total
    for begin in range(0, total, most or 1):
        end = min(begin + most, total)
        yield begin, end, _places(shape, slices, torch.arange(begin, end, device=device))


def _places(shape: Sequence[int], slices: Sequence[tuple[int, int]], rest: Tensor) -> Tensor:
    """Return the row-major indices in the global tensor, from indices in the part."""
    if all(stop - start == n for n, (start, stop) in list(zip(shape, slices, strict=True))[1:]):
        first = slices[0][0] * math.prod(shape[1:]) if shape else 0
        return rest + first  # complete rows
    place, stride = torch.zeros_like(rest), 1
    for size, (start, stop) in zip(reversed(shape), reversed(slices), strict=True):
        place += (rest % (stop - start) + start) * stride
        rest = rest // (stop - start)
        stride *= size
    return place


Bounds = Sequence[tuple[int, int]]
"""The range [start, stop) of each dimension that this rank holds."""


def draw(
    kind: str, params: Mapping[str, Any], shape: Sequence[int], part: Bounds, key: Tensor,
    stream: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return this rank's part of a random tensor of a global shape."""
    seed = seed_at(key, stream)
    return fill(kind, params, shape, part, seed, dtype)


def dropout(
    x: Tensor, p: float, shape: Sequence[int], part: Bounds, key: Tensor, stream: int
) -> Tensor:
    """Return x / (1 - p), with zeros at a fraction p of the elements."""
    if p == 1:
        return x * 0.0
    seed = seed_at(key, stream)
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    flat = mask.view(-1)
    for begin, end, index in runs(shape, part, x.device):
        flat[begin:end] = keep_mask(p, seed, index)
    return (x * mask).mul_(1 / (1 - p))
