"""Schedulers of torch as learning rates of ours."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shardir
from shardir.diagnostics import ShardirError
from shardir.frontends.torch import optimizers
from shardir.interpret.evaluator import run

STEPS = 6

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6, eta_min=0.01),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5, power=2.0),
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
}


def sgd(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(()))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_torch(name: str) -> None:
    optimizer = sgd(0.1)
    scheduler = SCHEDULERS[name](optimizer)
    kind, _, options = optimizers.schedule(scheduler, optimizer).format(lr="0.1").partition("<")
    module = shardir.parse(f"""
func.func @rate(%done: tensor<i64>) -> tensor<f64> {{
  %lr = train.learning_rate %done <{kind}, {options} : (tensor<i64>) -> tensor<f64>
  func.return %lr : tensor<f64>
}}
""")
    for step in range(STEPS):
        (rate,) = run(module, "rate", [np.array(step)])
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_a_schedule_scales_each_group() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(a, b)
    optimizer = torch.optim.SGD([{"params": a.parameters()}, {"params": b.parameters(), "lr": 1.0}],
                                lr=0.5)  # fmt: skip
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    read = optimizers.read(optimizer, {id(p): n for n, p in model.named_parameters()}, scheduler)
    assert read.text == "sgd, lr = step<rate = 0.5, every = 2, factor = 0.5>, weight_decay = 0.0"
    assert read.lr_scales == {"1.weight": 2.0, "1.bias": 2.0}


def stepped() -> Any:
    optimizer = sgd(0.1)
    scheduler = SCHEDULERS["step"](optimizer)
    optimizer.step()
    scheduler.step()
    return scheduler


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown": (lambda: lr_scheduler.LambdaLR(sgd(0.1), lambda t: 1.0), "got LambdaLR"),
    "begun": (stepped, "before its first step, got one after 1"),
    "groups": (lambda: SCHEDULERS["cosine"](sgd(0.1, 0.2)), "groups of one lr"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_schedulers_are_refused(name: str) -> None:
    make, message = WRONG[name]
    scheduler = make()
    with pytest.raises(ShardirError, match=re.escape(message)):
        optimizers.schedule(scheduler, scheduler.optimizer)
    with pytest.raises(ShardirError, match="the scheduler of the optimizer, got that of another"):
        optimizers.schedule(SCHEDULERS["step"](sgd(0.1)), sgd(0.1))
    with pytest.raises(ShardirError, match="with a scheduler, got a text"):
        optimizers.read("sgd, lr = 0.1", {}, scheduler)
