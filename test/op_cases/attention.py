from typing import Any

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import Props, float_attr

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
