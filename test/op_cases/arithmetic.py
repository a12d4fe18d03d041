import torch
from support.harness import FLOATS, INTEGERS
from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import ALL, COLUMN, EVEN, NUMBERS, ODD, ROW, SCALAR, Case, binary, few, unary
from shardir.dialects import nn

CASES: list[Case] = [
    *binary(nn.AddOp, NUMBERS),
    *binary(nn.SubOp, NUMBERS),
    *binary(nn.MulOp, NUMBERS),
    *binary(nn.DivOp, FLOATS, ("normal", "positive")),
    *binary(nn.RemainderOp, NUMBERS, ("normal", "positive"))[:3],
    Case("negative", nn.RemainderOp, (("f64", EVEN), ("f64", EVEN)), ("f64",)),
    *(
        Case(n, nn.LerpOp, shapes)
        for n, shapes in (
            ("even", (EVEN, EVEN, EVEN)),
            ("odd", (ODD, ODD, SCALAR)),
            ("broadcast", (COLUMN, ROW, EVEN)),
        )
    ),
    *binary(nn.MaxOp, ALL, ("ties", "ties")),
    *binary(nn.MinOp, ALL, ("ties", "ties"))[:4],
    *binary(nn.QuotientOp, INTEGERS, ("normal", "positive"))[:3],
    *unary(nn.NegOp, NUMBERS),
    *unary(nn.AbsOp, NUMBERS, "ties", shapes=("odd",)),
    *unary(nn.SignOp, NUMBERS, "ties", shapes=("odd",)),
    *(
        case
        for op in (nn.FloorOp, nn.CeilOp, nn.RoundOp, nn.TruncOp)
        for case in (*few(op), *few(op, "halves", "halves-"))
    ),
]


REFERENCES: dict[type[Operation], Reference] = {
    nn.AddOp: lambda op, x, y: x + y,
    nn.SubOp: lambda op, x, y: x - y,
    nn.MulOp: lambda op, x, y: x * y,
    nn.DivOp: lambda op, x, y: x / y,
    nn.RemainderOp: lambda op, x, y: torch.remainder(x, y),
    nn.LerpOp: lambda op, x, y, weight: torch.lerp(x, y, weight),
    nn.MaxOp: lambda op, x, y: torch.maximum(x, y),
    nn.MinOp: lambda op, x, y: torch.minimum(x, y),
    nn.QuotientOp: lambda op, x, y: torch.div(x, y, rounding_mode="trunc"),
    nn.NegOp: lambda op, x: -x,
    nn.AbsOp: lambda op, x: x.abs(),
    nn.SignOp: lambda op, x: x.sign(),
    nn.FloorOp: lambda op, x: x.floor(),
    nn.CeilOp: lambda op, x: x.ceil(),
    nn.RoundOp: lambda op, x: x.round(),
    nn.TruncOp: lambda op, x: x.trunc(),
}
