"""Schedulers of torch as learning rates of ours."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.extent import extent
from support.strategies import quick
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

import shardir
from shardir.diagnostics import ShardirError
from shardir.dialects.train.options import Point
from shardir.frontends.torch import optimizers, schedules
from shardir.interpret.evaluator import run

STEPS = 24


def warm_cosine(t: int, *, warmup: int, num_training_steps: int) -> float:
    """That of transformers.get_cosine_schedule_with_warmup."""
    if t < warmup:
        return t / max(1, warmup)
    part = (t - warmup) / max(1, num_training_steps - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * part)))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS, eta_min=0.01),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5, power=2.0),
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.25, 0.75, total_iters=7),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.25, total_iters=4),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 11], gamma=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS, cycle_momentum=False),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 20)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.LinearLR(o, 0.5, 1.0, 6)]
    ),
    "transformers": lambda o: lr_scheduler.LambdaLR(
        o, partial(warm_cosine, warmup=5, num_training_steps=STEPS - 1)
    ),
}
SAMPLED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t) ** 0.5),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9 + 0.1 * (t % 2)),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "begins with a law": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}
"""Those whose rates never stay."""


def sgd(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(()))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=0.1)


def rates_of(text: str, steps: int) -> list[float]:
    """The rates of the first steps, by the interpreter."""
    kind, _, options = text.partition("<")
    module = shardir.parse(f"""
func.func @rate(%done: tensor<i64>) -> tensor<f64> {{
  %lr = train.learning_rate %done <{kind}, {options} : (tensor<i64>) -> tensor<f64>
  func.return %lr : tensor<f64>
}}
""")
    return [float(run(module, "rate", [np.array(step)])[0]) for step in range(steps)]


@pytest.mark.parametrize("name", [*SCHEDULERS, *SAMPLED])
def test_rates_are_those_of_torch(name: str) -> None:
    optimizer = sgd(0.1)
    scheduler = {**SCHEDULERS, **SAMPLED}[name](optimizer)
    steps = STEPS if name in SAMPLED else None
    before = [group["initial_lr"] for group in optimizer.param_groups], scheduler.state_dict()
    text = optimizers.schedule(scheduler, optimizer, steps)[0].replace("{lr}", repr(before[0][0]))
    assert ([g["initial_lr"] for g in optimizer.param_groups], scheduler.state_dict()) == before
    found, wanted = rates_of(text, STEPS), list[float]()
    for _ in range(STEPS):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(wanted) < STEPS else None
    assert found == pytest.approx(wanted, rel=0, abs=schedules.TOLERANCE * max(wanted))


POINTS = st.lists(
    st.tuples(st.integers(1, 9), st.floats(0.05, 1.0), st.booleans()), min_size=1, max_size=5
)


@quick
@given(POINTS)
def test_rates_between_points_are_found_again(drawn: list[tuple[int, float, bool]]) -> None:
    """Lines, half periods of cosines, jumps: as many points as were drawn at most, or one more for
    a line that a turn cuts."""
    given, step = list[Point](), 0
    for length, factor, is_cosine in drawn:
        given.append(Point(step, factor, is_cosine))
        step += length
    text = f'points<rate = 1.0, at = "{", ".join(map(str, given))}">'
    rates = np.array(rates_of(text, given[-1].step + 1))
    found = schedules.points(rates)
    again = rates_of(f'points<rate = 1.0, at = "{", ".join(map(str, found))}">', len(rates) + 2)
    assert again[: len(rates)] == pytest.approx(rates.tolist(), rel=0, abs=2e-6)
    assert again[-1] == rates[-1]


def test_few_points_stand_for_many_steps() -> None:
    """A warmup and half a cosine are three points, however long; another curve has few, too."""
    found = schedules.points(
        np.array([warm_cosine(t, warmup=100, num_training_steps=9000) for t in range(9001)])
    )
    assert [(p.step, p.is_cosine) for p in found] == [(0, False), (100, True), (9000, False)]
    curve = schedules.points(1 / (1 + np.arange(20000)) ** 0.5)
    assert len(curve) < 1000


@pytest.mark.parametrize("name", extent(["warmup"], ["warmup", "transformers"]))
def test_a_run_trains_as_torch_does_with_the_scheduler(name: str) -> None:
    """Step by step, over a run on ranks."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    program = shardir.compile(
        model, batches[0][0], labels=batches[0][1], loss=mse_loss, optimizer=optimizer,
        scheduler=scheduler, mesh="dp = 2", plan="fsdp",
    )  # fmt: skip
    report = program.run(batches, steps=STEPS)
    losses = []
    for x, y in batches:
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert list(report.losses["step"]) == pytest.approx(losses, rel=1e-4)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(program.state_dict()[key], value, rtol=1e-4, atol=1e-6)


def test_a_schedule_scales_each_group() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(a, b)
    optimizer = torch.optim.SGD([{"params": a.parameters()}, {"params": b.parameters(), "lr": 1.0}],
                                lr=0.5)  # fmt: skip
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    names = {id(p): n for n, p in model.named_parameters()}
    read = optimizers.read(optimizer, names, scheduler)
    assert read.text == "sgd, lr = step<rate = 0.5, every = 2, factor = 0.5>, weight_decay = 0.0"
    assert read.lr_scales == {"1.weight": 2.0, "1.bias": 2.0}
    sampled = optimizers.read(optimizer, names, lr_scheduler.MultiStepLR(optimizer, [3], 0.5))
    assert 'lr = points<rate = 0.5, at = "0: 1.0, 2: 1.0, 3: 0.5">' in sampled.text
    assert sampled.lr_scales == read.lr_scales


GROUPS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one end": SCHEDULERS["cosine"],
    "functions of their own": lambda o: lr_scheduler.LambdaLR(
        o, [partial(warm_cosine, warmup=n, num_training_steps=9) for n in (1, 2, 2)]
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_have_schedules_of_their_own(name: str) -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
    rates = [0.0, 0.1, 0.2] if name == "functions of their own" else [0.3, 0.1, 0.1]
    optimizer = torch.optim.SGD(
        [{"params": m.parameters(), "lr": r} for m, r in zip(model, rates, strict=True)]
    )
    scheduler = GROUPS[name](optimizer)
    names = {id(p): n for n, p in model.named_parameters()}
    found = optimizers.read(optimizer, names, scheduler)
    law = found.text.partition("lr = ")[2].partition(", weight_decay")[0]
    texts = [found.rates.get(n, law) for n in names.values()]
    ours = [[x * found.lr_scales.get(n, 1.0) for x in rates_of(text, 10)]
            for n, text in zip(names.values(), texts, strict=True)]  # fmt: skip
    wanted = []
    for _ in range(10):
        wanted.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(np.transpose(ours), wanted, rtol=0, atol=3e-7)


@pytest.mark.parametrize("name", [*SCHEDULERS, *SAMPLED])
@pytest.mark.parametrize("changed", [1.0, 0.5])
def test_a_scheduler_that_has_stepped_goes_on(name: str, changed: float) -> None:
    """From its own rates, and from one that was changed by hand on the way."""
    optimizer = sgd(0.1)
    scheduler, begun = (SCHEDULERS | SAMPLED)[name](optimizer), 3
    for _ in range(begun):
        optimizer.step()
        scheduler.step()
    optimizer.param_groups[0]["lr"] *= changed
    names = {id(p): "w" for p in optimizer.param_groups[0]["params"]}
    steps = STEPS if name in SAMPLED or changed != 1.0 else None
    found = optimizers.read(optimizer, names, scheduler, steps)
    assert found.count == begun
    text = found.text.partition("lr = ")[2].partition(", weight_decay")[0]
    expected = []
    for _ in range(begun, STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates_of(text, STEPS)[begun:] == pytest.approx(expected, rel=0, abs=3e-7)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no end": (lambda: SAMPLED["lambda"](sgd(0.1)), "use scheduler_steps=1000: after them"),
    "plateau": (lambda: lr_scheduler.ReduceLROnPlateau(sgd(0.1)), "got ReduceLROnPlateau"),
    "momentum": (
        lambda: lr_scheduler.OneCycleLR(
            torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.1, momentum=0.9), 1.0, 9
        ),
        "use cycle_momentum=False",
    ),
    "long": (
        lambda: lr_scheduler.MultiStepLR(sgd(0.1), [10**7]),
        "expected 0 to 1,000,000 steps of MultiStepLR, got 10,000,000",
    ),
    "negative": (
        lambda: lr_scheduler.LambdaLR(sgd(0.1), partial(lambda t, **_: -t, num_training_steps=2)),
        "expected rates of at least 0 of LambdaLR, got -2.0",
    ),
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


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("", "expected step: factor, got ''"),
        ("0: 1.0, 5", "expected step: factor, got '5'"),
        ("0: -1.0", "expected step: factor, got '0: -1.0'"),
        ("5: 1.0, 5: 0.5", "expected steps that increase, got 5, 5"),
    ],
)
def test_wrong_points_are_refused(at: str, message: str) -> None:
    with pytest.raises(ShardirError, match=re.escape(f"[G10] {message}")):
        rates_of(f'points<rate = 0.1, at = "{at}">', 1)
