from harness import FLOATS
from reference import Reference
from xdsl.ir import Attribute, Operation

from op_cases.case import EVEN, NUMBERS, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import dims_attr, int_attr


def statistic(
    op: type[TensorOp], shape: Shape, *dims: int, keep: bool = False, kind: str = "normal",
    **numbers: int,
) -> Case:  # fmt: skip
    """An op that needs its dimensions unsharded."""
    props: dict[str, Attribute] = {n: int_attr(x) for n, x in numbers.items()}
    if dims:
        props["dims"] = dims_attr(*dims)
    if keep:
        props["keep"] = nn.UNIT
    name = f"{kind}-{'x'.join(map(str, shape))}-{','.join(map(str, dims))}{'-keep' * keep}"
    arg = "axis" in numbers
    elements = NUMBERS if arg else FLOATS
    return Case(name, op, (shape,), elements, props, kinds=(kind,), gradient=not arg)


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
