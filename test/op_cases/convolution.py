from op_cases.case import FLOATS, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.convolution import convolved
from shardir.dialects.nn.movement import IntsPerDimAttr


def conv(
    x: Shape, w: Shape, stride: Shape = (), padding: Shape = (), dilation: Shape = (),
    elements: tuple[str, ...] = ("f64",),
) -> list[Case]:  # fmt: skip
    """A convolution, its transposed and its weight's gradient."""
    given = {"stride": stride, "padding": padding, "dilation": dilation}
    props = {n: IntsPerDimAttr(v) for n, v in given.items() if v}
    y = convolved(x, w, props)
    name = f"{'x'.join(map(str, x))}-{'x'.join(map(str, w))}" + "".join(
        f"-{n[0]}{','.join(map(str, v))}" for n, v in given.items() if v
    )
    return [
        Case(name, nn.ConvOp, (x, w), elements, props),
        Case(name, nn.ConvTransposeOp, (y, w), elements, props, result=x),
        Case(name, nn.ConvWeightOp, (x, y), elements, props, result=w),
    ]


CASES: list[Case] = [
    *conv((2, 4, 8), (6, 4, 3), padding=(1, 1), elements=FLOATS),
    *conv((3, 2, 7), (3, 2, 3), stride=(2,), padding=(0, 2)),
    *conv((2, 3, 11), (2, 3, 2), stride=(3,), padding=(1, 0), dilation=(2,)),
    *conv((2, 4, 6), (8, 2, 3), padding=(1, 1)),
    *conv((2, 4, 5), (4, 1, 2)),
    *conv((1, 3, 5), (6, 1, 1)),
    *conv((2, 2, 3), (2, 2, 3), padding=(4, 4), stride=(2,)),
    *conv((2, 2, 5, 6), (4, 2, 3, 2), stride=(1, 2), padding=(1, 1, 0, 1), elements=("f32",)),
    *conv((1, 1, 9, 4), (1, 1, 2, 1), stride=(4, 1)),
    *conv((2, 1, 4, 3, 2), (2, 1, 2, 2, 1), padding=(1, 1, 0, 0, 0, 0)),
    *conv((0, 2, 4), (2, 2, 2)),
    *conv((2, 0, 4), (2, 0, 2)),
]
