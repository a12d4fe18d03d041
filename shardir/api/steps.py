"""Modules of torch with several training steps, and functions beside them.

program = shardir.compile(
    gan,
    steps={
        "critic": shardir.Step(critic_loss, (real, noise), optimizer=Adam(gan.critic.parameters())),
        "maker": shardir.Step(maker_loss, noise, optimizer=Adam(gan.maker.parameters())),
        "samples": shardir.Inference(lambda gan, noise: gan.maker(noise), noise),
    },
    mesh="dp = 4",
)
with program.ranks() as trainer:
    trainer["critic"].step(real, noise)
    trainer["maker"].step(noise)
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardir.algebra.cluster import Cluster
from shardir.api.batches import examples_of, rows_of
from shardir.api.checks import ModuleCheck
from shardir.api.compiled import compile_module
from shardir.api.devices import MeshForm, devices_of
from shardir.api.model_program import ModelProgram
from shardir.api.step_checks import compare_steps
from shardir.api.training_state import TrainingState
from shardir.build import Module
from shardir.diagnostics import ShardirError, check_arguments, describe, did_you_mean
from shardir.dialects.train import StateKeys
from shardir.frontends.torch import weights
from shardir.frontends.torch.capture import Capture, capture, evaluating
from shardir.frontends.torch.importer import Imported, import_model
from shardir.frontends.torch.optimizer_states import TorchForm
from shardir.frontends.torch.steps import (
    AddedStep,
    Inference,
    Step,
    StepOptimizer,
    add_step,
    check_schedulers,
    make_optimizer,
    state_keys,
    training_only,
)
from shardir.syntax.files import scratch_folder

DATA, WEIGHTS = "data.npz", "weights.npz"
"""The files of inputs and initial values in a saved program."""

OPTIONS = (
    "mode", "plan", "pipeline", "precision", "recompute", "offload", "save_strategies", "target",
    "arena",
)  # fmt: skip
"""The options of a compilation that all steps have in common."""


@dataclass(frozen=True, eq=False, repr=False)
class CompiledSteps(ModelProgram):
    """A compiled module of torch with several functions over its parameters."""

    module_of_torch: nn.Module
    imported: Mapping[str, Imported]
    """Each function as it was imported, by its name in the program."""
    captured: Mapping[str, Capture]
    functions: Mapping[str, Step | Inference]
    """Each function as it was given."""
    steps: Mapping[str, AddedStep]
    forms: Mapping[str, TorchForm | None]
    """The forms of the optimizers at the compilation."""

    @property
    def model(self) -> nn.Module:
        return self.module_of_torch

    @property
    def step_keys(self) -> list[StateKeys]:
        return [step.keys for step in self.steps.values()]

    @check_arguments("save")
    def save(
        self, directory: str | Path, *, per_rank: bool = False, straight_line: bool = False
    ) -> Path:
        """Write a directory that needs only Python and torch, with the example inputs and the
        current values of weights and states.

        Args:
            per_rank, straight_line: see `Compiled.save`.

        Raises:
            ShardirError: the weights have no values.
        """
        with scratch_folder() as folder:
            weights.write(folder / WEIGHTS, self.values)
            rows = {
                f"{name}.{array}": x for name, imported in self.imported.items()
                for array, x in rows_of(imported, [examples_of(imported)]).items()
            }  # fmt: skip
            weights.save(folder / DATA, rows)
            states, aliases = self.state.states, self._aliases()
            return self._write(directory, folder, states, per_rank, straight_line, aliases)

    def run(self, *args: Any, **options: Any) -> Any:
        """Raise ShardirError: the loop of several steps is the user's."""
        raise ShardirError(
            f"expected a program with one training step, got {', '.join(self.steps)}; call them "
            f"in a loop of yours: with program.ranks() as trainer: "
            f"trainer[{next(iter(self.steps))!r}].step(...)"
        )

    @check_arguments("optimizer_state_dict")
    def optimizer_state_dict(self, step: str) -> dict[str, Any]:
        """Return the states of the optimizer of a step, after `load_checkpoint`, for its
        `load_state_dict`.

        Raises:
            ShardirError: there is no such step, or its optimizer is a text.
        """
        if step not in self.steps:
            hint = did_you_mean(step, self.steps)
            raise ShardirError(f"expected a step of {', '.join(self.steps)}, got {step}{hint}")
        form, states = self.forms[step], self.state.states
        if form is None:
            raise ShardirError(f"expected an optimizer of torch.optim in {step}, got a text")
        count = states.get(self.steps[step].keys.of_step("count"), form.count)
        return form.state_dict(states, int(count) - form.count)

    @check_arguments("check")
    def check(self, *, rounds: int = 2) -> ModuleCheck:
        """Compare the program, on local processes, with a copy of the module and its optimizers,
        which torch trains on one device, on the example inputs: the losses of all steps, in each
        round in their order, then the results of other functions, and parameters and buffers. Both
        begin with the values at the compilation. The state of this program does not change.

        Returns:
            The differences; `str` is their table.

        Raises:
            ShardirError: differences exceed rounding; or an optimizer is a text, or a function has
                random numbers (dropout), which differ in torch.
        """
        return compare_steps(self, rounds)


@check_arguments("compile")
def compile_steps(
    model: nn.Module | Mapping[str, nn.Module],
    *,
    steps: Mapping[str, Step | Inference],
    mesh: MeshForm | None = None,
    cluster: str | Cluster | None = None,
    devices: int | None = None,
    **options: Any,
) -> CompiledSteps:
    """Compile several functions of a module for the ranks of a mesh.

    Each parameter has one layout in all functions, which the first step that trains it decides on.

    Args:
        model: the module, or several by name: a dict.
        steps: `shardir.Step` and `shardir.Inference`, by their names in the program.
        mesh, cluster, devices: as of a module with one step.
        options: the options of `shardir.compile`: plan, mode, pipeline, ...

    Raises:
        ShardirError: a function can't be exported, imported or compiled.
    """
    for option in options:
        if option not in OPTIONS:
            fields = Step.__dataclass_fields__
            hint = f"; give it to shardir.Step(..., {option}=...)" if option in fields else (
                did_you_mean(option, [*OPTIONS, "mesh", "cluster", "devices"])
            )  # fmt: skip
            raise ShardirError(f"expected an option of compile with steps, got {option}{hint}")
    model = _module(model)
    trained = _check_steps(steps)
    target = devices_of(mesh, cluster, devices, options)
    module = Module(target.mesh, target.cluster)
    made = {name: make_optimizer(model, step) for name, step in trained.items()}
    check_schedulers(trained, made)
    added, imported = dict[str, AddedStep](), dict[str, Imported]()
    captured = dict[str, Capture]()
    for name, step in steps.items():
        if isinstance(step, Step):
            loss = f"{name}_loss"
            while loss in steps:
                loss += "_"
            added[name] = _add(module, model, name, loss, step, made)
            captured[name], imported[name] = added[name].captured, added[name].imported
        else:
            captured[name] = _capture(model, name, step)
            imported[name] = import_model(
                captured[name], module, name, train=False, private=False, arrays=f"{name}."
            )
    compiled = compile_module(module.module, **target.options)
    values = {key: x for f in imported.values() for key, x in f.values.items()}
    states = {key: x for s in added.values() for key, x in s.states(compiled.module).items()}
    return CompiledSteps(
        **vars(compiled), module_of_torch=model, imported=imported, captured=captured,
        functions=dict(steps), steps=added, forms={name: s.form() for name, s in added.items()},
        state=TrainingState(values, states),
    )  # fmt: skip


def _module(model: Any) -> nn.Module:
    """Return a module, or several by name as one. Raises ShardirError for something else."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Mapping) or not model:
        raise ShardirError(f"expected a module, or several by name, got {describe(model)}")
    if wrong := [name for name, part in model.items() if not isinstance(part, nn.Module)]:
        raise ShardirError(f"expected a module as {wrong[0]}, got {describe(model[wrong[0]])}")
    return nn.ModuleDict(dict(model))


def _check_steps(steps: Any) -> dict[str, Step]:
    """Return the steps that train. Raises ShardirError if there are none, or others are none."""
    if not isinstance(steps, Mapping) or not steps:
        raise ShardirError(
            "expected steps by name, {'critic': shardir.Step(...)}, got "
            f"{describe(steps) if steps else 'none'}"
        )
    for name, step in steps.items():
        if not isinstance(step, Step | Inference):
            raise ShardirError(
                f"expected a shardir.Step or shardir.Inference as {name}, got {describe(step)}"
            )
        if not callable(step.function):
            got = describe(step.function)
            raise ShardirError(f"expected a function of the module in {name}, got {got}")
        if not isinstance(name, str) or not name.isidentifier():
            raise ShardirError(f"expected names of Python as names of steps, got {name!r}")
    trained = {name: step for name, step in steps.items() if isinstance(step, Step)}
    if not trained:
        raise ShardirError(
            "expected a step that trains, got functions alone; compile each with train=False"
        )
    return trained


def _add(
    module: Module,
    model: nn.Module,
    name: str,
    loss: str,
    step: Step,
    made: Mapping[str, StepOptimizer],
) -> AddedStep:
    """Add a step that trains, and the function of its loss."""
    own = made[name]
    with training_only(model, own.parameters), _in_step(name):
        captured = capture(model, step.inputs, function=step.function)
        imported = import_model(captured, module, loss, arrays=f"{name}.")
        keys = state_keys(name, made)
        return add_step(module, captured, imported, own.optimizer, step, keys, f"{name}_")


def _capture(model: nn.Module, name: str, f: Inference) -> Capture:
    """Export a function without training."""
    with _in_step(name), training_only(model, []), nullcontext() if f.train else evaluating(model):
        return capture(model, f.inputs, train=False, function=f.function)


@contextmanager
def _in_step(name: str) -> Iterator[None]:
    """Name the step in the errors of a block."""
    try:
        yield
    except ShardirError as error:
        raise ShardirError(f"{name}: {error}") from None
