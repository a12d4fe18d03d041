from collections.abc import Callable
from typing import Any

import torch
from support.harness import FLOATS
from support.reference import Reference
from torch.nn import functional
from xdsl.ir import Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import Props
from shardir.dialects.nn.properties import float_attr, int_attr
from shardir.dialects.text import word

REDUCTIONS = ("none", "mean", "sum")


def by(reduction: str, **props: float | int) -> Props:
    """The reduction, and further properties."""
    numbers = {n: float_attr(x) if isinstance(x, float) else int_attr(x) for n, x in props.items()}
    return {"reduction": word(nn.LossReductionAttr, reduction), **numbers}


def of_elements(shape: Shape, reduction: str) -> list[Case]:
    name, given, props = f"{reduction}-{'x'.join(map(str, shape))}", (shape, shape), by(reduction)
    types = FLOATS if reduction == "mean" else ("f64",)
    return [
        Case(name, nn.MseLossOp, given, types, props=props),
        Case(name, nn.L1LossOp, given, types, props=props, kinds=("ties", "ties")),
        Case(name, nn.HuberLossOp, given, types, props=by(reduction, delta=0.75)),
        Case(name, nn.SmoothL1LossOp, given, types, props=by(reduction, beta=0.5)),
        Case(name, nn.BceWithLogitsLossOp, given, types, props=props, kinds=("ties", "normal")),
        Case(name, nn.SoftMarginLossOp, given, types, props=props),
        Case(name, nn.BceLossOp, given, types, props=props, kinds=("share", "share")),
        Case(name, nn.KlDivLossOp, given, types, props=props, kinds=("normal", "positive")),
    ]


CASES: list[Case] = [
    Case("of-shares", nn.BinaryCrossEntropyOp, ((4, 6), (4, 6)), kinds=("share", "share")),
    Case("of-a-row", nn.BinaryCrossEntropyOp, ((5, 3), (3,)), kinds=("share", "share")),
    Case("of-logits", nn.BinaryCrossEntropyWithLogitsOp, ((5, 3), (5, 3))),
    Case("of-a-row", nn.BinaryCrossEntropyWithLogitsOp, ((4, 6), (6,))),
    *(c for how in REDUCTIONS for c in of_elements((4, 8) if how == "sum" else (5, 3), how)),
    Case("log-target", nn.KlDivLossOp, ((5, 3), (5, 3)),
         props={**by("mean"), "log_target": nn.UNIT}),
]  # fmt: skip


def _loss(call: Callable[..., torch.Tensor], *options: str) -> Reference:
    """A loss of torch's, with the numbers of these properties."""

    def reference(op: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        numbers = {n: getattr(op, n).value.data for n in options}
        return call(x, y, reduction=op.reduction.data, **numbers)

    return reference


def _soft_margin(op: nn.SoftMarginLossOp, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """torch's own is not differentiable in y."""
    return _reduced(op, torch.log1p(torch.exp(-x * y)))


def _kl_div(op: nn.KlDivLossOp, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    log = op.log_target is not None
    return _reduced(op, functional.kl_div(x, y, reduction="none", log_target=log))


def _reduced(op: nn.Loss, losses: torch.Tensor) -> torch.Tensor:
    how = op.reduction.data
    return losses if how == "none" else losses.mean() if how == "mean" else losses.sum()


REFERENCES: dict[type[Operation], Reference] = {
    nn.BinaryCrossEntropyOp: lambda op, x, y: functional.binary_cross_entropy(
        x, y.expand_as(x), reduction="none"
    ),
    nn.BinaryCrossEntropyWithLogitsOp: lambda op, x, y: functional.binary_cross_entropy_with_logits(
        x, y.expand_as(x), reduction="none"
    ),
    nn.MseLossOp: _loss(functional.mse_loss),
    nn.L1LossOp: _loss(functional.l1_loss),
    nn.HuberLossOp: _loss(functional.huber_loss, "delta"),
    nn.SmoothL1LossOp: _loss(functional.smooth_l1_loss, "beta"),
    nn.BceLossOp: _loss(functional.binary_cross_entropy),
    nn.BceWithLogitsLossOp: _loss(functional.binary_cross_entropy_with_logits),
    nn.SoftMarginLossOp: _soft_margin,
    nn.KlDivLossOp: _kl_div,
}
