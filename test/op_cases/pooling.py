from typing import Any

import torch
from support.reference import Reference
from torch.nn import functional
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import dist, nn
from shardir.dialects.nn.movement import IntsPerDimAttr


def pool(x: Shape, window: Shape, stride: Shape = (), padding: Shape = ()) -> list[Case]:
    given = {"window": window, "stride": stride, "padding": padding}
    props = {n: IntsPerDimAttr(v) for n, v in given.items() if v}
    name = "-".join("x".join(map(str, v)) for v in (x, window, stride, padding))
    (y,) = nn.MaxPoolOp.infer([dist.tensor(f32, x)], props)
    ends, kinds = (x, y.get_shape()), ("ties", "normal")
    return [
        Case(name, nn.MaxPoolOp, (x,), props=props, kinds=("ties",)),
        Case(name, nn.MaxPoolGradOp, ends, props=props, kinds=kinds, gradient=False),
        Case(name, nn.AvgPoolOp, (x,), props=props),
        Case(f"{name}-exclude", nn.AvgPoolOp, (x,), ("f64",), {**props, "exclude": nn.UNIT}),
    ]


def adaptive(x: Shape, size: Shape) -> Case:
    name = "-".join("x".join(map(str, v)) for v in (x, size))
    props = {"size": IntsPerDimAttr(size)}
    return Case(name, nn.AdaptiveAvgPoolOp, (x,), props=props)


CASES: list[Case] = [
    *pool((2, 4, 8), (2,), (2,)),
    *pool((3, 2, 7), (3,), (2,), (1, 1)),
    *pool((2, 2, 5, 6), (3, 2), (1, 2), (1, 1, 1, 1)),
    adaptive((2, 4, 8), (1,)),
    adaptive((3, 2, 7), (3,)),
    adaptive((2, 2, 4, 6), (2, 6)),
]


BELOW_ALL = -1e300
"""What counts as -inf, so that it is above the padding, which is none of the elements."""


def _max_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    found = op.slides()
    ends = [n for s in reversed(found) for n in (s.low, s.high)]
    values = functional.pad(x, ends, value=-torch.inf)
    order = functional.pad(x.detach().clamp(min=BELOW_ALL), ends, value=-torch.inf)
    call = getattr(functional, f"max_pool{len(found)}d")
    kernel, stride = ([getattr(s, n) for s in found] for n in ("kernel", "stride"))
    y, at = call(order, kernel, stride, return_indices=True)
    return values.flatten(2).gather(2, at.flatten(2)).view(y.shape)


def _max_pool_grad(op: Any, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = _max_pool(op, leaf)
    return torch.autograd.grad(y, leaf, dy)[0]


def _avg_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    found, more = op.slides(), {"count_include_pad": op.exclude is None}
    call = getattr(functional, f"avg_pool{len(found)}d")
    assert all(s.low == s.high for s in found)
    return call(x, *([getattr(s, n) for s in found] for n in ("kernel", "stride", "low")), **more)


def _adaptive_avg_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    return getattr(functional, f"adaptive_avg_pool{x.ndim - 2}d")(x, op.size.data)


REFERENCES: dict[type[Operation], Reference] = {
    nn.MaxPoolOp: _max_pool,
    nn.MaxPoolGradOp: _max_pool_grad,
    nn.AvgPoolOp: _avg_pool,
    nn.AdaptiveAvgPoolOp: _adaptive_avg_pool,
}
