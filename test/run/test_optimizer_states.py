"""Optimizers of torch that have states: a program goes on from them, and torch from its own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import extent
from torch import nn, optim
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

import shardir
from shardir.diagnostics import ShardirError
from shardir.dialects.train import StateKeys
from shardir.frontends.torch.optimizer_states import TorchForm

G = torch.Generator().manual_seed(5)
BATCHES = [(torch.randn(8, 6, generator=G), torch.randn(8, 3, generator=G)) for _ in range(6)]

B = (0.9, 0.8, 0.7, 0.6)


def lion(parameter: Any, gradient: Any, state: Any, lr: Any) -> Any:
    mean = 0.9 * state["exp.avg"] + 0.1 * gradient
    return parameter - lr * mean.sign(), {"exp.avg": 0.99 * state["exp.avg"] + 0.01 * gradient}


Case = tuple[Callable[[Any], optim.Optimizer], Callable[[Any], Any] | None]
CASES: dict[str, Case] = {
    "AdamW": (lambda p: optim.AdamW(p, 1e-2), lambda o: lr_scheduler.CosineAnnealingLR(o, 6)),
    "SGD with a rate by points": (
        lambda p: optim.SGD(p, 0.1, momentum=0.9), lambda o: lr_scheduler.OneCycleLR(
            o, 0.2, total_steps=6, cycle_momentum=False),
    ),
    "Adafactor": (lambda p: optim.Adafactor(p, 0.1), None),
    "Adam": (lambda p: optim.Adam(p, 1e-2, weight_decay=0.1), None),
    "NAdam": (lambda p: optim.NAdam(p, 1e-2), lambda o: lr_scheduler.StepLR(o, 4)),
    "RMSprop": (
        lambda p: optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    ),
    "Adagrad": (
        lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.1), None,
    ),
    "Adamax": (lambda p: optim.Adamax(p, 1e-2), None),
    "SGD": (lambda p: optim.SGD(p, 0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 6)),
    "RAdam": (lambda p: optim.RAdam(p, 1e-2), lambda o: lr_scheduler.CosineAnnealingLR(o, 6)),
    "groups with betas of their own": (
        lambda p: optim.AdamW(
            [{"params": q, "betas": (b, 0.99)} for q, b in zip(p, B, strict=True)], 1e-2,
            amsgrad=True), None,
    ),
    "groups with schedules of their own": (
        lambda p: optim.Adam([{"params": q, "lr": 0.02 * b} for q, b in zip(p, B, strict=True)]),
        lambda o: lr_scheduler.LambdaLR(
            o, [partial(lambda t, b, **_: b**t, b=b, num_training_steps=6) for b in B]),
    ),
    "a function": (
        lambda p: shardir.optimizer(lion, p, lr=1e-2, states={"exp.avg": 0.0}),
        lambda o: lr_scheduler.StepLR(o, 4),
    ),
    "nesterov": (lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True), None),
}  # fmt: skip


class Training:
    """A module that is trained in torch."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer, scheduler = CASES[name]
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler: Any = scheduler and scheduler(self.optimizer)

    def step(self, batches: Any) -> list[float]:
        losses = []
        for x, y in batches:
            loss = mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
            losses.append(loss.item())
        return losses

    def compiled(self, **options: Any) -> Any:
        x, y = BATCHES[0]
        given: dict[str, Any] = {"mesh": "d = 2", "plan": "zero1", **options}
        return shardir.compile(self.model, x, labels=y, loss=mse_loss, optimizer=self.optimizer,
                               scheduler=self.scheduler, **given)  # fmt: skip


@pytest.mark.parametrize("name", extent(["AdamW", "a function"], list(CASES)))
def test_training_goes_on_in_a_program_and_back_in_torch(name: str) -> None:
    alone, parts = Training(name), Training(name)
    losses = alone.step(BATCHES)
    parts.step(BATCHES[:2])
    program = parts.compiled()
    assert program.run(BATCHES[2:4], steps=2).losses["step"] == pytest.approx(losses[2:4], rel=1e-5)
    back = Training(name)
    back.model.load_state_dict(program.state_dict())
    states = copy.deepcopy(program.optimizer_state_dict())
    back.optimizer.load_state_dict(states)
    back.scheduler = None
    kinds = [{k: list(x.shape) for k, x in states["state"].get(i, {}).items()} for i in range(4)]
    expected = parts.optimizer.state_dict()["state"]
    assert kinds == [{k: list(x.shape) for k, x in expected.get(i, {}).items()
                      if x is not None} for i in range(4)]  # fmt: skip
    assert back.step(BATCHES[4:5]) == pytest.approx(losses[4:5], rel=1e-5)


def test_the_rates_of_a_fresh_scheduler_follow_the_steps_of_its_optimizer() -> None:
    """An optimizer that has made two steps, whose scheduler begins now."""

    def trained() -> Training:
        found = Training("Adam")
        found.step(BATCHES[:2])
        found.scheduler = lr_scheduler.CosineAnnealingLR(found.optimizer, 4)
        return found

    program = trained().compiled()
    losses = trained().step(BATCHES[2:])
    assert program.run(BATCHES[2:], steps=4).losses["step"] == pytest.approx(losses, rel=1e-5)


def test_states_that_a_program_lacks_are_named() -> None:
    training = Training("Adam")
    training.step(BATCHES[:1])
    states = training.optimizer.state
    first, *_, last = states
    states[first]["max_exp_avg_sq"] = torch.zeros(8, 6)
    with pytest.raises(ShardirError, match=r"got 0\.weight\.max_exp_avg_sq too"):
        training.compiled()
    del states[first]["max_exp_avg_sq"]
    states[first]["exp_avg"] = torch.zeros(6, 8)
    with pytest.raises(ShardirError, match=r"0\.weight\.exp_avg of \[8, 6\].*got \[6, 8\]"):
        training.compiled()
    states[last]["step"] += 1
    with pytest.raises(ShardirError, match=r"one number of steps.*1 for 0\.weight, 2 for 2\.bias"):
        training.compiled()


def test_a_rate_that_a_loop_has_set_keeps_the_ratios_of_groups() -> None:
    rates = [torch.tensor(0.0), torch.tensor(0.25), torch.tensor(0.5)]
    groups = [{"params": [torch.zeros(2)], "lr": rate} for rate in rates]
    form = TorchForm.of(torch.optim.SGD(groups), None, StateKeys("step"), {})
    found = form.state_dict({"step.lr": np.asarray(0.75)}, 1)["param_groups"]
    assert [float(g["lr"]) for g in found] == [0.0, 0.75, 1.5]
