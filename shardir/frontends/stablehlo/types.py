"""Element types of StableHLO: ours, and the integers that wrap in a wider one."""

from collections.abc import Mapping

from shardir.build import Value, nn

DTYPES: Mapping[str, str] = {
    "f64": "f64", "f32": "f32", "bf16": "bf16", "f16": "f16", "i64": "i64", "i32": "i32",
    "i1": "i1", "i16": "i32", "i8": "i32", "ui16": "i32", "ui8": "i32", "ui32": "i64",
    "ui64": "i64", "i4": "i32", "ui4": "i32", "i2": "i32", "ui2": "i32",
}  # fmt: skip
"""Our element type of each of StableHLO. Small and unsigned integers are in a wider type, and wrap
where an op may leave their range. Those of ui64 have their bits in i64: ops that read them as
numbers are refused where they may be 2^63 or more."""

RANGES: Mapping[str, tuple[int, int]] = {
    "i16": (-(2**15), 2**16), "i8": (-(2**7), 2**8), "ui16": (0, 2**16), "ui8": (0, 2**8),
    "ui32": (0, 2**32), "i4": (-8, 16), "ui4": (0, 16), "i2": (-2, 4), "ui2": (0, 4),
}  # fmt: skip
"""The least number of such an integer type, and how many it has."""

WIDTHS: Mapping[str, int] = {
    "i64": 64, "i32": 32, "i16": 16, "i8": 8, "ui16": 16, "ui8": 8, "ui32": 32, "ui64": 64,
    "f64": 64, "f32": 32, "f16": 16, "bf16": 16, "i4": 4, "ui4": 4, "i2": 2, "ui2": 2,
}  # fmt: skip
"""The bits of each type."""

BITS: Mapping[str, int] = {"i64": 64, "i32": 32}
"""The bits of our integer types."""

UNSIGNED = frozenset(("ui2", "ui4", "ui8", "ui16", "ui32", "ui64"))


def is_float(element: str) -> bool:
    return element in ("f64", "f32", "bf16", "f16")


def wrap(x: Value, element: str) -> Value:
    """Return numbers modulo those of an integer type, in its range."""
    if element not in RANGES:
        return x
    low, count = RANGES[element]
    if low == 0:
        return nn.and_(x, count - 1)
    return nn.and_(x - low, count - 1) + low


def in_order_of(x: Value, element: str) -> Value:
    """Return numbers whose order as i64 is that of the element type: those of ui64 with the other
    sign bit. Applied to its result, it is undone."""
    return nn.xor(x, -(2**63)) if element == "ui64" else x


def shifted_right(x: Value, amount: Value | int, width: int) -> Value:
    """Return numbers of `width` bits, shifted to the right with zeros at the left. Those of 32 bits
    and less are not negative then; those of 64 bits are if the amount is 0."""
    if width == 64:
        bits = BITS[x.dtype]
        if isinstance(amount, int):
            return nn.and_(nn.shift_right(x, amount), 2 ** (bits - amount) - 1) if amount else x
        mask = nn.not_(nn.shift_left(nn.shift_right(_least(x), amount), 1))
        return nn.and_(nn.shift_right(x, amount), mask)
    unsigned = nn.and_(x.to("i64"), 2**width - 1)
    out = nn.shift_right(unsigned, amount if isinstance(amount, int) else amount.to("i64"))
    return out if x.dtype == "i64" else out.to(x.dtype)


def _least(x: Value) -> Value:
    return x.function.constant(-(2**63), dtype="i64")
