from typing import Any

import torch
from support.reference import Reference, by_autograd
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


def cross_entropy(shape: Shape, index: str = "i64", **options: float | int) -> list[Case]:
    """The op with its gradient op. A label that is ignored is one of the drawn."""
    name, labels = f"{'x'.join(map(str, shape))}-{index}", (index, shape[:-1])
    name += "".join(f"-{n}" for n in options)
    kinds = ("normal", f"below:{shape[-1]}")
    props = {n: a for n, a in by("none", **options).items() if n != "reduction"}
    both = props | {"log_softmax": nn.UNIT}
    return [
        Case(name, nn.CrossEntropyOp, (shape, labels), props=props, kinds=kinds),
        Case(f"{name}-both", nn.CrossEntropyOp, (shape, labels), props=both, kinds=kinds,
             gradient=False),
        Case(name, nn.CrossEntropyGradOp, (shape, labels, shape[:-1]), props=props, kinds=kinds,
             gradient=False),
    ]  # fmt: skip


def of_labels(shape: Shape, index: str, reduction: str, **options: float | int) -> list[Case]:
    name = f"{reduction}-{'x'.join(map(str, shape))}" + "".join(f"-{n}" for n in options)
    given, kinds = (shape, (index, shape[:-1])), ("normal", f"below:{shape[-1]}")
    kept = {n: x for n, x in options.items() if n == "ignore"}
    return [
        Case(name, nn.CrossEntropyLossOp, given, props=by(reduction, **options), kinds=kinds),
        Case(name, nn.NllLossOp, given, props=by(reduction, **kept), kinds=kinds),
    ]


CASES: list[Case] = [
    *cross_entropy((8, 4)),
    *cross_entropy((3, 7), "i32"),
    *cross_entropy((2, 4, 6)),
    *cross_entropy((5,)),
    *cross_entropy((5, 3), ignore=1),
    *cross_entropy((4, 6), "i32", smoothing=0.25),
    *cross_entropy((2, 3, 5), ignore=0, smoothing=0.1),
    *(c for how in REDUCTIONS for c in of_labels((6, 4), "i64", how)),
    *(c for how in REDUCTIONS for c in of_labels((7, 3), "i32", how, ignore=2)),
    *of_labels((2, 3, 5), "i64", "mean", ignore=0, smoothing=0.1),
]  # fmt: skip


def _cross_entropy(op: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
    how = op.reduction.data if type(op) is nn.CrossEntropyLossOp else "none"
    ignore, share = op.options()
    options: Any = {} if ignore is None else {"ignore_index": ignore}
    out = functional.cross_entropy(
        x.reshape(-1, x.shape[-1]), labels.flatten().long(), label_smoothing=share, reduction=how,
        **options,
    )  # fmt: skip
    out = out.reshape(labels.shape) if how == "none" else out
    both = type(op) is nn.CrossEntropyOp and op.log_softmax is not None
    return (out, x.log_softmax(-1)) if both else out


def _cross_entropy_grad(
    op: Any, log_p: torch.Tensor, labels: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """The gradient of the sum of e^x less the target times x, of which both are given."""
    ignore, share = op.options()
    counts = torch.ones_like(labels, dtype=torch.bool) if ignore is None else labels != ignore
    hot = functional.one_hot(labels.where(counts, 0).long(), log_p.shape[-1]).to(log_p.dtype)
    target = (1 - share) * hot + share / log_p.shape[-1]
    weight = dy.where(counts, 0.0).unsqueeze(-1)
    return by_autograd(lambda x: ((x.exp() - target * x) * weight).sum(), [log_p],
                       torch.ones((), dtype=dy.dtype))[0]  # fmt: skip


def _nll(op: nn.NllLossOp, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    how = op.reduction.data
    options: Any = {} if op.ignore is None else {"ignore_index": op.ignore.value.data}
    rows = x.reshape(-1, x.shape[-1])
    out = functional.nll_loss(rows, labels.flatten().long(), reduction=how, **options)
    return out.reshape(labels.shape) if how == "none" else out


REFERENCES: dict[type[Operation], Reference] = {
    nn.CrossEntropyOp: _cross_entropy,
    nn.CrossEntropyGradOp: _cross_entropy_grad,
    nn.CrossEntropyLossOp: _cross_entropy,
    nn.NllLossOp: _nll,
}
