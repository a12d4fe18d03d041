"""Optimizers whose updates are traced: functions, and classes of torch. They equal torch."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import sampled
from support.modules.wrong_uses import assert_one_message
from torch import nn, optim
from torch.nn.functional import dropout, mse_loss

import shardir
from shardir.dialects.dist import AllGatherOp, global_type, meshes_of
from shardir.dialects.train import InitAttr, Role, arguments, updated_keys
from shardir.interpret.evaluator import function, run

G = torch.Generator().manual_seed(3)
X, Y = (torch.randn(8, n, generator=G, dtype=torch.float64) for n in (8, 4))


class Net(nn.Module):
    """Trains matrices, vectors and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def muon(parameter: Any, gradient: Any, state: Any, *, lr: Any, step: Any, momentum: float) -> Any:
    """Orthogonalises the momentum of matrices; others are updated as by Adam."""
    mean = momentum * state["mean"] + (1 - momentum) * gradient
    square = 0.99 * state["square"] + 0.01 * gradient**2
    if parameter.dim() == 2:
        x = mean / (mean.norm() + 1e-7)
        x = 1.5 * x - 0.5 * x @ x.T @ x
    else:
        root = torch.sqrt(square / (1 - 0.99**step))
        x = mean / (1 - momentum**step) / (root + 1e-8)
    slow = torch.lerp(state["slow"], parameter, 0.1)
    return parameter - lr * x, {"mean": mean, "square": square, "slow": slow, "n": state["n"] + 1}


STATES = {
    "mean": 0.0,
    "square": torch.zeros_like,
    "slow": torch.clone,
    "n": lambda p: p.new_zeros(()),
}


class Old(optim.Optimizer):
    """Written as before torch 1.5: by `data`, with a number of steps of Python."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p.data)
                state["step"] += 1
                state["mean"].mul_(0.9).add_(p.grad.data, alpha=0.1)
                p.data.add_(state["mean"], alpha=-group["lr"] / (1 - 0.9 ** state["step"]))


OPTIMIZERS: dict[str, Callable[[list[Any]], optim.Optimizer]] = {
    "function": shardir.optimizer(muon, lr=0.05, states=STATES, whole=True, momentum=0.9),
    "Adadelta": optim.Adadelta,
    "RAdam": lambda p: optim.RAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "Rprop": optim.Rprop,
    "ASGD": lambda p: optim.ASGD(p, 0.1, lambd=0.01),
    "AdamW": lambda p: optim.AdamW(p, 0.01, amsgrad=True, maximize=True),
    "betas": lambda p: optim.Adam([
        {"params": p[:2], "betas": (0.5, 0.9)}, {"params": p[2:], "lr": 0.1, "weight_decay": 0.1},
    ], 0.01),
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1, initial_accumulator_value=0.1, maximize=True),
    "Muon": lambda p: optim.Muon([{"params": [q for q in p if q.dim() == 2], "whole": True}]),
    "Old": lambda p: Old(p, 0.1),
}  # fmt: skip
LAYOUTS = {
    "fsdp": {"mesh": "dp = 4", "plan": "fsdp(dp)"},
    "2d": {"mesh": "dp = 2, tp = 2", "plan": "megatron(tp) * fsdp(dp)"},
    "auto": {"mesh": "dp = 2, tp = 2", "mode": "auto"},
}


def compiled(make: Any, model: Any = None, **options: Any) -> Any:
    model = net() if model is None else model
    return shardir.compile(model, X, labels=Y, loss=mse_loss, optimizer=make, **options)


def stepped(program: Any, steps: int) -> dict[str, Any]:
    """Return parameters and states after so many steps, by the interpreter."""
    f, meshes = function(program.module, "step"), meshes_of(program.module)
    values = {name: x.detach().numpy() for name, x in program.values.items()}
    roles = arguments(f)
    for a, arg in zip(roles, f.body.block.args, strict=True):
        if a.role is Role.STATE and a.key not in values:
            assert isinstance(a.init, InitAttr)
            of, shape = a.init.values.get("of"), global_type(arg.type, meshes.get("m")).get_shape()
            values[a.key] = np.full(shape, a.init.values["value"]) if of is None else values[of]
    for _ in range(steps):
        inputs = iter([X.numpy(), Y.numpy()])
        given = [next(inputs) if a.key is None else values[a.key] for a in roles]
        results = run(program.module, "step", given)
        values |= {k: v for k, v in zip(updated_keys(f), results, strict=True) if k is not None}
    return values


def assert_equal_to_torch(program: Any, make: Any, model: Any) -> None:
    """Three steps in f64 have the parameters and states of torch."""
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        optimizer.zero_grad()
        mse_loss(model(X), Y).backward()
        optimizer.step()
    ours = stepped(program, 3)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(ours[name], p.detach(), rtol=1e-9, atol=1e-12, err_msg=name)
        for kind, x in optimizer.state.get(p, {}).items():
            key = "step.count" if kind == "step" else f"{name}.{kind}".replace("_buffer", "")
            if key in ours:  # an update may not read the number of steps
                np.testing.assert_allclose(ours[key], x, rtol=1e-6, atol=1e-12, err_msg=key)
            else:
                assert kind == "step"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_runs_in_each_layout(layout: str) -> None:
    make = OPTIMIZERS["function"]
    program = compiled(make, **LAYOUTS[layout])
    assert_equal_to_torch(program, make, net())
    if layout == "fsdp":  # what is gathered for the update is the momentum of matrices alone
        ops = function(program.module, "step").body.block.ops
        names = [op.results[0].name_hint or "" for op in ops if isinstance(op, AllGatherOp)]
        assert [n for n in names if "mean" in n] == ["up.weight_mean", "down.weight_mean"]


@pytest.mark.parametrize("name", sampled([n for n in OPTIMIZERS if n != "function"], 2))
def test_steps_of_a_class_are_traced(name: str) -> None:
    model = net()
    if name == "Muon":
        for p in model.parameters():
            p.requires_grad_(p.dim() == 2)
    program = compiled(OPTIMIZERS[name], model, mode="stand_alone")
    assert "<rules, lr" in str(program.imported.module)
    if name != "Muon":  # its products are in bf16, whose rounding depends on the order of sums
        assert_equal_to_torch(program, OPTIMIZERS[name], model)


def test_half_precision_is_updated_in_f32() -> None:
    model, x, y = nn.Linear(8, 4, bias=False).bfloat16(), X.bfloat16(), Y.bfloat16()
    program = shardir.compile(
        model, x, labels=y, loss=mse_loss, mode="stand_alone",
        optimizer=lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    )  # fmt: skip
    rule = str(program.imported.module).partition('train.rule = "elementwise"')[2]
    assert "dense<9.990000e-01>" in rule.partition("func.return")[0]


def test_numbers_of_groups_that_are_printed_alike_differ() -> None:
    decays = [torch.tensor(x, dtype=torch.float64) for x in (1.00001, 1.00004)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    groups = [
        {"params": layer.parameters(), "decay": decay}
        for layer, decay in zip(model, (*decays, decays[1]), strict=True)
    ]
    optimizer = shardir.optimizer(decayed, groups, lr=0.1, decay=0.0)
    program = compiled(optimizer, model, mode="stand_alone")
    assert_equal_to_torch(program, lambda _: optimizer, model)


def of_shape(parameter: Any, gradient: Any, state: Any, lr: Any) -> Any:
    return parameter.sum() - lr * gradient.sum()


def by_step(parameter: Any, gradient: Any, state: Any, lr: Any, step: Any) -> Any:
    return parameter if step > 3 else parameter - lr * gradient


def by_root(parameter: Any, gradient: Any, state: Any, lr: Any, step: Any) -> Any:
    return parameter - lr * math.sqrt(step) * gradient


def dropped(parameter: Any, gradient: Any, state: Any, lr: Any) -> Any:
    return parameter - lr * dropout(gradient)


def renamed(parameter: Any, gradient: Any, state: Any, lr: Any) -> Any:
    return parameter - lr * gradient, {"other": gradient}


def decayed(parameter: Any, gradient: Any, state: Any, lr: Any, decay: Any) -> Any:
    return parameter - lr * (gradient + decay * parameter)


def averaged(parameter: Any, gradient: Any, state: Any, lr: Any) -> Any:
    mean = 0.9 * state["mean"] + gradient
    return parameter - lr * mean, {"mean": mean}


def without_rate(parameter: Any, gradient: Any, state: Any) -> Any:
    return parameter - gradient


def counting() -> Callable[..., Any]:
    calls = list[int]()

    def counted(parameter: Any, gradient: Any, state: Any, lr: Any) -> Any:
        calls.append(1)
        return parameter - lr * gradient * len(calls)

    return counted


class Counting(optim.Optimizer):
    """Has a state that is no function of tensors."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["n"] = self.state[p].get("n", 0) + 1
            p.data.add_(p.grad, alpha=-0.1 / self.state[p]["n"])


def test_an_update_for_one_large_shape_is_compared_at_it() -> None:
    """On the small parameter in its place the function fails."""
    weights = torch.linspace(0.5, 1.5, 8 * 640).reshape(640, 8).double()

    def weighted(parameter: Any, gradient: Any, state: Any, lr: Any) -> Any:
        return parameter - lr * gradient * weights

    model = nn.Sequential(nn.Linear(8, 640, bias=False), nn.Linear(640, 4)).double()
    model[1].requires_grad_(False)
    optimizer = shardir.optimizer(weighted, lr=0.1)
    program = compiled(optimizer, model, mode="stand_alone")
    assert_equal_to_torch(program, optimizer, model)


def line_of(update: Any, offset: int) -> str:
    return f"{update.__code__.co_filename}:{update.__code__.co_firstlineno + offset}"


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "not elementwise": (
        lambda: compiled(shardir.optimizer(muon, lr=0.1, states=STATES, momentum=0.9)),
        f"expected an elementwise update, got nn.reduce at {line_of(muon, 5)} in muon; use whole=",
    ),
    "not elementwise class": (
        lambda: compiled(
            lambda p: optim.Muon([q for q in p if q.dim() == 2]), nn.Linear(8, 4, False).double()
        ),
        'in Muon; use whole=True in its group, {"params": ..., "whole": True}',
    ),
    "by a condition": (
        lambda: compiled(shardir.optimizer(by_step, lr=0.1)),
        f"in by_step at {line_of(by_step, 1)}: an `if`, or a number of Python, that depends on a",
    ),
    "by a number": (
        lambda: compiled(shardir.optimizer(by_root, lr=0.1)),
        f"in by_root at {line_of(by_root, 1)}: an `if`, or a number of Python, that depends on a",
    ),
    "random": (
        lambda: compiled(shardir.optimizer(dropped, lr=0.1)),
        f"without random numbers, got aten.bernoulli.p at {line_of(dropped, 1)}",
    ),
    "another shape": (
        lambda: compiled(shardir.optimizer(of_shape, lr=0.1)),
        "expected the new parameter of of_shape of [8, 8], got []",
    ),
    "other states": (
        lambda: compiled(shardir.optimizer(renamed, lr=0.1, states={"mean": 0.0})),
        "expected the new states mean of renamed, got other",
    ),
    "a state of the parameter's values": (
        lambda: compiled(shardir.optimizer(averaged, lr=0.1, states={"mean": torch.abs})),
        "one number or with the parameter, got mean of averaged; make another first value in the",
    ),
    "a state of the parameter's norm": (
        lambda: compiled(shardir.optimizer(averaged, lr=0.1, states={"mean": torch.norm})),
        "one number or with the parameter, got mean of averaged; make another first value in the",
    ),
    "a state of the parameter's size": (
        lambda: compiled(
            shardir.optimizer(averaged, lr=0.1, states={"mean": lambda p: p * 0 + 1 / len(p)}),
            nn.Sequential(nn.Linear(8, 640, bias=False), nn.Linear(640, 4, bias=False)).double(),
        ),
        "one number or with the parameter, got mean of averaged; make another first value in the",
    ),
    "a state called step": (
        lambda: shardir.optimizer(averaged, lr=0.1, states={"step": 0.0}),
        "expected names of states and hyperparameters other than step, the number of the step",
    ),
    "no rate": (
        lambda: shardir.optimizer(without_rate, lr=0.1),
        "expected an update with an argument lr, got without_rate(parameter",
    ),
    "a number that Python keeps": (
        lambda: compiled(shardir.optimizer(counting(), lr=0.1)),
        "got counted, whose step 1 makes another value of the parameter than its other steps",
    ),
    "a number that Python keeps, of large parameters": (
        lambda: compiled(
            shardir.optimizer(counting(), lr=0.1),
            nn.Sequential(nn.Linear(8, 640, bias=False), nn.Linear(640, 4, bias=False)).double(),
        ),
        "got counted, whose step 1 makes another value of the parameter than its other steps",
    ),
    "no function of states": (
        lambda: compiled(Counting),
        "got Counting, whose step 1 makes another value of the parameter than its other steps",
    ),
}


@pytest.mark.parametrize("name", sampled(WRONG, 4, ["a number that Python keeps"]))
def test_what_cannot_be_traced_is_named(name: str) -> None:
    assert_one_message(*WRONG[name])
