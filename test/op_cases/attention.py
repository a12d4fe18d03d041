from typing import Any

import torch
from support.reference import Reference, by_autograd
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
    """The op, with its logarithms of sums and without, and its gradient op."""
    masks = () if mask is None else (mask,)
    elements = ("f64",) if name != "plain" else ("f64", "f32", "bf16", "f16")
    out, both = (*q[:-1], v[-1]), props | {"logsumexp": nn.UNIT}

    def gradient(name: str, element: str, elements: tuple[str, ...]) -> Case:
        given = (q, k, v, out, out, (element, q[:-1]), *masks)
        return Case(name, nn.AttentionGradOp, given, elements, props, gradient=False)

    found = [
        Case(name, nn.AttentionOp, (q, k, v, *masks), elements, props),
        gradient(name, "f64", ("f64",)),
    ]
    if name == "plain":
        found.append(gradient("narrow", "f32", elements[1:]))
    if name in ("plain", "masked", "grouped", "biased"):
        given = (q, k, v, *masks)
        found.append(Case(f"{name}-sums", nn.AttentionOp, given, elements[:2], both))
    return found


CASES: list[Case] = [
    *attention("plain", (2, 4, 6, 4), (2, 4, 6, 4), (2, 4, 6, 4)),
    *attention("causal", (2, 5, 4), (2, 5, 4), (2, 5, 3), **CAUSAL),
    *attention("scaled", (5, 4), (3, 4), (3, 4), scale=float_attr(0.3)),
    *attention("grouped", (2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3), **CAUSAL),
    *attention("one-for-all", (4, 3, 3), (1, 4, 3), (1, 4, 2), (4, 1, 4)),
    *attention("masked", (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), ("i1", (2, 1, 3, 5))),
    *attention("biased", (3, 5, 4), (3, 5, 4), (3, 5, 2), (3, 1, 5), **CAUSAL),
    *attention("deep", (2, 2, 1, 3, 4), (2, 2, 1, 3, 4), (2, 2, 1, 3, 4), (2, 1, 1, 1, 3)),
    *attention("grouped-masked", (4, 3, 2), (2, 3, 2), (2, 3, 2), ("i1", (4, 3, 3)), **CAUSAL),
]


def _scores(
    op: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores, by their formula: torch's own call takes no mask beside `is_causal`; and v with
    the heads of q."""
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if op.scale is None else op.scale.value.data
    scores = q @ k.mT * scale
    if op.causal is not None:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if boolean else scores + mask
    return scores, v


def _attention(op: Any, *given: torch.Tensor) -> Any:
    scores, v = _scores(op, *given)
    nothing = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0.0)
    out = scores.softmax(-1).masked_fill(nothing, 0.0) @ v
    if op.logsumexp is None:
        return out
    return out, scores.logsumexp(-1).masked_fill(nothing.squeeze(-1), 0.0)


def _attention_grad(op: Any, *given: torch.Tensor) -> Any:
    """The result is a function of the scores, of which the sum of each row is given, and so are the
    products of the result with its cotangent: those of the rows' sums."""
    dy, out, lse = given[3:6]
    total = (dy * out).sum(-1)

    def product(*x: torch.Tensor) -> torch.Tensor:
        scores, v = _scores(op, *x, *given[6:])
        p = (scores - lse.unsqueeze(-1)).exp()
        return (p @ v * dy).sum() - (p.sum(-1) * total).sum()

    return by_autograd(product, given[:3], torch.ones((), dtype=dy.dtype))


REFERENCES: dict[type[Operation], Reference] = {
    nn.AttentionOp: _attention,
    nn.AttentionGradOp: _attention_grad,
}
