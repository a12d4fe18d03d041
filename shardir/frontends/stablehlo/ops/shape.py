"""Constants, and ops that move elements."""

from collections.abc import Sequence
from math import prod

import numpy as np

from shardir.build import Value, nn
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation

MAX_CONSTANT = 1 << 16
"""Bounds the elements of a constant in the text that are not all equal."""


def _constant(t: OpTranslation) -> Value:
    values = t["value"]
    if not isinstance(values, np.ndarray):
        t.refuse(f"the numbers {str(values)[:60]}, which can't be read")
    if t.element == "ui64":
        values = values.astype(np.uint64).astype(np.int64)
    if values.size and (values == values.flat[0]).all():
        return t.spread(t.constant(values.flat[0].item()))
    if values.size > MAX_CONSTANT:
        t.refuse(f"a constant of {values.size} numbers; pass it as an argument")
    return t.constant(values)


def _iota(t: OpTranslation) -> Value:
    dim, shape = t["iota_dimension"], t.shape
    column = t.iota((shape[dim], *[1] * (len(shape) - dim - 1)), 0, t.dtype)
    return t.spread(column)


def _broadcast_in_dim(t: OpTranslation, x: Value) -> Value:
    """A broadcast, as a reshape to dimensions of size 1 and a broadcast of numpy's."""
    dims, x = t["broadcast_dimensions"], t.source(x)
    extra = len(t.type(0).shape) - len(x.shape)  # a source lacks leading dimensions of size 1
    column = [1] * len(t.shape)
    for d, n in zip(dims[extra:], x.shape, strict=True):
        column[d] = n
    if list(dims) != sorted(dims):
        t.refuse("a broadcast that permutes dimensions")
    return t.spread(t.reshape(x, tuple(column)))


def _reshape(t: OpTranslation, x: Value) -> Value:
    number = t.number(x)
    if number is not None and prod(t.shape) > 1:
        return t.filled(number, t.shape)
    return t.reshape(x, t.shape)


def _transpose(t: OpTranslation, x: Value) -> Value:
    return t.transpose(x, t["permutation"])


def _slice(t: OpTranslation, x: Value) -> Value:
    return t.slice(x, t["start_indices"], t["limit_indices"], t["strides"])


def _concatenate(t: OpTranslation, *xs: Value) -> Value:
    axis = t["dimension"]
    parts = [x for x in xs if x.shape[axis]] or [xs[0]]
    return parts[0] if len(parts) == 1 else nn.concat(*parts, axis=axis)


def _reverse(t: OpTranslation, x: Value) -> Value:
    return nn.flip(x, dims=tuple(t["dimensions"])) if t["dimensions"] else x


def pad(
    t: OpTranslation, x: Value, low: Sequence[int], high: Sequence[int], interior: Sequence[int],
    value: float = 0,
) -> Value:  # fmt: skip
    """Pad, also between elements; negative numbers remove elements at the ends."""
    high = list(high)
    for d, between in enumerate(interior):
        n = x.shape[d]
        if not between or n <= 1:
            continue
        shape = x.shape
        column = t.reshape(x, (*shape[: d + 1], 1, *shape[d + 1 :]))
        after = [0] * len(column.shape)
        after[d + 1] = between
        wide = _padded(column, [0] * len(after), after, value)
        x = t.reshape(wide, (*shape[:d], n * (between + 1), *shape[d + 1 :]))
        high[d] -= between
    return _padded(x, low, high, value)


def _padded(x: Value, low: Sequence[int], high: Sequence[int], value: float) -> Value:
    if not any(low) and not any(high):
        return x
    if isinstance(value, int) and int(float(value)) != value:  # the filling of nn.pad is an f64
        return nn.xor(_padded(nn.xor(x, value), low, high, 0), value)
    return nn.pad(x, low=tuple(low), high=tuple(high), value=float(value) if value else None)


def _pad(t: OpTranslation, x: Value, value: Value) -> Value:
    padding = t["edge_padding_low"], t["edge_padding_high"], t["interior_padding"]
    return pad_by(t, x, *padding, value)


def pad_by(
    t: OpTranslation, x: Value, low: Sequence[int], high: Sequence[int], interior: Sequence[int],
    value: Value,
) -> Value:  # fmt: skip
    """Pad with a value, which need not be known."""
    padding, number = (low, high, interior), t.number(value)
    if not any(map(any, padding)):
        return x
    if x.dtype == "i1":
        inside = pad(t, x.to("i32"), *padding, int(bool(number)))
        if number is not None:
            return nn.compare(inside, 0, how="ne")
    if number is not None:
        return pad(t, x, *padding, number)
    ones = pad(t, t.filled(1, x.shape, "i32"), *padding)
    return nn.select(nn.compare(ones, 0, how="ne"), pad(t, x, *padding), value)


TABLE: dict[str, HloEntry] = {
    "stablehlo.constant": _constant,
    "chlo.constant": _constant,
    "stablehlo.iota": _iota,
    "stablehlo.broadcast_in_dim": _broadcast_in_dim,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": _transpose,
    "stablehlo.slice": _slice,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.reverse": _reverse,
    "stablehlo.pad": _pad,
}
