from op_cases.case import EVEN, ODD, Case
from op_cases.elementwise import few, unary
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
