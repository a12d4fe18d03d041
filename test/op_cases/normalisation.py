from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import float_attr, int_attr


def row(shape: Shape, axis: int) -> list[Case]:
    """Softmax and log-softmax with their gradient ops."""
    name, props = f"{'x'.join(map(str, shape))}-{axis}", {"axis": int_attr(axis)}
    return [
        Case(name, nn.SoftmaxOp, (shape,), props=props),
        Case(name, nn.LogSoftmaxOp, (shape,), props=props),
        Case(name, nn.SoftmaxGradOp, (shape, shape), props=props),
        Case(name, nn.LogSoftmaxGradOp, (shape, shape), props=props, gradient=False),
    ]


def layer_norm(shape: Shape, norm: Shape) -> list[Case]:
    name, props = (
        f"{'x'.join(map(str, shape))}-{'x'.join(map(str, norm))}",
        {"eps": float_attr(1e-5)},
    )
    return [
        Case(name, nn.LayerNormOp, (shape, norm, norm), props=props),
        Case(name, nn.LayerNormGradOp, (shape, norm, shape), props=props, gradient=False),
    ]


CASES: list[Case] = [
    *row((4, 8), -1),
    *row((5, 3), 0),
    *row((2, 4, 6), 1),
    *layer_norm((4, 8), (8,)),
    *layer_norm((3, 5), (5,)),
    *layer_norm((2, 4, 6), (4, 6)),
]
