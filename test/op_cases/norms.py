from typing import Any

import torch
from support.reference import Reference
from torch.nn import functional
from xdsl.ir import Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_attr, int_attr

EPS = {"eps": float_attr(1e-3)}


def batch_norm(shape: Shape) -> list[Case]:
    name, channel = "x".join(map(str, shape)), shape[1:2]
    kinds = ("normal", "normal", "normal", "normal", "positive")
    return [
        Case(
            name, nn.BatchNormOp, (shape, *[channel] * 4), kinds=kinds,
            props=EPS | {"momentum": float_attr(0.25)},
        ),
        Case(name, nn.BatchNormInferenceOp, (shape, *[channel] * 4), kinds=kinds, props=EPS),
    ]  # fmt: skip


def group_norm(shape: Shape, groups: int) -> Case:
    name = f"{'x'.join(map(str, shape))}-{groups}"
    props = EPS | {"groups": int_attr(groups)}
    return Case(name, nn.GroupNormOp, (shape, shape[1:2], shape[1:2]), props=props)


CASES: list[Case] = [
    *batch_norm((6, 4)),
    *batch_norm((5, 3, 3)),
    *batch_norm((2, 4, 3, 2)),
    group_norm((4, 4, 3), 2),
    group_norm((3, 6, 2), 3),
    group_norm((3, 5), 1),
    group_norm((2, 4, 2, 3), 4),
]


def _batch_norm(op: Any, x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any) -> Any:
    out = functional.batch_norm(x, None, None, w, b, True, 0.0, op.eps.value.data)
    dims, m = [d for d in range(x.ndim) if d != 1], op.momentum.value.data
    new_mean = (1 - m) * mean + m * x.mean(dims)
    return out, new_mean, (1 - m) * var + m * x.var(dims, correction=1)


def _batch_norm_inference(op: Any, x: torch.Tensor, *channels: torch.Tensor) -> torch.Tensor:
    """torch's own has no gradient for the statistics."""
    w, b, mean, var = (c.reshape(-1, *[1] * (x.ndim - 2)) for c in channels)
    out = (x - mean) / (var + op.eps.value.data).sqrt() * w + b
    w, b, mean, var = (c.detach() for c in channels)
    assert torch.allclose(
        out, functional.batch_norm(x.detach(), mean, var, w, b, eps=op.eps.value.data)
    )
    return out


REFERENCES: dict[type[Operation], Reference] = {
    nn.BatchNormOp: _batch_norm,
    nn.BatchNormInferenceOp: _batch_norm_inference,
    # torch.nn.functional refuses groups of one element, whose result is b
    nn.GroupNormOp: lambda op, x, w, b: torch.group_norm(
        x, op.groups.value.data, w, b, op.eps.value.data
    ),
}
