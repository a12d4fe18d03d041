"""Modules of torch, compiled in one call.

program = shardir.compile(model, x, labels=y, loss=cross_entropy, optimizer="adamw, lr = 1e-3",
                          mesh="dp = 2, tp = 2")
program.run(batches, steps=100)
model.load_state_dict(program.state_dict())
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from shardir.algebra.cluster import Cluster
from shardir.api.batches import (
    arrays_of,
    examples_of,
    microbatches_of,
    repeat_arrays,
    rows_of,
    split_batch,
    stateful_loader,
)
from shardir.api.checks import ModuleCheck, compare
from shardir.api.compiled import compile_module
from shardir.api.devices import SEARCH, MeshForm, devices_of
from shardir.api.model_program import ModelProgram
from shardir.api.training_state import TrainingState
from shardir.backend.runs import Batches, Options, Report, with_options
from shardir.build import Module
from shardir.diagnostics import ShardirError, check_arguments, check_call, describe, did_you_mean
from shardir.dialects.train import StateKeys, is_of_replica
from shardir.frontends.torch import optimizer_states, optimizers, weights
from shardir.frontends.torch.capture import LossFunction, capture, evaluating
from shardir.frontends.torch.eager import Eager
from shardir.frontends.torch.importer import (
    EVALUATION,
    FUNCTION,
    MODEL,
    STEP,
    Imported,
    import_model,
)
from shardir.frontends.torch.outputs import Outputs
from shardir.frontends.torch.steps import AddedStep, StepOptions, add_step
from shardir.syntax.files import copy_file, scratch_folder

DATA, WEIGHTS = "data.npz", "weights.npz"
"""The files of inputs and initial values in a saved program."""

OF_EXPORT = {
    "dynamic_shapes": "; shapes are static: compile once for each shape of the inputs, or pad them",
    "strict": "; drop it: a module is traced as it runs (strict=False)",
}
"""The fixes for options of torch.export, in error messages."""


@dataclass(frozen=True, eq=False, repr=False)
class CompiledModel(ModelProgram):
    """A compiled module of torch, for inference or with one training step."""

    imported: Imported
    outputs: Outputs | None = None
    """The form of the module's outputs, for inference only."""
    optimizer: optimizer_states.TorchForm | None = None
    """The form of the torch optimizer, if the program was compiled with one."""
    eager: Eager | None = None
    """The original module, loss and optimizer."""
    example: Any = None
    """The example inputs, in a pair with the labels if there are any."""

    @property
    def model(self) -> torch.nn.Module:
        return self.imported.model

    @property
    def step_keys(self) -> list[StateKeys]:
        return [StateKeys(STEP)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a program for inference, and return the outputs in the module's form. Buffers keep
        their new values. The arguments have the rows of all microbatches. Each call starts local
        ranks; use `shardir.load` for many calls.

        Raises:
            ShardirError: the program is for training, or the arguments differ from the examples.
        """
        if self.outputs is None:
            raise ShardirError("expected a program for inference, got a training step; use run()")
        check_call(forward := self.imported.model.forward, "the program", args, kwargs)
        batch = signature(forward).bind(*args, **kwargs).arguments
        for p in signature(forward).parameters.values():
            if p.kind is p.VAR_KEYWORD:
                batch |= batch.pop(p.name, {})
        with scratch_folder() as folder:
            dump = folder / "results.npz"
            batches = split_batch(batch, microbatches_of(self.input_module))
            program = self.save(folder / "program", batches)
            self.backend.run(program, Options.of({"dump": dump, "verbose": False}))
            self.state.take(dump)
            return self.outputs.made(weights.read_results(dump, FUNCTION))

    @check_arguments("save")
    def save(
        self,
        directory: str | Path,
        batches: Iterable[Any] | None = None,
        *,
        per_rank: bool = False,
        straight_line: bool = False,
    ) -> Path:
        """Write a directory that needs only Python and torch. It contains the data and the current
        values of weights and states, with which its runs begin at step 0.

        Args:
            batches: one for each step, by default the example inputs. A batch has the form of the
                example inputs, in a pair with labels if there are any: `(inputs, labels)`.
            per_rank, straight_line: see `Compiled.save`.

        Raises:
            ShardirError: a batch differs from the example inputs, or the weights have no values.
        """
        with scratch_folder() as folder:
            weights.write(folder / WEIGHTS, self.values)
            if batches is None:  # a function reads its microbatches, a step such rows again
                arrays = [examples_of(self.imported)] * microbatches_of(self.input_module)
            else:
                arrays = [arrays_of(self.imported, i, x) for i, x in enumerate(batches)]
            weights.save(folder / DATA, rows_of(self.imported, arrays))
            states, aliases = self.state.states, self._aliases()
            return self._write(directory, folder, states, per_rank, straight_line, aliases)

    @with_options
    @check_arguments("run")
    def run(
        self, batches: Iterable[Any] | None = None, *, local: bool = False, **options: Any
    ) -> Report:
        """Run the program on local processes, one for each rank. Afterwards `state_dict` has the
        trained values.

        A run continues where the previous run ended: parameters and buffers, the states of the
        optimizer, its schedule, random numbers, step numbers and the rows of files. `steps` is the
        number of steps of this run or, with `resume=`, of all steps from step 0 on. A run that
        fails, or that a signal ends, does not change the program.

        Args:
            batches: one for each step, read while the ranks train. A list or a loader is repeated;
                an iterator needs a batch for each step. By default the example inputs. The option
                `data=` names files instead. Checkpoints have the state of a loader with
                state_dict() and load_state_dict(), which goes on from it with `resume=`.
            local: whether a batch is a list of the ranks' parts of the global batch.
            options: those of a run.

        Raises:
            ShardirError: a batch differs from the example inputs.
            LaunchError: a rank fails, or there are too few batches.
        """
        if local and batches is None:
            raise ShardirError("expected batches with local=True, got none")
        if batches is not None and not self.imported.inputs:
            raise ShardirError(
                "expected no batches, since the module has no inputs; use run(steps=...)"
            )
        with scratch_folder() as folder:
            run_options, dump = Options.of(options), folder / "states.npz"
            if "steps_done" not in options:
                done = self.steps_done
                steps = run_options.steps + (done if run_options.resume is None else 0)
                run_options = replace(run_options, steps_done=done, steps=steps)
            program, fed = self.save(folder / "program"), None
            if batches is not None:
                loader = stateful_loader(batches, run_options)
                fed = Batches(repeat_arrays(self.imported, batches, local), local, loader)
            report = self.backend.run(program, replace(run_options, dump=dump), batches=fed)
            if report.stopped is None:
                if run_options.dump is not None:
                    copy_file(dump, run_options.dump)
                self.state.take(dump, report)
        return report

    @check_arguments("check")
    def check(self, batches: Sequence[Any] | None = None, *, steps: int = 2) -> ModuleCheck:
        """Compare the program, on local processes, with a copy of the module that torch trains on
        one device: the loss and the gradients of the first step, parameters and buffers after it,
        and the losses of later steps; for inference, the outputs. Both begin with the values at the
        compilation. The state of this program does not change.

        Args:
            batches: as in `run`; by default the example inputs.

        Returns:
            The differences; `str` is their table.

        Raises:
            ShardirError: differences exceed rounding; the message lists them by parameter, with the
                first op that differs. Or the module has random numbers (dropout), which differ in
                torch.
        """
        return compare(self, [self.example] if batches is None else list(batches), steps)

    @check_arguments("optimizer_state_dict")
    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the current states of the optimizer for its `load_state_dict`, with the learning
        rates of its scheduler.

        Raises:
            ShardirError: the program was compiled with an optimizer's text, or its replicas have
                states of their own.
        """
        if self.optimizer is None:
            raise ShardirError(
                "expected a program with an optimizer of torch.optim, got one with a text, or none"
            )
        if any(map(is_of_replica, self.state.states)):
            raise ShardirError(
                "expected a program without sync=..., whose replicas have states of their own"
            )
        return self.optimizer.state_dict(self.state.states, self.steps_done)


@check_arguments("compile")
def compile_model(
    model: torch.nn.Module,
    inputs: Any = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    labels: Any = None,
    loss: LossFunction | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scheduler_steps: int | None = None,
    train: bool = True,
    mesh: MeshForm | None = None,
    cluster: str | Cluster | None = None,
    devices: int | None = None,
    accumulate: str | None = None,
    clip: str | None = None,
    loss_scale: str | None = None,
    metrics: str | None = None,
    ema: float | None = None,
    separate_update: bool = False,
    sync: str | None = None,
    stages: str | None = None,
    derived: Collection[str] = (),
    trace: bool = False,
    evaluate: bool = False,
    check: bool = False,
    **options: Any,
) -> CompiledModel:
    """Compile a module for the ranks of a mesh.

    Args:
        inputs: example arguments: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments.
        keywords: further keyword arguments.
        labels: example labels, which `loss` gets after the outputs; a tuple of several.
        loss: a function of the outputs, and of the labels if there are any. By default the module
            returns the loss: a scalar, or an output with the name `loss`.
        optimizer: an optimizer of torch.optim; a function of the parameters that returns one, such
            as `shardir.optimizer(update, lr=1e-3)`; or a text: `adamw, lr = 1e-3`.
        scheduler: the optimizer's scheduler, of torch.optim.lr_scheduler.
        scheduler_steps: the number of steps for which to sample the scheduler's rates; the last
            rate stays. Needed for schedulers without an end, such as LambdaLR of a function.
        train: False compiles the forward part only. The module's own `training` decides whether
            dropout and batch norms train.
        mesh: the axes as a text, `dp = 2, tp = 4`, or a dict; a Mesh; or a cluster.
        cluster: the name or the text of a cluster, or a Cluster. Without a mesh, the mode auto
            searches for the fastest one.
        devices: the number of devices of a cluster without a mesh, by default all.
        accumulate: `tokens, microbatches = 4`, or `mean, ...` for a loss that averages all rows.
            docs/reference/language.md has this option of a step and the next ones. With train=False
            results are the concatenated microbatches; scalars are averaged.
        clip: `norm, max = 1.0`.
        loss_scale: `static, factor = 1024.0`.
        metrics: `gradient_norm, learning_rate`.
        ema: the decay of a moving average of each parameter, 0.999: `state_dict(ema=True)`.
        separate_update: whether `trainer.backward(batch)` and `trainer.update()` are apart, to
            accumulate gradients by hand, or look at them.
        sync: `nesterov, replicas = 4, every = 8, lr = 0.7, momentum = 0.9`. The mesh is the mesh of
            one replica, by default one device.
        stages: `1f1b, ranks = 4`; with train=False only the forward parts run. The mesh is the mesh
            of one stage, by default one device. With `search` and a cluster or a number of devices,
            a search chooses the mesh, the stages and the schedule of a step.
        derived: the names of autograd functions (torch.autograd.Function) to differentiate by their
            forward parts. Others are errors, since torch does not export their backward methods.
        trace: whether to trace the backward part that autograd runs (make_fx), autograd functions
            included, instead of deriving it. Layouts follow from structure less often for the
            traced ops, which are below autograd.
        evaluate: whether the program has the function `evaluate` beside the step: the loss and the
            metrics of the module in eval(), for `trainer.evaluate` and evaluations of runs.
        check: whether to compare the program with the module by `program.check()`.
        options: the options of `shardir.compile`: plan, mode, pipeline, ...

    Raises:
        ShardirError: the module can't be exported, imported or compiled, or the check fails.
    """
    known = signature(compile_module).parameters
    for option in options:
        if option not in known:
            names = [*signature(compile_model).parameters, *known]
            use = OF_EXPORT.get(option) or did_you_mean(option, names)
            raise ShardirError(f"expected an option of compile, got {option}{use}")
    if train and optimizer is None:
        raise ShardirError(
            'expected an optimizer, got none; use optimizer="adamw, lr = 1e-3", or train=False'
        )
    for_training = {"trace": trace or None, "loss": loss, "optimizer": optimizer,
                    "scheduler": scheduler, "scheduler_steps": scheduler_steps,
                    "derived": derived or None, "clip": clip, "loss_scale": loss_scale,
                    "metrics": metrics, "ema": ema, "sync": sync,
                    "separate_update": separate_update or None,
                    "evaluate": evaluate or None}  # fmt: skip
    for name, value in for_training.items():
        if not train and value is not None:
            raise ShardirError(
                f"expected no {name} with train=False, got {describe(value)}; drop {name}=..."
            )
    optimizer = optimizers.make(optimizer, [p for p in model.parameters() if p.requires_grad])
    step: AddedStep | None = None
    target = devices_of(mesh, cluster, devices, options | {"stages": stages, "sync": sync})
    captured = capture(model, inputs, labels, loss, train, keywords, derived, trace)
    stages = None if stages == SEARCH else stages
    one_device = {"d": 1} if sync is not None or stages is not None else None
    module = Module(target.mesh if target.mesh is not None else one_device, target.cluster)
    in_parts = not train and (accumulate, stages) != (None, None)
    name = MODEL if in_parts else FUNCTION
    imported = import_model(captured, module, name, train, train or in_parts)
    values = imported.values
    if in_parts:
        module.forward(FUNCTION, MODEL, accumulate=accumulate, pipeline=stages)
    elif train:
        if evaluate:
            with evaluating(model):
                beside = capture(model, inputs, labels, loss, True, keywords, derived)
            function = import_model(beside, module, EVALUATION, train=False, private=False)
            values = {**function.values, **values}
        options_of_step = StepOptions(
            optimizer=optimizer, scheduler=scheduler, scheduler_steps=scheduler_steps,
            accumulate=accumulate, clip=clip, loss_scale=loss_scale, metrics=metrics, ema=ema,
            separate_update=separate_update,
        )  # fmt: skip
        step = add_step(
            module, captured, imported, optimizer, options_of_step, StateKeys(STEP), sync=sync,
            pipeline=stages,
        )  # fmt: skip
    compiled = compile_module(module.module, **target.options)
    outputs = None if train else Outputs.of(captured.program)
    schedule = None if scheduler is None else deepcopy(scheduler.state_dict())
    program = CompiledModel(
        **vars(compiled), imported=imported,
        state=TrainingState(values, {} if step is None else step.states(compiled.module)),
        outputs=outputs, optimizer=None if step is None else step.form(),
        eager=Eager(captured, loss, keywords or {}, optimizer, scheduler, schedule, clip,
                    {path: m.training for path, m in model.named_modules()}),
        example=inputs if labels is None else (inputs, labels),
    )  # fmt: skip
    if check:
        program.check()
    return program
