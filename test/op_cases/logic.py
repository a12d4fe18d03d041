import torch
from support.harness import INTEGERS
from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import ALL, COLUMN, EVEN, ODD, ROW, SCALAR, Case, binary, unary
from shardir.dialects import nn
from shardir.dialects.text import word

CASES: list[Case] = [
    *(case for op in (nn.AndOp, nn.OrOp, nn.XorOp) for case in binary(op, ("i1", *INTEGERS))[1:3]),
    *(
        case
        for op in (nn.ShiftLeftOp, nn.ShiftRightOp)
        for case in binary(op, INTEGERS, ("normal", "below:31"))[:3]
    ),
    *unary(nn.NotOp, ("i1", *INTEGERS), shapes=("odd",)),
    *(
        case
        for op in (nn.IsnanOp, nn.IsinfOp, nn.IsfiniteOp)
        for case in unary(op, shapes=("odd",), gradient=False)
    ),
    *(
        Case(
            f"{how}-{n}",
            nn.CompareOp,
            shapes,
            ALL,
            {"how": word(nn.ComparisonAttr, how)},
            kinds=("ties", "ties"),
            gradient=False,
        )
        for how, n, shapes in (
            ("eq", "even", (EVEN, EVEN)),
            ("ne", "odd", (ODD, ODD)),
            ("lt", "row", (EVEN, ROW)),
            ("le", "column", (COLUMN, EVEN)),
            ("gt", "scalar", (EVEN, SCALAR)),
            ("ge", "outer", ((3, 1), (1, 7))),
        )
    ),
]


COMPARE = {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip


REFERENCES: dict[type[Operation], Reference] = {
    nn.AndOp: lambda op, x, y: x & y,
    nn.OrOp: lambda op, x, y: x | y,
    nn.XorOp: lambda op, x, y: x ^ y,
    nn.ShiftLeftOp: lambda op, x, y: x << y,
    nn.ShiftRightOp: lambda op, x, y: x >> y,
    nn.NotOp: lambda op, x: ~x,
    nn.IsnanOp: lambda op, x: x.isnan(),
    nn.IsinfOp: lambda op, x: x.isinf(),
    nn.IsfiniteOp: lambda op, x: x.isfinite(),
    nn.CompareOp: lambda op, x, y: COMPARE[op.how.data](x, y),
}
