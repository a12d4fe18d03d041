"""Random numbers as a function of a key and a position only, in numpy.

They equal those of shardir_runtime/ops/random.py on the ranks bit for bit (its docstring has the
algorithm): the interpreter and the emitted program start from equal parameters and inputs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardir.diagnostics import ShardirError, coded
from shardir.dialects.text import Kinds, OptionSpec

INTEGER = OptionSpec(int, minimum=-(2**62), maximum=2**62 - 1)  # high - low fits 64 bits
DRAWN: Kinds = {
    "normal": {"mean": OptionSpec(float, 0.0), "std": OptionSpec(float, 1.0, minimum=0.0)},
    "uniform": {"low": OptionSpec(float, 0.0), "high": OptionSpec(float, 1.0)},
    "integers": {"low": INTEGER, "high": INTEGER},
}
"""Distributions, with their parameters."""

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LOG = [2.0 / k for k in range(15, 0, -2)]
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, -1, -1)]
_HALF_EXPONENT = 0x3FF0000000000000 >> 1  # of 1.0


LARGEST = {
    "f64": 1.7976931348623157e308, "f32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38,
    "f16": 65504.0, "i64": 2**63 - 1, "i32": 2**31 - 1,
}  # fmt: skip
"""The largest number of each element type; the smallest is its negative, or one less."""


def check_range(kind: str, params: Mapping[str, Any], element: str) -> None:
    """Raises ShardirError unless an element type can hold the numbers of an initial value."""
    if kind != "integers" and element in LARGEST:
        for name in ("value", "mean", "std", "low", "high"):
            if not abs(number := params.get(name, 0)) <= LARGEST[element]:
                message = f"expected {name} to be a number that {element} holds, got {number}"
                raise ShardirError(coded("T10", message, use=""))
    if kind not in ("uniform", "integers"):
        return
    low, high = params["low"], params["high"]
    if kind == "uniform" and low > high:
        raise ShardirError(coded("T10", f"expected low to be at most high, {high}, got {low}"))
    if kind == "integers" and low >= high:
        raise ShardirError(
            coded("T10", f"expected low to be below high, {high}, which is excluded, got {low}")
        )
    end = LARGEST.get(element, high) + 1
    if kind == "integers" and not -end <= low < high <= end:
        use = "use i64" if element == "i32" else ""
        message = f"expected numbers that {element} holds, got {low} to {high - 1}"
        raise ShardirError(coded("T10", message, use=use))


def seed_of(key: str) -> int:
    """64 bits from a text (FNV-1a)."""
    state = 0xCBF29CE484222325
    for byte in key.encode():
        state = (state ^ byte) * 0x100000001B3 & _MASK
    return state


def _bits(seed: int, index: np.ndarray) -> np.ndarray:
    """The outputs of splitmix64 of the numbers `index`."""
    with np.errstate(over="ignore"):  # it wraps around by design
        z = index.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64((seed + GOLDEN) & _MASK)
        for shift, factor in MIX:
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        return z ^ (z >> np.uint64(31))


def _polynomial(coefficients: list[float], x: np.ndarray) -> np.ndarray:
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def _root(x: np.ndarray) -> np.ndarray:
    """The square root by Newton's iteration, from half the exponent as a first guess."""
    root = ((x.view(np.int64) >> 1) + _HALF_EXPONENT).view(np.float64)
    for _ in range(4):
        root = (root + x / root) * 0.5
    return root


def _normal(bits: np.ndarray) -> np.ndarray:
    """Box and Muller's transform of the two halves: sqrt(-2 ln u) cos(2 pi v)."""
    u = (bits >> np.uint64(32)).astype(np.float64) + 0.5
    mantissa, exponent = np.frexp(u)
    low = mantissa < math.sqrt(0.5)
    mantissa = np.where(low, mantissa * 2, mantissa)
    exponent = (exponent.astype(np.int64) - low - 32).astype(np.float64)
    s = (mantissa - 1) / (mantissa + 1)
    log = _polynomial(_LOG, s * s) * s + exponent * math.log(2.0)
    v = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    y = (np.abs(v - 0.5) - 0.25) * (2 * math.pi)
    return _root(log * -2.0) * (_polynomial(_SIN, y * y) * y)


def seed_at(key: int, stream: int) -> int:
    """The seed of a stream of a key: output number `stream` of splitmix64 started at the key."""
    return int(_bits(key, np.array(stream)))


def positions(shape: Sequence[int], slices: Sequence[tuple[int, int]]) -> np.ndarray:
    """The row-major index in the global tensor of each element of the slices."""
    local = [stop - start for start, stop in slices]
    place, stride = np.zeros(local, dtype=np.int64), 1
    for dim in reversed(range(len(local))):
        across = [1] * len(local)
        across[dim] = -1
        place += (np.arange(*slices[dim], dtype=np.int64) * stride).reshape(across)
        stride *= shape[dim]
    return place


def uniform(seed: int, place: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), by their positions."""
    return (_bits(seed, place) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def fill(
    kind: str,
    params: Mapping[str, Any],
    shape: Sequence[int],
    slices: Sequence[tuple[int, int]] | None,
    key: str | int,
    dtype: Any = np.float32,
) -> np.ndarray:
    """The slices [start, stop) x ... (None: all) of the tensor of this shape with this key (its
    name, or a seed).

    kind: normal (mean, std), uniform (low, high), integers (low, high), bernoulli (p), constant
    (value), values (data, flat or nested).
    """
    slices = [(0, size) for size in shape] if slices is None else slices
    window = tuple(np.s_[start:stop] for start, stop in slices)
    local = [stop - start for start, stop in slices]
    if kind == "constant":
        return np.full(local, params["value"], dtype=dtype)
    if kind == "values":
        return np.array(params["data"], dtype=dtype).reshape(tuple(shape))[window]
    place, seed = positions(shape, slices), key if isinstance(key, int) else seed_of(key)
    bits = _bits(seed, place)
    if kind == "uniform":
        low, high = float(params.get("low", 0.0)), float(params.get("high", 1.0))
        values = uniform(seed, place) * (high - low) + low
    elif kind == "bernoulli":
        values = uniform(seed, place) < params["p"]
    elif kind == "normal":
        values = _normal(bits) * float(params.get("std", 1.0)) + float(params.get("mean", 0.0))
    elif kind == "integers":  # high is excluded
        low, high = int(params.get("low", 0)), int(params["high"])
        values = (bits >> np.uint64(1)).astype(np.int64) % (high - low) + low
    else:
        raise ValueError(f"unknown distribution {kind!r}")
    if np.dtype(dtype).itemsize == 2:
        values = values.astype(np.float32)  # round in two steps, as the runtime does
    return values.astype(dtype)
