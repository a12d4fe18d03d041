from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import EVEN, ODD, Case, statistic
from shardir.dialects import nn

CASES: list[Case] = [
    statistic(nn.LogsumexpOp, EVEN, 1),
    statistic(nn.LogsumexpOp, ODD, 0, keep=True),
    statistic(nn.LogsumexpOp, (3, 4, 5), -1, 0),
    statistic(nn.VarOp, EVEN, 1, correction=1),
    statistic(nn.VarOp, (3, 4, 5), 0, 2, correction=0, keep=True),
    statistic(nn.StdOp, EVEN, 0, 1, correction=1),
    statistic(nn.StdOp, ODD, 0, correction=0, keep=True),
    statistic(nn.StdOp, (4, 2), 1, correction=0, kind="ties"),
]


REFERENCES: dict[type[Operation], Reference] = {
    nn.LogsumexpOp: lambda op, x: x.logsumexp(op.dims.data, keepdim=op.keep is not None),
    nn.VarOp: lambda op, x: x.var(
        op.dims.data, correction=op.correction.value.data, keepdim=op.keep is not None
    ),
    nn.StdOp: lambda op, x: x.std(
        op.dims.data, correction=op.correction.value.data, keepdim=op.keep is not None
    ),
}
