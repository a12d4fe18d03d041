from harness import FLOATS

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import Props, float_attr, int_attr
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
    return [
        Case(name, nn.CrossEntropyOp, (shape, labels), props=props, kinds=kinds),
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
    *cross_entropy((8, 4)),
    *cross_entropy((3, 7), "i32"),
    *cross_entropy((2, 4, 6)),
    *cross_entropy((5,)),
    *cross_entropy((5, 3), ignore=1),
    *cross_entropy((4, 6), "i32", smoothing=0.25),
    *cross_entropy((2, 3, 5), ignore=0, smoothing=0.1),
    Case("of-shares", nn.BinaryCrossEntropyOp, ((4, 6), (4, 6)), kinds=("share", "share")),
    Case("of-a-row", nn.BinaryCrossEntropyOp, ((5, 3), (3,)), kinds=("share", "share")),
    Case("of-logits", nn.BinaryCrossEntropyWithLogitsOp, ((5, 3), (5, 3))),
    Case("of-a-row", nn.BinaryCrossEntropyWithLogitsOp, ((4, 6), (6,))),
    *(c for how in REDUCTIONS for c in of_labels((6, 4), "i64", how)),
    *(c for how in REDUCTIONS for c in of_labels((7, 3), "i32", how, ignore=2)),
    *of_labels((2, 3, 5), "i64", "mean", ignore=0, smoothing=0.1),
    *(c for how in REDUCTIONS for c in of_elements((4, 8) if how == "sum" else (5, 3), how)),
    Case("log-target", nn.KlDivLossOp, ((5, 3), (5, 3)),
         props={**by("mean"), "log_target": nn.UNIT}),
]  # fmt: skip
