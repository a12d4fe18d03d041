from typing import Any

import torch
from reference import Reference, by_autograd
from xdsl.ir import Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import Props
from shardir.dialects.nn.properties import float_attr

CAUSAL: Props = {"causal": nn.UNIT}


def attention(
    name: str, q: Shape, k: Shape, v: Shape, mask: Any = None, **props: Any
) -> list[Case]:
    """The op with its gradient op."""
    masks = () if mask is None else (mask,)
    elements = ("f64",) if name != "plain" else ("f64", "f32", "bf16", "f16")
    out = (*q[:-1], v[-1])
    return [
        Case(name, nn.AttentionOp, (q, k, v, *masks), elements, props),
        Case(name, nn.AttentionGradOp, (q, k, v, out, *masks), elements, props, gradient=False),
    ]


CASES: list[Case] = [
    *attention("plain", (2, 4, 6, 4), (2, 4, 6, 4), (2, 4, 6, 2)),
    *attention("causal", (2, 5, 4), (2, 5, 4), (2, 5, 3), **CAUSAL),
    *attention("scaled", (5, 4), (3, 4), (3, 2), scale=float_attr(0.3)),
    *attention("grouped", (2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2), **CAUSAL),
    *attention("one-for-all", (4, 3, 3), (1, 4, 3), (1, 4, 2), (4, 1, 4)),
    *attention("masked", (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 2), ("i1", (2, 1, 3, 5))),
    *attention("biased", (3, 5, 4), (3, 5, 4), (3, 5, 2), (3, 1, 5), **CAUSAL),
    *attention("grouped-masked", (4, 3, 2), (2, 3, 2), (2, 3, 2), ("i1", (4, 3, 3)), **CAUSAL),
]


def _attention(
    op: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """By its formula: torch's own call takes no mask beside `is_causal`."""
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if op.scale is None else op.scale.value.data
    scores = q @ k.mT * scale
    if op.causal is not None:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if boolean else scores + mask
    nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0) @ v


def _attention_grad(op: Any, *given: torch.Tensor) -> Any:
    return by_autograd(lambda *x: _attention(op, *x, *given[4:]), given[:3], given[3])


REFERENCES: dict[type[Operation], Reference] = {
    nn.AttentionOp: _attention,
    nn.AttentionGradOp: _attention_grad,
}
