"""The training steps of a module: a loss, an optimizer, and how gradients are combined.

    shardir.Step(critic_loss, (real, noise), optimizer=torch.optim.Adam(gan.critic.parameters()))

A program has one step of a module and its loss, or several steps, each a function of the module.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from xdsl.dialects.builtin import ModuleOp

from shardir.build import Module
from shardir.diagnostics import ShardirError, describe
from shardir.dialects.nn.base import Array
from shardir.dialects.train import Role, StateKeys, arguments
from shardir.frontends.torch import optimizer_states, optimizers, rules
from shardir.frontends.torch.capture import UNTRAINED, Capture, name_of
from shardir.frontends.torch.importer import Imported
from shardir.frontends.torch.optimizer_states import TorchForm


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step trains.

    Args:
        optimizer: an optimizer of torch.optim; a function of the parameters that returns one, such
            as `shardir.optimizer(update, lr=1e-3)`; or a text: `adamw, lr = 1e-3`.
        scheduler: the optimizer's scheduler, of torch.optim.lr_scheduler.
        scheduler_steps: the number of steps for which to sample the scheduler's rates.
        accumulate: `tokens, microbatches = 4`, or `mean, ...`.
        clip: `norm, max = 1.0`.
        loss_scale: `static, factor = 1024.0`.
        metrics: `gradient_norm, learning_rate`.
        ema: the decay of a moving average of each parameter: 0.999.
        separate_update: whether `trainer.backward(batch)` and `trainer.update()` are apart.
    """

    optimizer: Any
    scheduler: Any = None
    scheduler_steps: int | None = None
    accumulate: str | None = None
    clip: str | None = None
    loss_scale: str | None = None
    metrics: str | None = None
    ema: float | None = None
    separate_update: bool = False


@dataclass(frozen=True)
class Inference:
    """A function of the parameters, without training: an evaluation, samples.

    Args:
        function: `function(model, *inputs)`, what is computed.
        inputs: example arguments after the model: a tensor, a tuple of them, or a dict by name.
        train: whether modules are as they are, rather than in eval().
    """

    function: Callable[..., Any]
    inputs: Any = ()
    train: bool = False


@dataclass(frozen=True)
class Step(StepOptions):
    """One of several training steps over the same parameters: it trains those of its optimizer, and
    reads the others.

    Args:
        function: `function(model, *inputs)`, the loss: a scalar, or a tuple or dict of the loss and
            metrics.
        inputs: example arguments after the model: a tensor, a tuple of them, or a dict by name.
        parameters: those that are trained, where the optimizer is a text or a function; by default
            all that require gradients.

    Steps whose optimizer is one object share its states, as in torch.
    """

    function: Callable[..., Any]
    inputs: Any = ()
    parameters: Iterable[torch.Tensor] | None = None


@dataclass(frozen=True)
class StepOptimizer:
    """The optimizer of a step, and the parameters that it trains."""

    optimizer: Any
    parameters: list[torch.Tensor]


def make_optimizer(model: torch.nn.Module, step: Step) -> StepOptimizer:
    """Make the optimizer of a step."""
    of_model = list(model.parameters())
    known, given = {id(p) for p in of_model}, of_model
    if step.parameters is not None:
        given = list(step.parameters)
    if others := [p for p in given if id(p) not in known]:
        raise ShardirError(
            f"expected parameters of the module as parameters of {name_of(step.function)}, got "
            f"{describe(others[0])}; give an iterable of them, such as model.head.parameters()"
        )
    parameters = [p for p in given if p.requires_grad]
    optimizer = optimizers.make(step.optimizer, parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        if step.parameters is not None and optimizer is step.optimizer:
            raise ShardirError(
                f"expected parameters beside a text or a function as optimizer of "
                f"{name_of(step.function)}, got an optimizer, which has its own; drop parameters"
            )
        held = (p for group in optimizer.param_groups for p in group["params"])
        parameters = [p for p in held if p.requires_grad]
    return StepOptimizer(optimizer, parameters)


def check_schedulers(steps: Mapping[str, Step], made: Mapping[str, StepOptimizer]) -> None:
    """Raise ShardirError if steps of one optimizer have several schedulers: its rates are of its
    own steps, which are those of all of them."""
    for (a, first), (b, second) in combinations(steps.items(), 2):
        is_one = made[a].optimizer is made[b].optimizer
        is_of_torch = isinstance(made[a].optimizer, torch.optim.Optimizer)
        if is_one and is_of_torch and first.scheduler is not second.scheduler:
            raise ShardirError(
                f"expected one scheduler of {a} and {b}, which share an optimizer, got "
                f"{describe(first.scheduler)} and {describe(second.scheduler)}; give both the same"
            )


def state_keys(name: str, made: Mapping[str, StepOptimizer]) -> StateKeys:
    """Return the keys of the states of a step: of its own name, where no other step trains its
    parameters; else of the first step with the same optimizer."""
    counts = Counter(id(p) for m in made.values() for p in m.parameters)
    own = made[name]
    same = [other for other, m in made.items() if m.optimizer is own.optimizer and other != name]
    shares = bool(same) and isinstance(own.optimizer, torch.optim.Optimizer)
    if not shares and all(counts[id(p)] == 1 for p in own.parameters):
        return StateKeys(name)
    return StateKeys(name, next(n for n in made if n == name or (shares and n in same)))


@dataclass(frozen=True)
class AddedStep:
    """A step in a module of the compiler.

    Args:
        schedule: the state of the scheduler.
        trained: the names of trained parameters, by the id of the parameter.
        count: the number of completed steps of its optimizer.
    """

    captured: Capture
    imported: Imported
    optimizer: Any
    scheduler: Any
    schedule: Any
    keys: StateKeys
    trained: Mapping[int, str]
    count: int

    def states(self, module: ModuleOp) -> dict[str, Array]:
        """Return the states of an optimizer of torch, by their keys in the program."""
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            return {}
        of = self.optimizer, self.keys, self.trained
        return optimizer_states.read_states(*of, module, self.count)

    def form(self) -> TorchForm | None:
        """Return the form of an optimizer of torch, in which a program returns its states."""
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            return None
        return TorchForm.of(self.optimizer, self.scheduler, self.keys, self.trained)


def add_step(
    module: Module, captured: Capture, imported: Imported, optimizer: Any, options: StepOptions,
    keys: StateKeys, prefix: str = "", **requests: Any,
) -> AddedStep:  # fmt: skip
    """Request the training step of an imported loss.

    Args:
        optimizer: that of the options, made.
        prefix: the beginning of the names of functions that update parameters.
        requests: further options of the step: sync, pipeline.

    Raises:
        ShardirError: no parameter is trained, or the optimizer lacks one.
    """
    trained = trained_parameters(imported)
    names = {id(p): n for n, p in imported.model.named_parameters()} | trained
    read = optimizers.read(optimizer, names, options.scheduler, options.scheduler_steps, trained)
    _check_trained(trained, optimizer)
    by_rule = rules.add_rules(module, optimizer, trained, prefix) if read.by_rules else {}
    imported.own_numbers(read.lr_scales, read.weight_decays, read.rates, by_rule)
    module.step(
        keys.step, imported.function.name, read.text, accumulate=options.accumulate,
        clip=options.clip, loss_scale=options.loss_scale, metrics=options.metrics,
        ema=options.ema, states=keys.own, separate_update=options.separate_update, **requests,
    )  # fmt: skip
    schedule = None if options.scheduler is None else deepcopy(options.scheduler.state_dict())
    return AddedStep(
        captured, imported, optimizer, options.scheduler, schedule, keys, trained, read.count
    )


def trained_parameters(imported: Imported) -> dict[int, str]:
    """Return the imported names of trained parameters, by the id of the parameter.

    Raises:
        ShardirError: no parameter is trained.
    """
    tensors = dict(named_tensors(imported.model))
    names = {
        id(tensors[a.key]): a.key for a in arguments(imported.function.func)
        if a.role is Role.PARAMETER and a.key is not None
    }  # fmt: skip
    if not names:
        raise ShardirError(UNTRAINED)
    return names


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _check_trained(trained: Mapping[int, str], optimizer: Any) -> None:
    """Raise ShardirError if an optimizer of torch lacks trained parameters."""
    if isinstance(optimizer, str):
        return
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    left = [name for key, name in trained.items() if key not in held]
    if left:
        raise ShardirError(
            f"expected an optimizer of all parameters that require gradients, got one without "
            f"{', '.join(left[:3])}{', ...' if len(left) > 3 else ''}; add them, or freeze them: "
            "requires_grad_(False)"
        )


@contextmanager
def training_only(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let only these of a module's parameters require gradients, for a block."""
    trained = {id(p) for p in parameters}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in trained]
    for p in frozen:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)
