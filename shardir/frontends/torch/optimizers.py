"""Optimizers of torch as optimizers of ours: their class, and their parameters' groups.

torch.optim.AdamW(...)                 adamw, lr = ..., beta1 = ..., ...
torch.optim.AdamW(..., amsgrad=True)   rules, lr = ...: the update of each parameter is traced
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardir.compat.torch import has_hooks
from shardir.diagnostics import ShardirError
from shardir.frontends.torch import optimizer_states
from shardir.frontends.torch.optimizer_states import STEP
from shardir.frontends.torch.schedules import begun, schedule

ParamGroup = Mapping[str, Any]


@dataclass(frozen=True)
class ImportedOptimizer:
    """An optimizer's text, and the numbers of parameter groups that differ from it."""

    text: str
    lr_scales: dict[str, float] = field(default_factory=dict)
    weight_decays: dict[str, float] = field(default_factory=dict)
    rates: dict[str, str] = field(default_factory=dict)
    """The schedules of parameters whose group has a schedule of its own."""
    count: int = 0
    """The steps that are done, from which the schedule and the optimizer go on."""
    by_rules: bool = False
    """Whether the update of each parameter is a rule (rules.py)."""


def _betas(g: ParamGroup) -> str:
    beta1, beta2 = g["betas"]
    return f"beta1 = {beta1!r}, beta2 = {beta2!r}, eps = {g['eps']!r}"


def _sgd(g: ParamGroup) -> str:
    if not g["momentum"]:
        return "sgd, lr = {lr}, weight_decay = {decay}"
    kind = "nesterov" if g["nesterov"] else "momentum"
    return f"{kind}, lr = {{lr}}, momentum = {g['momentum']!r}, weight_decay = {{decay}}"


def _adafactor(g: ParamGroup) -> str:
    eps1, eps2 = g["eps"]
    first = "" if eps1 is None else f", eps1 = {eps1!r}"
    return (
        f"adafactor, lr = {{lr}}, beta2_decay = {g['beta2_decay']!r}{first}, eps2 = {eps2!r}, "
        f"clip = {g['d']!r}, weight_decay = {{decay}}"
    )


def _rmsprop(g: ParamGroup) -> str:
    return (
        f"rmsprop, lr = {{lr}}, alpha = {g['alpha']!r}, eps = {g['eps']!r}, momentum = "
        f"{g['momentum']!r}, centered = {int(g['centered'])}, weight_decay = {{decay}}"
    )


def _adagrad(g: ParamGroup) -> str:
    return (
        f"adagrad, lr = {{lr}}, lr_decay = {g['lr_decay']!r}, initial = "
        f"{g['initial_accumulator_value']!r}, eps = {g['eps']!r}, weight_decay = {{decay}}"
    )


def _nadam(g: ParamGroup) -> str:
    return (
        f"nadam, lr = {{lr}}, {_betas(g)}, weight_decay = {{decay}}, momentum_decay = "
        f"{g['momentum_decay']!r}, decoupled = {int(g['decoupled_weight_decay'])}"
    )


FORMS = {
    torch.optim.AdamW: lambda g: f"adamw, lr = {{lr}}, {_betas(g)}, weight_decay = {{decay}}",
    torch.optim.Adam: lambda g: f"adam, lr = {{lr}}, {_betas(g)}, weight_decay = {{decay}}",
    torch.optim.SGD: _sgd,
    torch.optim.Adafactor: _adafactor,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
    torch.optim.NAdam: _nadam,
    torch.optim.Adamax: lambda g: f"adamax, lr = {{lr}}, {_betas(g)}, weight_decay = {{decay}}",
}
"""The text of a group's hyperparameters, by the optimizer's class."""

TRACED = ("amsgrad", "maximize", "dampening")
"""Options that change the update, and that FORMS do not have."""


def read(
    optimizer: Any, names: Mapping[int, str], scheduler: Any = None, steps: int | None = None,
    trained: Mapping[int, str] | None = None,
) -> ImportedOptimizer:  # fmt: skip
    """Import an optimizer of torch, or the text of one of ours.

    Args:
        names: the names of parameters, by id.
        scheduler: its rates are sampled; without one the groups' current rates count, which the
            loop of a training may change where they are tensors.
        steps: the number of steps to sample.
        trained: the names of trained parameters, by id, by default all.

    Raises:
        ShardirError: it is no optimizer, or it has hooks; shardir has no such scheduler; or
            parameters have different numbers of steps.
    """
    if isinstance(optimizer, str):
        if scheduler is not None:
            raise ShardirError(
                "expected an optimizer of torch.optim with a scheduler, got a text; give the text "
                "a schedule: lr = cosine<rate = 0.001, steps = 100>"
            )
        return ImportedOptimizer(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ShardirError(
            "expected an optimizer of torch.optim, a function (shardir.optimizer), or a text such "
            f'as "adamw, lr = 1e-3", got {type(optimizer).__name__}'
        )
    groups = optimizer.param_groups
    if any(g.get("differentiable") for g in groups):
        raise ShardirError("expected an optimizer without differentiable, got differentiable=True")
    if has_hooks(optimizer):
        raise ShardirError("expected an optimizer without hooks around its step, got some")
    text = _text(optimizer)
    count = optimizer_states.steps_of(optimizer, names if trained is None else trained)
    if scheduler is not None and not any(STEP in s for s in optimizer.state.values()):
        count = begun(scheduler)
    found = None if scheduler is None else schedule(scheduler, optimizer, steps, count)
    rates = [float(g["lr"] if scheduler is None else g["initial_lr"]) for g in groups]
    if found is None:
        is_data = any(isinstance(g["lr"], torch.Tensor) for g in groups)
        found = ["given<rate = {lr}>" if is_data else "{lr}"] * len(groups)
    at = next((i for i, rate in enumerate(rates) if rate), 0)  # others are multiples of its rate
    base, law, decay = rates[at], found[at], groups[0].get("weight_decay", 0.0)
    scales, decays, own_rates = {}, {}, {}
    for g, rate, own in zip(groups, rates, found, strict=True):
        for p in g["params"]:
            if (name := names.get(id(p))) is None:
                raise ShardirError(
                    f"expected parameters of the module, got one outside of it, of "
                    f"{list(p.shape)} in the optimizer"
                )
            if own != law:
                own_rates[name] = own.replace("{lr}", repr(rate))
            elif rate != base:
                scales[name] = rate / base
            if text is not None and g["weight_decay"] != decay:
                decays[name] = float(g["weight_decay"])
    lr = law.replace("{lr}", repr(base))
    by_rules, text = text is None, text or "rules, lr = {lr}"
    text = text.format(lr=lr, decay=repr(float(decay)))
    return ImportedOptimizer(text, scales, decays, own_rates, count, by_rules)


def make(optimizer: Any, parameters: Sequence[torch.Tensor]) -> Any:
    """Return an optimizer, which a function makes from trained parameters.

    Raises:
        ShardirError: the function can't.
    """
    if not callable(optimizer):
        return optimizer
    try:
        return optimizer(parameters)
    except Exception as e:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise ShardirError(
            f"expected a function of the parameters that returns an optimizer, got {name}: "
            f"{type(e).__name__}: {e}; use shardir.optimizer(update, lr=1e-3)"
        ) from None


def _text(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the text of an optimizer, with the places {lr} and {decay}; None if shardir has no
    such optimizer or option, or if groups differ in other numbers."""
    groups = optimizer.param_groups
    form = next((f for kind, f in FORMS.items() if type(optimizer) is kind), None)
    if form is None or any(g.get(option) for g in groups for option in TRACED):
        return None
    texts = {form(g) for g in groups}
    return texts.pop() if len(texts) == 1 else None
