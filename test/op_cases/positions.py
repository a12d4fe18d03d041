from harness import FLOATS
from xdsl.ir import Attribute

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import Props, float_attr
from shardir.dialects.text import word


def by(pairing: str, **more: Attribute) -> Props:
    return {"pairing": word(nn.PairingAttr, pairing), "base": float_attr(100.0), **more}


def rotary(name: str, x: Shape, positions: Shape, props: Props, element: str = "i32") -> Case:
    elements = FLOATS if name == "halves" else ("f64",)
    return Case(name, nn.RotaryOp, (x, (element, positions)), elements, props,
                kinds=("normal", "below:9"))  # fmt: skip


def sinusoid(pairing: str, shape: Shape) -> Case:
    return Case(f"{pairing}-{len(shape)}", nn.SinusoidOp, (("i64", shape[:-1]),), FLOATS,
                by(pairing), shape, kinds=("below:9",), gradient=False)  # fmt: skip


CASES: list[Case] = [
    rotary("halves", (2, 5, 6), (5,), by("halves")),
    rotary("interleaved", (2, 3, 4), (2, 1), by("interleaved"), "i64"),
    rotary("back", (3, 2), (3,), by("halves", reverse=nn.UNIT)),
    sinusoid("interleaved", (5, 6)),
    sinusoid("halves", (5, 6)),
    sinusoid("interleaved", (2, 3, 10)),
]
