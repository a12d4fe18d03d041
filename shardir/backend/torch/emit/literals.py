"""Numbers in a program: folding of constant scalars, and literals."""

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Operation, SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.creation import dense_values
from shardir.dialects.nn.types import element_name

Number = float | int | bool

FOLDED = (nn.ConstantOp, nn.MulOp, nn.NegOp, nn.ConvertOp, nn.ReshapeOp, nn.StopGradientOp)


def fold(op: Operation, known: dict[SSAValue, Number]) -> Number | None:
    """Return the value of a scalar that follows from constants, rounded to its type; else None."""
    if not isinstance(op, FOLDED):
        return None
    out = op.results[0].type
    if not isinstance(out, TensorType) or out.get_shape():
        return None
    element = element_name(out.element_type)
    if isinstance(op, nn.ConstantOp):
        number = dense_values(op.value).item()
        return round_to(number, element) if isinstance(number, float) else number
    numbers = [known.get(v) for v in op.operands]
    if element.startswith("i") or not all(isinstance(n, float) for n in numbers):
        return None
    a, *others = (float(n) for n in numbers if n is not None)
    match op:
        case nn.MulOp():
            return round_to(a * others[0], element)
        case nn.NegOp():
            return -a
        case _:
            return round_to(a, element)


def float_text(number: float) -> str:
    """A float as an expression of Python, which has no literals of infinities and NaN."""
    return repr(number) if np.isfinite(number) else f'float("{number}")'


def number_text(number: float | int, element: str) -> str:
    """A number as a literal of Python, rounded to the element type."""
    if isinstance(number, bool) or element == "i1":
        return str(bool(number))
    if element.startswith("i"):
        return str(int(number))
    rounded = round_to(float(number), element)
    if not np.isfinite(rounded):
        return float_text(rounded)
    short = str(np.float32(rounded)) if element == "f32" else repr(rounded)
    beyond = element == "f32" and abs(float(short)) > float(np.finfo(np.float32).max)
    return repr(rounded) if beyond else short


def round_to(number: float, element: str) -> float:
    """Round a number to an element type."""
    with np.errstate(over="ignore"):
        if element == "f16":
            return float(np.float16(number))
        if element == "f32":
            return float(np.float32(number))
        if element == "bf16" and np.isfinite(number):
            bits = int(np.float32(number).view(np.uint32))
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            return float(np.uint32(bits).view(np.float32))
    return number
