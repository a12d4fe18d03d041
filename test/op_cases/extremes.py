from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import EVEN, ODD, Case, statistic
from shardir.dialects import nn

CASES: list[Case] = [
    statistic(nn.ArgmaxOp, EVEN, axis=1, kind="ties"),
    statistic(nn.ArgmaxOp, (3, 4, 5), axis=0, keep=True),
    statistic(nn.ArgmaxOp, (5,), axis=-1, kind="ties"),
    statistic(nn.ArgminOp, ODD, axis=0, kind="ties"),
    statistic(nn.ArgminOp, (2, 6), axis=1, keep=True, kind="ties"),
]


REFERENCES: dict[type[Operation], Reference] = {
    nn.ArgmaxOp: lambda op, x: x.argmax(op.axis.value.data, keepdim=op.keep is not None),
    nn.ArgminOp: lambda op, x: x.argmin(op.axis.value.data, keepdim=op.keep is not None),
}
