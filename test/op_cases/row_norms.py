from typing import Any

import torch
from support.reference import Reference
from torch.nn import functional
from xdsl.ir import Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_attr


def row_norm(
    kind: type[nn.RowNorm], gradient: type[nn.RowNormGrad], shape: Shape, row: Shape
) -> list[Case]:
    name = f"{'x'.join(map(str, shape))}-{'x'.join(map(str, row))}"
    props = {"eps": float_attr(1e-5)}
    statistics = len(gradient.STATISTICS)
    operands = (shape, *[row] * statistics)

    def of_gradient(name: str, element: str, elements: tuple[str, ...]) -> Case:
        given = (shape, row, shape, *[(element, shape[: -len(row)])] * statistics)
        return Case(name, gradient, given, elements, gradient=False)

    return [
        Case(name, kind, operands, props=props),
        Case(f"{name}-statistics", kind, operands, props=props | {"statistics": nn.UNIT},
             gradient=False),
        of_gradient(name, "f64", ("f64",)),
        of_gradient(f"{name}-narrow", "f32", ("f32", "bf16", "f16")),
    ]  # fmt: skip


CASES: list[Case] = [
    case
    for kinds in ((nn.LayerNormOp, nn.LayerNormGradOp), (nn.RmsNormOp, nn.RmsNormGradOp))
    for shape, row in (((4, 8), (8,)), ((3, 5), (5,)), ((2, 4, 6), (4, 6)))
    for case in row_norm(*kinds, shape, row)
]


def _layer_norm(op: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    out = functional.layer_norm(x, w.shape, w, b, op.eps.value.data)
    if op.statistics is None:
        return out
    var, mean = torch.var_mean(x.flatten(x.ndim - w.ndim), -1, correction=0)
    return out, mean, (var + op.eps.value.data).rsqrt()


def _layer_norm_grad(op: Any, x: torch.Tensor, w: torch.Tensor, *given: torch.Tensor) -> Any:
    dy, mean, rstd = given
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, w.shape, mean, rstd, w, w, [True, True, True]
    )


def _rms_norm(op: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
    out = functional.rms_norm(x, w.shape, w, op.eps.value.data)
    if op.statistics is None:
        return out
    return out, (x.square().flatten(x.ndim - w.ndim).mean(-1) + op.eps.value.data).rsqrt()


def _rms_norm_grad(
    op: Any, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, rstd: torch.Tensor
) -> Any:
    """By torch's differentiation, of a statistic that has any value, and the derivative of 1 /
    sqrt(power) there."""
    given = x.to(rstd.dtype), w.to(rstd.dtype)
    x, w = (v.detach().requires_grad_() for v in given)
    dims = tuple(range(x.ndim - w.ndim, x.ndim))
    rstd = rstd.reshape(*rstd.shape, *[1] * w.ndim)
    power = x.square().mean(dims, keepdim=True)
    moving = rstd - 0.5 * rstd**3 * (power - power.detach())
    return torch.autograd.grad(x * moving * w, (x, w), dy.to(x.dtype))


REFERENCES: dict[type[Operation], Reference] = {
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
    nn.RmsNormOp: _rms_norm,
    nn.RmsNormGradOp: _rms_norm_grad,
}
