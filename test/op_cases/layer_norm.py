from typing import Any

import torch
from reference import Reference, by_autograd
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
    return [
        Case(name, nn.LayerNormOp, (shape, norm, norm), props=props),
        Case(name, nn.LayerNormGradOp, (shape, norm, shape), props=props, gradient=False),
    ]


CASES: list[Case] = [
    *layer_norm((4, 8), (8,)),
    *layer_norm((3, 5), (5,)),
    *layer_norm((2, 4, 6), (4, 6)),
]


def _layer_norm(op: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, w.shape, w, b, op.eps.value.data)


def _layer_norm_grad(op: Any, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
    return by_autograd(lambda x, w, b: _layer_norm(op, x, w, b), [x, w, torch.zeros_like(w)], dy)


REFERENCES: dict[type[Operation], Reference] = {
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
}
