from xdsl.ir import Attribute

from op_cases.case import EVEN, ODD, SCALAR, Case
from shardir.algebra.layout import Shape
from shardir.dialects import train
from shardir.dialects.nn.base import float_attr, int_attr

NUMBER = ("f64", SCALAR)


def update(op: type[train.Update], shape: Shape, **options: float) -> Case:
    """Second moments and numbers are positive."""
    n, numbers = 2 + len(op.STATES), len(op.SCALARS)
    props: dict[str, Attribute] = {n: float_attr(x) for n, x in options.items()}
    kinds = ("normal",) * min(n, 3) + ("positive",) * (n - min(n, 3) + numbers)
    operands = (shape,) * n + (NUMBER,) * numbers
    name = "x".join(map(str, shape)) + ("-decay" if options["weight_decay"] else "")
    return Case(name, op, operands, props=props, kinds=kinds, gradient=False)


def scalar(
    op: type[train.Scalar], name: str, props: dict[str, Attribute], element: str, *others: str
) -> Case:
    operands = (SCALAR, *((e, SCALAR) for e in others))
    kinds = ("positive",) * len(operands)
    return Case(name, op, operands, (element,), props, kinds=kinds, gradient=False)


def rate(text: str) -> Case:
    props: dict[str, Attribute] = {"schedule": train.ScheduleAttr.read(text)}
    return scalar(train.LearningRateOp, text.partition(",")[0], props, "i64")


SCALE: dict[str, Attribute] = {
    "growth": float_attr(2.0), "backoff": float_attr(0.5), "interval": int_attr(3),
}  # fmt: skip
ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 0.1}

CASES: list[Case] = [
    *[update(train.SgdOp, shape, weight_decay=d)
      for shape, d in ((EVEN, 0.01), (ODD, 0.0), (SCALAR, 0.1))],
    *[update(op, shape, momentum=0.9, weight_decay=d)
      for op in (train.MomentumOp, train.NesterovOp, train.LarsOp)
      for shape, d in ((EVEN, 0.01), (ODD, 0.0), (SCALAR, 0.1))],
    *[update(op, shape, **ADAM, weight_decay=d)
      for op in (train.AdamOp, train.AdamWOp, train.LambDirectionOp)
      for shape, d in ((EVEN, 0.01), (ODD, 0.0), (SCALAR, 0.1))],
    rate("constant, rate = 0.5, warmup = 3"),
    rate("cosine, rate = 0.5, steps = 5, end = 0.1, warmup = 2"),
    rate("polynomial, rate = 0.5, steps = 4, end = 0.1, power = 2.0"),
    rate("step, rate = 0.5, every = 2, factor = 0.5"),
    rate("inverse_sqrt, rate = 0.5, warmup = 2"),
    scalar(train.BiasCorrectionOp, "step", {"beta": float_attr(0.9)}, "i64"),
    scalar(train.TrustRatioOp, "norms",
           {"coefficient": float_attr(0.1), "weight_decay": float_attr(0.2)}, "f64", "f64"),
    scalar(train.NextLossScaleOp, "dynamic", SCALE, "f32", "i64", "i1"),
]  # fmt: skip
