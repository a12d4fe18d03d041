import torch
from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_attr


def row(shape: Shape, axis: int) -> list[Case]:
    """Softmax and log-softmax with their gradient ops."""
    name, props = f"{'x'.join(map(str, shape))}-{axis}", {"axis": int_attr(axis)}
    return [
        Case(name, nn.SoftmaxOp, (shape,), props=props),
        Case(name, nn.LogSoftmaxOp, (shape,), props=props),
        Case(name, nn.SoftmaxGradOp, (shape, shape), props=props),
        Case(name, nn.LogSoftmaxGradOp, (shape, shape), props=props, gradient=False),
    ]


CASES: list[Case] = [
    *row((4, 8), -1),
    *row((5, 3), 0),
    *row((2, 4, 6), 1),
]


aten = torch.ops.aten


REFERENCES: dict[type[Operation], Reference] = {
    nn.SoftmaxOp: lambda op, x: x.softmax(op.axis.value.data),
    nn.SoftmaxGradOp: lambda op, y, dy: aten._softmax_backward_data(
        dy, y, op.axis.value.data, y.dtype
    ),
    nn.LogSoftmaxOp: lambda op, x: x.log_softmax(op.axis.value.data),
    nn.LogSoftmaxGradOp: lambda op, y, dy: aten._log_softmax_backward_data(
        dy, y, op.axis.value.data, y.dtype
    ),
}
