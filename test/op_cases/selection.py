from typing import Any

import torch
from support.harness import FLOATS
from support.reference import Reference, dtype_of
from xdsl.ir import Operation

from op_cases.case import ALL, COLUMN, EVEN, ODD, ROW, SCALAR, Case, few, unary
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.nn.types import element_name, unsharded_type


def triangle(op: type[TensorOp], shape: Shape, diagonal: int) -> Case:
    name = f"{'x'.join(map(str, shape))}-{diagonal}"
    return Case(name, op, (shape,), ALL, {"diagonal": int_attr(diagonal)})


def convert(source: str, target: str, shape: Shape) -> Case:
    floats = source in FLOATS and target in FLOATS
    return Case(
        f"{source}->{target}-{'x'.join(map(str, shape))}",
        nn.ConvertOp,
        ((source, shape),),
        (source,),
        result=shape,
        result_element=target,
        gradient=floats,
        kinds=("ties",) if target == "i1" else (),
    )


def bitcast(source: str, target: str, shape: Shape, kind: str = "normal") -> Case:
    return Case(
        f"{source}->{target}",
        nn.BitcastOp,
        (shape,),
        (source,),
        result=shape,
        result_element=target,
        gradient=False,
        kinds=(kind,),
    )


def select(name: str, *shapes: Shape) -> Case:
    condition, *others = shapes
    return Case(name, nn.SelectOp, (("i1", condition), *others), ALL)


CASES: list[Case] = [
    *few(nn.ClampOp, "ties", "both-", min=-0.5, max=1.0),
    *few(nn.ClampOp, "ties", "min-", min=0.0),
    *few(nn.ClampOp, "normal", "max-", max=0.5),
    *few(nn.NanToNumOp, nan=0.5, posinf=100.0, neginf=-100.0),
    triangle(nn.TrilOp, EVEN, 0),
    triangle(nn.TrilOp, ODD, -1),
    triangle(nn.TriuOp, ODD, 1),
    triangle(nn.TriuOp, (2, 3, 4), 0),
    *unary(nn.StopGradientOp, ALL),
    Case("even", nn.StraightThroughOp, (EVEN, EVEN), FLOATS),
    select("even", EVEN, EVEN, EVEN),
    select("odd", ODD, ODD, ODD),
    select("broadcast", COLUMN, ROW, SCALAR),
    select("rows", (3,), ODD, (1, 3)),
    *(convert(s, t, EVEN) for s in ALL for t in ALL if s != t),
    convert("f64", "f32", ODD),
    bitcast("f64", "i64", ODD),
    bitcast("f32", "i32", EVEN),
    bitcast("f16", "i32", ODD),
    bitcast("bf16", "i32", EVEN),
    bitcast("i64", "f64", EVEN),
    bitcast("i32", "f32", ODD),
    bitcast("i32", "f16", EVEN, "below:30000"),
    bitcast("i32", "bf16", ODD, "below:30000"),
]


def _convert(op: nn.ConvertOp, x: torch.Tensor) -> torch.Tensor:
    return x.to(dtype_of(op.out))


NARROW = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def _bitcast(op: nn.BitcastOp, x: torch.Tensor) -> torch.Tensor:
    """Other references are in double precision; here the bits are those of the type."""
    source, target = (
        NARROW.get(element_name(unsharded_type(v).element_type), dtype_of(v))
        for v in (op.x, op.out)
    )
    x = x.to(source)
    if source.itemsize == target.itemsize:
        out = x.view(target)
        return out.double() if target.is_floating_point else out
    if source.is_floating_point:
        return x.view(torch.uint16).to(target)
    return x.to(torch.uint16).view(target).double()


def _clamp(op: nn.ClampOp, x: torch.Tensor) -> torch.Tensor:
    """Clamp, with a gradient at the bounds, which torch has before 2.14 alone."""
    low, high = (None if p is None else p.value.data for p in (op.min, op.max))
    y = x.detach().clamp(low, high)
    return torch.where(y == x, x, y)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(dy[0]), dy[0]


REFERENCES: dict[type[Operation], Reference] = {
    nn.ClampOp: _clamp,
    nn.NanToNumOp: lambda op, x: x.nan_to_num(
        op.nan.value.data, op.posinf.value.data, op.neginf.value.data
    ),
    nn.TrilOp: lambda op, x: x.tril(op.diagonal.value.data),
    nn.TriuOp: lambda op, x: x.triu(op.diagonal.value.data),
    nn.SelectOp: lambda op, c, x, y: torch.where(c, x, y),
    nn.ConvertOp: _convert,
    nn.BitcastOp: _bitcast,
    nn.StopGradientOp: lambda op, x: x.detach(),
    nn.StraightThroughOp: lambda op, x, history: _StraightThrough.apply(x, history),
}
