import torch
from support.reference import Reference
from torch.nn import functional
from xdsl.ir import Operation

from op_cases.case import EVEN, ODD, Case, few, unary
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp


def activation_grad(op: type[TensorOp], kind: str = "normal", gradient: bool = False) -> list[Case]:
    return [
        Case(n, op, (s, s), kinds=(kind, "normal"), gradient=gradient)
        for n, s in {"even": EVEN, "odd": ODD}.items()
    ]


EXACT = {"exact": nn.UNIT}


CASES: list[Case] = [
    *unary(nn.ReluOp),
    *unary(nn.TanhOp),
    *unary(nn.SigmoidOp),
    *few(nn.SiluOp),
    *unary(nn.GeluOp),
    Case("exact", nn.GeluOp, (ODD,), props=EXACT),
    *few(nn.SoftplusOp),
    *few(nn.LeakyReluOp, "ties", slope=0.125),
    *few(nn.EluOp, alpha=0.75),
    *few(nn.EluOp, "ties", "ties-", alpha=1.0),
    *few(nn.HardtanhOp, "ties", min=-1.0, max=0.5),
    *few(nn.HardtanhOp, "normal", "relu6-", min=0.0, max=6.0),
    *activation_grad(nn.ReluGradOp, "ties", gradient=True),
    *activation_grad(nn.TanhGradOp, gradient=True),
    *activation_grad(nn.SigmoidGradOp, gradient=True),
    *activation_grad(nn.SiluGradOp),
    *activation_grad(nn.GeluGradOp),
    Case("exact", nn.GeluGradOp, (ODD, ODD), props=EXACT, gradient=False),
]


aten = torch.ops.aten


REFERENCES: dict[type[Operation], Reference] = {
    nn.ReluOp: lambda op, x: x.relu(),
    nn.ReluGradOp: lambda op, x, dy: aten.threshold_backward(dy, x, 0),
    nn.TanhOp: lambda op, x: x.tanh(),
    nn.TanhGradOp: lambda op, y, dy: aten.tanh_backward(dy, y),
    nn.SigmoidOp: lambda op, x: x.sigmoid(),
    nn.SigmoidGradOp: lambda op, y, dy: aten.sigmoid_backward(dy, y),
    nn.SiluOp: lambda op, x: functional.silu(x),
    nn.SiluGradOp: lambda op, x, dy: aten.silu_backward(dy, x),
    nn.GeluOp: lambda op, x: functional.gelu(x, approximate="none" if op.exact else "tanh"),
    nn.GeluGradOp: lambda op, x, dy: aten.gelu_backward(
        dy, x, approximate="none" if op.exact else "tanh"
    ),
    nn.SoftplusOp: lambda op, x: functional.softplus(x),
    nn.LeakyReluOp: lambda op, x: functional.leaky_relu(x, op.slope.value.data),
    nn.EluOp: lambda op, x: functional.elu(x, op.alpha.value.data),
    nn.HardtanhOp: lambda op, x: functional.hardtanh(x, op.min.value.data, op.max.value.data),
}
