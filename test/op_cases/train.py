from typing import Any

import numpy as np
import torch
from support.reference import Reference
from xdsl.ir import Attribute, Operation

from op_cases.case import EVEN, ODD, SCALAR, Case
from shardir.algebra.layout import Shape
from shardir.dialects import train
from shardir.dialects.nn.properties import float_attr, int_attr

NUMBER = ("f64", SCALAR)


def update(
    op: type[train.Update], shape: Shape, states: tuple[str, ...] = ("normal", "positive"),
    **options: float,
) -> Case:  # fmt: skip
    """Second moments and numbers are positive; `states` are the kinds of the states' numbers."""
    n, numbers = 2 + len(op.STATES), len(op.SCALARS)
    props: dict[str, Attribute] = {n: float_attr(x) for n, x in options.items()}
    kinds = ("normal", "normal", *states[: n - 2], *("positive",) * numbers)
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
      for op in (train.AdamOp, train.AdamWOp, train.AdamaxOp, train.NAdamOp, train.NAdamWOp,
                 train.LambDirectionOp)
      for shape, d in ((EVEN, 0.01), (ODD, 0.0), (SCALAR, 0.1))],
    *[update(op, shape, ("positive", "small"), **more, eps=0.1, weight_decay=d)
      for op, more in (
          (train.AdagradOp, {}),
          (train.RmsDirectionOp, {"alpha": 0.8}),
          (train.CenteredRmsDirectionOp, {"alpha": 0.8}),
      )
      for shape, d in ((EVEN, 0.01), (ODD, 0.0), (SCALAR, 0.1))],
    rate("constant, rate = 0.5, warmup = 3"),
    rate("cosine, rate = 0.5, steps = 5, end = 0.1, warmup = 2"),
    rate("polynomial, rate = 0.5, steps = 4, end = 0.1, power = 2.0"),
    rate("step, rate = 0.5, every = 2, factor = 0.5"),
    rate("inverse_sqrt, rate = 0.5, warmup = 2"),
    rate('points, rate = 0.5, at = "0: 0.5, 2: 1.0 cosine, 6: 0.25, 9: 0.125"'),
    *[scalar(train.BiasCorrectionOp, f"step in {t}", {"beta": float_attr(0.9)}, t)
      for t in ("i64", "f32", "f64")],
    scalar(train.TrustRatioOp, "norms",
           {"coefficient": float_attr(0.1), "weight_decay": float_attr(0.2)}, "f64", "f64"),
    scalar(train.NextLossScaleOp, "dynamic", SCALE, "f32", "i64", "i1"),
]  # fmt: skip


def _given(op: Any, *names: str) -> list[float]:
    return [getattr(op, n).value.data for n in names]


def _by_torch(op: Any, w: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, **more: Any) -> Any:
    """One step of torch.optim.SGD."""
    w = torch.nn.Parameter(w.clone())
    w.grad = g
    velocity = more.pop("velocity", None)
    optimizer = torch.optim.SGD([w], lr.item(), weight_decay=op.weight_decay.value.data, **more)
    if velocity is None:
        optimizer.step()
        return w.detach()
    optimizer.state[w]["momentum_buffer"] = velocity.clone()
    optimizer.step()
    return w.detach(), optimizer.state[w]["momentum_buffer"]


def _momentum(op: Any, w: Any, g: Any, v: Any, lr: Any) -> Any:
    nesterov = isinstance(op, train.NesterovOp)
    (momentum,) = _given(op, "momentum")
    return _by_torch(op, w, g, lr, velocity=v, momentum=momentum, nesterov=nesterov)


def _lars(op: Any, w: Any, g: Any, v: Any, lr: Any) -> Any:
    momentum, decay = _given(op, "momentum", "weight_decay")
    v = momentum * v + lr * (g + decay * w)
    return w - v, v


def _adam(op: Any, w: Any, g: Any, m: Any, v: Any, c1: Any, c2: Any, lr: Any = 0.0) -> Any:
    beta1, beta2, eps, decay = _given(op, "beta1", "beta2", "eps", "weight_decay")
    g = g + decay * w if isinstance(op, train.AdamOp) else g
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    direction = (m / c1) / ((v / c2).sqrt() + eps)
    match op:
        case train.AdamOp():
            return w - lr * direction, m, v
        case train.AdamWOp():
            return w - lr * (direction + decay * w), m, v
        case _:
            return direction + decay * w, m, v


def _adamax(op: Any, w: Any, g: Any, m: Any, n: Any, c1: Any, lr: Any) -> Any:
    beta1, beta2, eps, decay = _given(op, "beta1", "beta2", "eps", "weight_decay")
    g = g + decay * w
    m, n = beta1 * m + (1 - beta1) * g, torch.stack([beta2 * n, g.abs() + eps]).amax(0)
    return w - lr / c1 * m / n, m, n


def _nadam(op: Any, w: Any, g: Any, m: Any, v: Any, c2: Any, a: Any, b: Any, lr: Any) -> Any:
    beta1, beta2, eps, decay = _given(op, "beta1", "beta2", "eps", "weight_decay")
    if isinstance(op, train.NAdamWOp):
        w = w * (1 - lr * decay)
    else:
        g = g + decay * w
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    root = (v / c2).sqrt() + eps
    return w - lr * a * g / root - lr * b * m / root, m, v


def _adagrad(op: Any, w: Any, g: Any, s: Any, lr: Any) -> Any:
    eps, decay = _given(op, "eps", "weight_decay")
    s = s + (g + decay * w) ** 2
    return w - lr * (g + decay * w) / (s.sqrt() + eps), s


def _rms_direction(op: Any, w: Any, g: Any, v: Any, m: Any = None) -> Any:
    alpha, eps, decay = _given(op, "alpha", "eps", "weight_decay")
    g = g + decay * w
    v = alpha * v + (1 - alpha) * g**2
    if m is None:
        return g / (v.sqrt() + eps), v
    m = alpha * m + (1 - alpha) * g
    return g / ((v - m**2).sqrt() + eps), v, m


def _learning_rate(op: train.LearningRateOp, done: torch.Tensor) -> torch.Tensor:
    """By torch's schedulers, stepped so often."""
    from torch.optim import lr_scheduler

    n, kind = op.schedule.values, op.schedule.kind
    if kind == "points":
        return torch.tensor(n["rate"] * _factor(n["at"], done.item()), dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=n["rate"])
    warmup, end = n["warmup"], n.get("end", 0.0)
    left = n.get("steps", 1) - warmup
    after: Any = {
        "constant": lambda: lr_scheduler.ConstantLR(optimizer, 1.0),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, left, end),
        "polynomial": lambda: lr_scheduler.LambdaLR(  # torch's own ends at 0
            optimizer,
            lambda t: (
                (end + (n["rate"] - end) * (1 - min(t, left) / left) ** n["power"]) / n["rate"]
            ),
        ),
        "step": lambda: lr_scheduler.StepLR(optimizer, n["every"], n["factor"]),
        "inverse_sqrt": lambda: lr_scheduler.LambdaLR(
            optimizer, lambda t: (max(1, warmup) / (t + 1 + warmup)) ** 0.5
        ),
    }[kind]()
    steps = min(done.item(), warmup + left) if kind == "cosine" else done.item()
    if steps < warmup:
        return torch.tensor(n["rate"] * (steps + 1) / warmup, dtype=torch.float64)
    for _ in range(int(steps) - warmup):
        optimizer.step()
        after.step()
    return torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)


def _factor(at: str, done: float) -> float:
    """By numpy's interpolation, in the arc of a half period where it is of a cosine."""
    points = [part.split(": ") for part in at.split(", ")]
    steps = [int(step) for step, _ in points]
    factors = [float(factor.split()[0]) for _, factor in points]
    i = max((i for i, step in enumerate(steps) if step <= done), default=0)
    if points[i][1].endswith("cosine"):
        angle = np.pi * np.interp(done, steps[i : i + 2], [0, 1])
        middle, half = (factors[i] + factors[i + 1]) / 2, (factors[i] - factors[i + 1]) / 2
        return middle + half * np.cos(angle)
    return float(np.interp(done, steps, factors))


def _trust_ratio(op: Any, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    coefficient, decay = _given(op, "coefficient", "weight_decay")
    if w == 0 or u == 0:
        return torch.ones((), dtype=torch.float64)
    return coefficient * w.sqrt() / (u.sqrt() + decay * w.sqrt())


def _next_loss_scale(op: Any, scale: Any, good: Any, finite: Any) -> Any:
    """The op that torch.amp.GradScaler's update calls."""
    growth, backoff = _given(op, "growth", "backoff")
    scale, tracker = scale.float(), good.int()
    found = (~finite).float()
    amp: Any = torch
    amp._amp_update_scale_(scale, tracker, found, growth, backoff, op.interval.value.data)
    return scale.double(), tracker.long()


REFERENCES: dict[type[Operation], Reference] = {
    train.SgdOp: _by_torch,
    train.MomentumOp: _momentum,
    train.NesterovOp: _momentum,
    train.LarsOp: _lars,
    train.AdamOp: _adam,
    train.AdamWOp: _adam,
    train.LambDirectionOp: _adam,
    train.AdamaxOp: _adamax,
    train.NAdamOp: _nadam,
    train.NAdamWOp: _nadam,
    train.AdagradOp: _adagrad,
    train.RmsDirectionOp: _rms_direction,
    train.CenteredRmsDirectionOp: _rms_direction,
    train.LearningRateOp: _learning_rate,
    train.BiasCorrectionOp: lambda op, step: 1 - op.beta.value.data ** step.double(),
    train.TrustRatioOp: _trust_ratio,
    train.NextLossScaleOp: _next_loss_scale,
}
