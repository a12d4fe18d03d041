"""Element types, types of tensors, and constants, as MLIR's text."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from typing import Any

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute

from shardir.algebra.layout import Shape
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import element_name

NUMPY: Mapping[str, Any] = {
    "f64": np.float64, "f32": np.float32, "bf16": np.float32, "f16": np.float32, "i64": np.int64,
    "i32": np.int32, "i1": np.bool_, "ui64": np.uint64, "ui32": np.uint32, "ui16": np.uint16,
}  # fmt: skip
"""The type in which numpy computes each element type."""

ELEMENTS: Mapping[Any, str] = {
    np.dtype(kind): name for name, kind in NUMPY.items() if name not in ("bf16", "f16")
}
"""The element type of each type of numpy."""

FLOATS = ("f64", "f32", "bf16", "f16")
NARROW = ("bf16", "f16")

MAX_LISTED = 64
"""The maximum number of elements that a constant lists; a larger one is the bytes of its elements,
as in MLIR's own text."""


def element_of(t: Attribute) -> str:
    """The element type of a tensor, by name."""
    assert isinstance(t, TensorType)
    return element_name(t.element_type)


def type_text(shape: Sequence[int], element: str) -> str:
    return f"tensor<{'x'.join([*map(str, shape), element])}>"


def number_text(x: Any, element: str) -> str:
    """The literal of an element."""
    if element == "i1":
        return "true" if x else "false"
    if element not in FLOATS:
        return str(int(x))
    number = float(x)
    if not isfinite(number):
        bits = {"f64": 11, "f32": 8, "bf16": 8, "f16": 5}[element]
        width = {"f64": 64, "f32": 32}.get(element, 16)
        pattern = ((1 << bits) - 1) << (width - 1 - bits)
        if isnan(number):
            pattern |= 1 << (width - 2 - bits)
        elif number < 0:
            pattern |= 1 << (width - 1)
        return f"0x{pattern:0{width // 4}X}"
    text = repr(float(np.float32(number)) if element != "f64" else number)
    if element == "f32":
        text = str(np.float32(number))
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{e}{exponent}"


def dense_text(values: Array, element: str) -> str:
    """The literal of a constant."""
    if not values.size:
        return "dense<>"
    if values.size and (values == values.flat[0]).all() and not _mixes_zeros(values):
        return f"dense<{number_text(values.flat[0], element)}>"
    if values.size <= MAX_LISTED or element in ("i1", "bf16", "f16"):
        return f"dense<{_nested(values, element)}>"
    data = np.ascontiguousarray(values, NUMPY[element]).tobytes()
    return f'dense<"0x{data.hex().upper()}">'


def _mixes_zeros(values: Array) -> bool:
    return bool(values.dtype.kind == "f" and len({*np.signbit(values).flat}) > 1)


def _nested(values: Array, element: str) -> str:
    if values.ndim == 0:
        return number_text(values.item(), element)
    return f"[{', '.join(_nested(v, element) for v in values)}]"


def ints_text(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values))}]"


def array_text(values: Sequence[int]) -> str:
    """The text of an attribute of integers."""
    return f"array<i64: {', '.join(map(str, values))}>" if values else "array<i64>"


def strides_of(shape: Shape) -> list[int]:
    """The row-major strides of a shape, in elements."""
    out, stride = [], 1
    for n in reversed(shape):
        out.append(stride)
        stride *= n
    return out[::-1]
