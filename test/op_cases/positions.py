from typing import Any

import torch
from support.harness import FLOATS
from support.reference import Reference, shape_of
from xdsl.dialects import builtin
from xdsl.ir import Attribute, Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import Props
from shardir.dialects.nn.properties import float_attr
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


def _turns(op: Any, positions: torch.Tensor, d: int) -> torch.Tensor:
    """e^(i angle) of each pair, [.., d / 2], in the precision of the interpreter's angles."""
    t = op.out.type.element_type
    dtype = torch.float64 if t == builtin.f64 else torch.float32
    frequencies = op.base.value.data ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = positions[..., None].to(dtype) * frequencies.to(dtype)
    return torch.polar(torch.ones_like(angles).double(), angles.double())


def _rotary(op: nn.RotaryOp, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """By multiplication with complex numbers."""
    turns, halves = _turns(op, positions, x.shape[-1]), op.pairing.data == "halves"
    pairs = x.unflatten(-1, (2, -1)).mT if halves else x.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * (turns.conj() if op.reverse else turns)
    out = torch.view_as_real(turned)
    return (out.mT if halves else out).flatten(-2)


def _sinusoid(op: nn.SinusoidOp, positions: torch.Tensor) -> torch.Tensor:
    turns = _turns(op, positions, shape_of(op.out)[-1])
    return torch.stack([turns.imag, turns.real], -2 if op.pairing.data == "halves" else -1).flatten(
        -2
    )


REFERENCES: dict[type[Operation], Reference] = {
    nn.RotaryOp: _rotary,
    nn.SinusoidOp: _sinusoid,
}
