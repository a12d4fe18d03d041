"""Cases of some ops of nn, from which random programs draw."""

from shardir.dialects import nn
from shardir.dialects.nn.properties import dims_attr, int_attr
from shardir.dialects.text import word
from shardir.testing.cases import Case

F64 = ("f64",)
EVEN, ODD = (4, 8), (5, 3)
SUM = word(nn.ReductionKindAttr, "sum")

NN_CASES = [
    *(
        Case("even", op, (EVEN,), F64)
        for op in (nn.TanhOp, nn.SigmoidOp, nn.NegOp, nn.SquareOp, nn.GeluOp, nn.ReluOp)
    ),
    *(Case("even", op, (EVEN, EVEN), F64) for op in (nn.AddOp, nn.SubOp, nn.MulOp)),
    Case("row", nn.AddOp, (EVEN, (8,)), F64),
    Case("odd", nn.MulOp, (ODD, ODD), F64),
    Case("even", nn.MatmulOp, ((4, 8), (8, 4)), F64),
    Case("odd", nn.MatmulOp, ((3, 5), (5, 7)), F64),
    Case("batched", nn.MatmulOp, ((4, 2, 4), (4, 4, 6)), F64),
    Case("swapped", nn.TransposeOp, (EVEN,), F64, {"perm": dims_attr(1, 0)}),
    Case("turned", nn.TransposeOp, ((2, 3, 4),), F64, {"perm": dims_attr(1, 2, 0)}),
    Case("rows", nn.ReduceOp, (EVEN,), F64, {"kind": SUM, "dims": dims_attr(0)}),
    Case("rows", nn.SoftmaxOp, (EVEN,), F64, {"axis": int_attr(-1)}),
    Case("joined", nn.ReshapeOp, ((2, 3, 4),), F64, result=(6, 4)),
    Case("split", nn.ReshapeOp, (EVEN,), F64, result=(4, 2, 4)),
]
