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
