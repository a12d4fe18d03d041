from xdsl.ir import Attribute

from op_cases.case import EVEN, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import train
from shardir.dialects.nn.base import TensorOp, float_attr


def update(op: type[TensorOp], shape: Shape, **options: float) -> Case:
    operands = (shape,) * (3 if op is train.MomentumOp else 2)
    props: dict[str, Attribute] = {n: float_attr(x) for n, x in options.items()}
    return Case("x".join(map(str, shape)), op, operands, props=props, gradient=False)


CASES: list[Case] = [
    update(train.SgdOp, EVEN, lr=0.1, weight_decay=0.01),
    update(train.SgdOp, ODD, lr=0.1, weight_decay=0.0),
    update(train.MomentumOp, EVEN, lr=0.1, momentum=0.9, weight_decay=0.01),
    update(train.MomentumOp, ODD, lr=0.1, momentum=0.9, weight_decay=0.0),
]
