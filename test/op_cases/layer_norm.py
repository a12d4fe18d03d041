from typing import Any

import torch
from support.reference import Reference
from torch.nn import functional
from xdsl.ir import Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_attr


def layer_norm(shape: Shape, norm: Shape) -> list[Case]:
    name, props = (
        f"{'x'.join(map(str, shape))}-{'x'.join(map(str, norm))}",
        {"eps": float_attr(1e-5)},
    )
    rows, both = shape[: -len(norm)], props | {"statistics": nn.UNIT}

    def gradient(name: str, element: str, elements: tuple[str, ...]) -> Case:
        given = (shape, norm, shape, (element, rows), (element, rows))
        return Case(name, nn.LayerNormGradOp, given, elements, gradient=False)

    return [
        Case(name, nn.LayerNormOp, (shape, norm, norm), props=props),
        Case(f"{name}-statistics", nn.LayerNormOp, (shape, norm, norm), props=both, gradient=False),
        gradient(name, "f64", ("f64",)),
        gradient(f"{name}-narrow", "f32", ("f32", "bf16", "f16")),
    ]


CASES: list[Case] = [
    *layer_norm((4, 8), (8,)),
    *layer_norm((3, 5), (5,)),
    *layer_norm((2, 4, 6), (4, 6)),
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


REFERENCES: dict[type[Operation], Reference] = {
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
}
