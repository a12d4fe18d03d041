from typing import Any

import torch
from support.reference import Reference, shape_of
from torch.nn import functional
from xdsl.ir import Operation

from op_cases.case import FLOATS, INTEGERS, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.convolution import convolved_shape
from shardir.dialects.nn.movement import IntsPerDimAttr


def conv(
    x: Shape, w: Shape, stride: Shape = (), padding: Shape = (), dilation: Shape = (),
    elements: tuple[str, ...] = ("f64",),
) -> list[Case]:  # fmt: skip
    """A convolution, its transposed and its weight's gradient."""
    given = {"stride": stride, "padding": padding, "dilation": dilation}
    props = {n: IntsPerDimAttr(v) for n, v in given.items() if v}
    y = convolved_shape(x, w, props)
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
    *conv((2, 2, 7), (4, 1, 2), stride=(2,), padding=(1, 0), dilation=(2,), elements=INTEGERS)[:1],
]


def _conv(op: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found = op.slides()
    padded = functional.pad(x, [n for s in reversed(found) for n in (s.low, s.high)])
    if not (x.numel() and w.numel()):
        return x.sum() + w.sum() + x.new_zeros(shape_of(op.ends(op.operands, op.results)[2]))
    call = getattr(functional, f"conv{len(found)}d")
    stride, dilation = [s.stride for s in found], [s.dilation for s in found]
    if x.dtype == torch.int32:  # torch lacks kernels with dilation
        padded, w = padded.long(), w.long()
    return call(padded, w, None, stride, 0, dilation, padded.shape[1] // w.shape[1]).to(x.dtype)


def _conv_transpose(op: Any, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(shape_of(op.out), dtype=y.dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(_conv(op, x, w), [x], y, create_graph=True)[0]


def _conv_weight(op: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    w = torch.zeros(shape_of(op.out), dtype=y.dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(_conv(op, x, w), [w], y, create_graph=True)[0]


REFERENCES: dict[type[Operation], Reference] = {
    nn.ConvOp: _conv,
    nn.ConvTransposeOp: _conv_transpose,
    nn.ConvWeightOp: _conv_weight,
}
