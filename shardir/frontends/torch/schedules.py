"""Schedulers of torch as learning rates of ours: by the law of their class, or sampled.

lr_scheduler.StepLR(o, 30, 0.5)        step<rate = 0.1, every = 30, factor = 0.5>
lr_scheduler.LambdaLR(o, f)            points<rate = 0.1, at = "0: 0.0, 10: 1.0 cosine, 100: 0.0">

A scheduler without a law of ours is stepped from its begin to where its rate stays, and its rates
become few points, with lines and half periods of cosines between them.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

from shardir.compat.torch import last_milestone, scheduler_parts
from shardir.diagnostics import ShardirError
from shardir.dialects.train.options import Point

TOLERANCE = 1e-6
"""The largest difference of a rate from the sampled one, as a share of the largest rate."""

MAX_STEPS = 1_000_000
"""The steps that are sampled at most."""

SCHEDULES: dict[type[lr_scheduler.LRScheduler], Callable[[Any], str]] = {
    lr_scheduler.CosineAnnealingLR: lambda s: (
        f"cosine<rate = {{lr}}, steps = {s.T_max}, end = {float(s.eta_min)!r}>"
    ),
    lr_scheduler.PolynomialLR: lambda s: (
        f"polynomial<rate = {{lr}}, steps = {s.total_iters}, power = {float(s.power)!r}>"
    ),
    lr_scheduler.StepLR: lambda s: (
        f"step<rate = {{lr}}, every = {s.step_size}, factor = {float(s.gamma)!r}>"
    ),
    lr_scheduler.ExponentialLR: lambda s: (
        f"step<rate = {{lr}}, every = 1, factor = {float(s.gamma)!r}>"
    ),
}
"""The text of a scheduler's rate, by its class. That of a cosine stays at its end, where torch's
rises again."""

ENDS: dict[type[Any], Callable[[Any], int | None]] = {
    lr_scheduler.ConstantLR: lambda s: s.total_iters,
    lr_scheduler.LinearLR: lambda s: s.total_iters,
    lr_scheduler.PolynomialLR: lambda s: s.total_iters,
    lr_scheduler.CosineAnnealingLR: lambda s: s.T_max,
    lr_scheduler.MultiStepLR: lambda s: max(s.milestones, default=0),
    lr_scheduler.OneCycleLR: lambda s: s.total_steps - 1,
    lr_scheduler.SequentialLR: lambda s: _plus(last_milestone(s), end_of(scheduler_parts(s)[-1])),
    lr_scheduler.ChainedScheduler: lambda s: _last(map(end_of, scheduler_parts(s))),
    lr_scheduler.LambdaLR: lambda s: _last(map(_end_of_function, s.lr_lambdas)),
}
"""The number of steps after which the rate of a scheduler stays constant, by class."""


def end_of(scheduler: Any) -> int | None:
    """Return the number of steps after which a scheduler's rate stays; None if that is unknown."""
    end_rule = next((end for kind, end in ENDS.items() if type(scheduler) is kind), None)
    return None if end_rule is None else end_rule(scheduler)


def _plus(start: int, end: int | None) -> int | None:
    return None if end is None else start + end


def _last(ends: Iterator[int | None]) -> int | None:
    ends_list = list(ends)
    known_ends = [end for end in ends_list if end is not None]
    return max(known_ends) if len(known_ends) == len(ends_list) else None


def _end_of_function(function: Any) -> int | None:
    """Return the end of a function of transformers.optimization, a partial one with keywords."""
    steps = getattr(function, "keywords", {}).get("num_training_steps")
    return steps if isinstance(steps, int) else None


def begun(scheduler: Any) -> int:
    """Return the number of steps that a scheduler, or each one of a chain, has made."""
    of_chain = [s.last_epoch for s in getattr(scheduler, "_schedulers", ())]
    return getattr(scheduler, "last_epoch", max(of_chain, default=0))


def after(scheduler: Any, steps: int) -> list[float]:
    """Return the rates of the optimizer's groups when a scheduler has made so many more steps."""
    return _rates(copy_of(scheduler), steps)[-1]


def schedule(scheduler: Any, optimizer: Any, steps: int | None = None, count: int = 0) -> list[str]:
    """Return the text of the learning rate that a scheduler gives each group of an optimizer, with
    the place of the group's first rate, `{lr}`. `steps` of it are sampled, if its class has no law
    of ours, or if it is not where that law has it after `count` steps, which the program takes for
    done: then its rates from now on follow them.

    Raises:
        ShardirError: it is no scheduler, or another optimizer's; or it can't be sampled.
    """
    if not isinstance(scheduler, lr_scheduler.LRScheduler) or isinstance(
        scheduler, lr_scheduler.ReduceLROnPlateau
    ):
        raise ShardirError(
            "expected a scheduler of torch.optim.lr_scheduler whose rate depends on the step "
            f"alone, got {type(scheduler).__name__}"
        )
    if scheduler.optimizer is not optimizer:
        raise ShardirError("expected the scheduler of the optimizer, got that of another one")
    if getattr(scheduler, "cycle_momentum", False):
        raise ShardirError(
            f"expected a scheduler of the learning rate alone, got {type(scheduler).__name__} with "
            "cycle_momentum; use cycle_momentum=False"
        )
    form = next((f for kind, f in SCHEDULES.items() if type(scheduler) is kind), None)
    if form is None or steps is not None or not _is_lawful(scheduler, count):
        of_groups = factors(scheduler, steps)
        close = np.ptp(of_groups, axis=1).max() <= TOLERANCE * np.abs(of_groups).max()
        columns = of_groups[:, :1] if close else of_groups
        at = [", ".join(str(p._replace(step=p.step + count)) for p in points(column))
              for column in columns.T]  # fmt: skip
        texts = [f'points<rate = {{lr}}, at = "{text}">' for text in at]
        return texts * (len(optimizer.param_groups) // len(texts))
    text = form(scheduler)
    if getattr(scheduler, "eta_min", 0):  # the end of all groups, whatever their first rates
        return [text.replace("{lr}", repr(float(lr))) for lr in scheduler.base_lrs]
    return [text] * len(optimizer.param_groups)


def factors(scheduler: Any, steps: int | None = None) -> np.ndarray:
    """Return the rates of each step of a scheduler from now on, of all groups, f64, as factors of
    their first rates. `steps` are those from its beginning.

    Raises:
        ShardirError: its end is unknown, or too far, or a rate is negative.
    """
    end, kind = end_of(scheduler) if steps is None else steps, type(scheduler).__name__
    if end is None:
        raise ShardirError(
            f"expected the steps of the training for {kind}, whose rates are sampled, got none; "
            "use scheduler_steps=1000: after them the rate stays"
        )
    if not 0 <= end <= MAX_STEPS:
        raise ShardirError(
            f"expected 0 to {MAX_STEPS:,} steps of {kind}, got {end:,}; use "
            'optimizer="adamw, lr = cosine<...>"'
        )
    rates = np.array(_rates(copy_of(scheduler), max(0, end - begun(scheduler))), np.float64)
    groups = scheduler.optimizer.param_groups
    bases = np.array([float(group["initial_lr"]) for group in groups])
    rates = np.where(bases > 0, rates / np.where(bases > 0, bases, 1.0), 0.0)
    if not (bases > 0).any():
        return np.ones((1, len(bases)))
    first = rates[:, np.argmax(bases > 0)]
    rates = np.where(bases > 0, rates, first[:, None])  # any factor does for a rate of 0
    if not np.isfinite(rates).all() or rates.min() < 0:
        raise ShardirError(f"expected rates of at least 0 of {kind}, got {rates.min()}")
    return rates


def copy_of(scheduler: Any) -> Any:
    """A copy of a scheduler, whose optimizer has neither weights nor states."""
    optimizer = scheduler.optimizer
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held += [x for state in optimizer.state.values() for x in state.values()]
    return deepcopy(scheduler, {id(x): torch.zeros(()) for x in held if torch.is_tensor(x)})


def _rates(trial: Any, steps: int) -> list[list[float]]:
    """The rates of the groups now, and after each of so many steps of a scheduler."""
    groups = trial.optimizer.param_groups
    rates = [[float(group["lr"]) for group in groups]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has made no step
        for _ in range(steps):
            trial.step()
            rates.append([float(group["lr"]) for group in groups])
    return rates


def _is_lawful(scheduler: Any, count: int) -> bool:
    """Whether a scheduler has made `count` steps, and these lead from its initial rates to its
    current ones."""
    if begun(scheduler) != count:
        return False
    trial = copy_of(scheduler)
    now, groups = _rates(trial, 0)[0], trial.optimizer.param_groups
    for group in groups:
        group["lr"] = group["initial_lr"]
    trial.last_epoch = 0
    return bool(np.allclose(_rates(trial, count)[-1], now, rtol=TOLERANCE, atol=0))


def points(rates: np.ndarray) -> list[Point]:
    """Return points between which rates, one of each step, are on lines and half periods of
    cosines, within TOLERANCE of the largest rate."""
    allowed, turns = TOLERANCE * float(rates.max(initial=0.0)), _turns(rates)
    corners, i = list[Point](), 0
    while i < len(rates) - 1:
        line, turn = _line(rates, i, allowed), turns[i]
        is_cosine = turn > line and _is_cosine(rates[i : turn + 1], allowed)
        corners.append(Point(i, float(rates[i]), is_cosine))
        i = turn if is_cosine else line
    return [*corners, Point(i, float(rates[i]))]


def _turns(rates: np.ndarray) -> Sequence[int]:
    """Return the next step of each at which the rates stop to rise or fall."""
    directions = np.sign(np.diff(rates))
    turns = np.full(len(rates), len(rates) - 1)
    for i in range(len(directions) - 2, -1, -1):
        turns[i] = turns[i + 1] if directions[i] == directions[i + 1] else i + 1
    return turns.tolist()


def _line(rates: np.ndarray, i: int, allowed: float) -> int:
    """Return the last step such that the rates from step i on are on a line to it."""
    low, high, last = -np.inf, np.inf, i + 1
    for j in range(i + 1, len(rates)):
        slope = (rates[j] - rates[i]) / (j - i)
        if low <= slope <= high:
            last = j
        low = max(low, slope - allowed / (j - i))
        high = min(high, slope + allowed / (j - i))
        if low > high:
            break
    return last


def _is_cosine(rates: np.ndarray, allowed: float) -> bool:
    left = 0.5 * (1 + np.cos(np.pi * np.linspace(0, 1, len(rates))))
    return bool(np.abs(rates[-1] + (rates[0] - rates[-1]) * left - rates).max() <= allowed)
