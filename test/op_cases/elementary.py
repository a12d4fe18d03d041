import torch
from support.harness import FLOATS
from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import EVEN, NUMBERS, Case, binary, few, unary
from shardir.dialects import nn

CASES: list[Case] = [
    *binary(nn.PowOp, FLOATS, ("positive", "normal"))[:5],
    Case("ties", nn.PowOp, (EVEN, EVEN), kinds=("ties", "ties")),
    *few(nn.ReciprocalOp, "positive"),
    *unary(nn.SquareOp, NUMBERS, shapes=("odd",)),
    *unary(nn.SqrtOp, kind="positive"),
    *few(nn.RsqrtOp, "positive"),
    *unary(nn.ExpOp),
    *few(nn.Exp2Op),
    *few(nn.Expm1Op),
    *unary(nn.LogOp, kind="positive"),
    *few(nn.Log2Op, "positive"),
    *few(nn.Log1pOp, "positive"),
    *few(nn.SinOp),
    *few(nn.CosOp),
    *few(nn.TanOp, "positive"),
    *few(nn.AtanOp),
    *few(nn.ErfOp),
    *few(nn.ErfcOp),
]


REFERENCES: dict[type[Operation], Reference] = {
    nn.PowOp: lambda op, x, y: torch.pow(x, y),
    nn.ReciprocalOp: lambda op, x: x.reciprocal(),
    nn.SquareOp: lambda op, x: x.square(),
    nn.SqrtOp: lambda op, x: x.sqrt(),
    nn.RsqrtOp: lambda op, x: x.rsqrt(),
    nn.ExpOp: lambda op, x: x.exp(),
    nn.Exp2Op: lambda op, x: x.exp2(),
    nn.Expm1Op: lambda op, x: x.expm1(),
    nn.LogOp: lambda op, x: x.log(),
    nn.Log2Op: lambda op, x: x.log2(),
    nn.Log1pOp: lambda op, x: x.log1p(),
    nn.SinOp: lambda op, x: x.sin(),
    nn.CosOp: lambda op, x: x.cos(),
    nn.TanOp: lambda op, x: x.tan(),
    nn.AtanOp: lambda op, x: x.atan(),
    nn.ErfOp: lambda op, x: x.erf(),
    nn.ErfcOp: lambda op, x: x.erfc(),
}
