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
    arrays_of_all,
    examples_of,
    microbatches_of,
    parts_of,
    rows_of,
)
from shardir.api.checks import ModuleCheck, compare
from shardir.api.compiled import Compiled, compile_module
from shardir.api.devices import SEARCH, MeshForm, devices_of
from shardir.api.training_state import TrainingState
from shardir.backend.runs import Batches, Options, Report
from shardir.build import Module
from shardir.diagnostics import ShardirError, check_arguments, check_call, describe, did_you_mean
from shardir.dialects.nn.base import Array
from shardir.dialects.train import InitAttr, Role, arguments, is_of_replica
from shardir.frontends.torch import optimizer_states, optimizers, weight_files, weights
from shardir.frontends.torch.capture import UNTRAINED, LossFunction, capture
from shardir.frontends.torch.eager import Eager
from shardir.frontends.torch.importer import FUNCTION, MODEL, STEP, Imported, import_model
from shardir.frontends.torch.outputs import Outputs
from shardir.rewriting.functions import bodies
from shardir.syntax.files import copy_file, scratch_folder

DATA, WEIGHTS = "data.npz", "weights.npz"
"""The files of inputs and of initial values that a program is written with."""

OF_EXPORT = {
    "dynamic_shapes": "; shapes are static: compile once for each shape of the inputs, or pad them",
    "strict": "; drop it: a module is traced as it runs (strict=False)",
}
"""The fix for options of torch.export."""


@dataclass(frozen=True, eq=False)
class CompiledModel(Compiled):
    """A compiled module of torch."""

    imported: Imported
    state: TrainingState
    """The values with which the next run begins."""
    outputs: Outputs | None = None
    """The form of the module's outputs, of a program for inference."""
    optimizer: optimizer_states.TorchForm | None = None
    """The form of the optimizer of torch that it was compiled with."""
    eager: Eager | None = None
    """The module, the loss and the optimizer that it was compiled from."""
    example: Any = None
    """The example inputs, with labels in a pair."""

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """The present value of each parameter and buffer, by the module's name for it."""
        return self.state.values

    @property
    def steps_done(self) -> int:
        """The steps of all runs since the program was compiled, or reset."""
        return self.state.steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of a program for inference, as the module returns them; buffers keep
        their new values. Of several microbatches the arguments have the rows of all. Each call
        starts local ranks: for many there is `shardir.load`.

        Raises:
            ShardirError: it is a program for training, or other arguments than the examples.
        """
        if self.outputs is None:
            raise ShardirError("expected a program for inference, got a training step; use run()")
        check_call(forward := self.imported.model.forward, "the program", args, kwargs)
        batch = signature(forward).bind(*args, **kwargs).arguments
        with scratch_folder() as folder:
            dump = folder / "results.npz"
            program = self.save(folder / "program", parts_of(batch, microbatches_of(self.given)))
            self.backend.run(program, Options.of({"dump": dump}))
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
        """Write a directory that needs only Python and torch, with the data and the present values
        of weights and states, with which its runs begin at step 0.

        Args:
            batches: one for each step, by default the example inputs. A batch has the form of the
                example inputs, with labels in a pair: `(inputs, labels)`.
            per_rank, straight_line: of the programs that are written, as of other compilations.

        Raises:
            ShardirError: a batch has other inputs, or the weights have no values.
        """
        with scratch_folder() as folder:
            weights.write(folder / WEIGHTS, self.values)
            if batches is None:  # a function reads its microbatches, a step such rows again
                found = [examples_of(self.imported)] * microbatches_of(self.given)
            else:
                found = [arrays_of(self.imported, i, x) for i, x in enumerate(batches)]
            weights.save(folder / DATA, rows_of(self.imported, found))
            return self._write(directory, folder, self.state.states, per_rank, straight_line)

    @check_arguments("run")
    def run(
        self, batches: Iterable[Any] | None = None, *, local: bool = False, **options: Any
    ) -> Report:
        """Run the program on local processes, one for each rank. Afterwards `state_dict` has the
        trained values.

        A run continues where the previous run ended: parameters and buffers, the states of the
        optimizer, its schedule, random numbers, the numbers of steps and the rows of files. `steps`
        is the number of steps of this run; with `resume=`, of all steps from step 0 on. A run that
        fails, or that a signal ends, changes nothing here.

        Args:
            batches: one for each step. They are taken while the ranks train, and not stored; an
                iterator has as many as there are steps, a list or a loader begins again at its end.
                By default the example inputs. `data=` of the options names files instead.
            local: a batch is a list of one for each rank, which is its part of the global one.
            options: those of shardir.backend.runs.Options.

        Raises:
            ShardirError: a batch has other inputs.
            LaunchError: a rank fails, or there are too few batches.
        """
        if local and batches is None:
            raise ShardirError("expected batches with local=True, got none")
        with scratch_folder() as folder:
            given, dump = Options.of(options), folder / "states.npz"
            if "steps_done" not in options:
                done = self.steps_done
                steps = given.steps + (done if given.resume is None else 0)
                given = replace(given, steps_done=done, steps=steps)
            program, made = self.save(folder / "program"), None
            if batches is not None:
                made = Batches(arrays_of_all(self.imported, batches, local), local)
            report = self.backend.run(program, replace(given, dump=dump), batches=made)
            if report.stopped is None:
                if given.dump is not None:
                    copy_file(dump, given.dump)
                self.state.take(dump, report)
        return report

    @check_arguments("check")
    def check(self, batches: Sequence[Any] | None = None, *, steps: int = 2) -> ModuleCheck:
        """Compare the program, on local processes, with a copy of the module that torch trains on
        one device: the loss and the gradients of the first step, parameters and buffers after it,
        and the losses of later steps; for inference, the outputs. Both begin with the values at the
        compilation. The check does not change the state of this program.

        Args:
            batches: as for `run`; by default the example inputs.

        Returns:
            The differences; `str` is their table.

        Raises:
            ShardirError: a difference is more than rounding: by parameter, with the first op that
                differs. Or the module has random numbers (dropout), which are others in torch.
        """
        return compare(self, [self.example] if batches is None else list(batches), steps)

    def reset(self) -> None:
        """Let the next run begin anew: at step 0, with the values that the module, and the states
        of its optimizer, had when they were compiled."""
        self.state.reset()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The values of parameters and buffers, as the module's `load_state_dict` takes them:
        trained after `run`."""
        return {name: self.values[known] for name, known in self._canonical_names().items()}

    @check_arguments("load_state_dict")
    def load_state_dict(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take the values of parameters and buffers, in place of the present ones. The states of
        the optimizer and the number of steps stay, as in torch.

        Args:
            states: the values by the module's names for them, as its `state_dict()` has them.

        Raises:
            ShardirError: names are missing or unknown, or shapes differ; no value is changed.
        """
        known = self._canonical_names()
        weights.check(states, {name: self.values[k] for name, k in known.items()}, known)
        found = {known[name]: x.detach().to("cpu", self.values[known[name]].dtype, copy=True)
                 for name, x in states.items()}  # fmt: skip
        self.state.replace(found, self._copies())

    @check_arguments("optimizer_state_dict")
    def optimizer_state_dict(self) -> dict[str, Any]:
        """The present states of the optimizer, as its `load_state_dict` takes them, with the rates
        of its scheduler.

        Raises:
            ShardirError: the program was compiled with the text of one, or its replicas have states
                of their own.
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

    @check_arguments("load_weights")
    def load_weights(self, path: str | Path) -> None:
        """Take the values of a file.

        Args:
            path: `.safetensors`, one of several with an index (`.safetensors.index.json`), one of
                torch.save, a folder with one of these, or a checkpoint of a run.

        Raises:
            ShardirError: as in `load_state_dict`, or the file can't be read.
        """
        found = weight_files.read(path)
        if weight_files.is_checkpoint(path):  # it has the states of the optimizer too
            found = {name: x for name, x in found.items() if name in self._canonical_names()}
        self.load_state_dict(found)

    @check_arguments("save_weights")
    def save_weights(self, path: str | Path, max_shard_size: str | int | None = None) -> None:
        """Write `state_dict` to a file, or to several with an index, as transformers reads them.

        Args:
            path: `.safetensors`, `.safetensors.index.json`, or a file for torch.save; in a folder
                `model.safetensors`.
            max_shard_size: the bytes of the tensors of a file, such as `5GB`: beyond it there are
                several `.safetensors` files and an index. Of an index it is 5GB by default.

        Raises:
            ShardirError: they can't be written; existing files are unchanged.
        """
        weight_files.write(path, self.state_dict(), max_shard_size)

    def _copies(self) -> list[str]:
        """The keys of the states that begin as copies of other states, such as states of
        replicas."""
        roles = (a for f, _ in bodies(self.module) for a in arguments(f))
        return [a.key for a in roles if a.key and isinstance(a.init, InitAttr)
                and a.init.kind == "copy"]  # fmt: skip

    def _canonical_names(self) -> dict[str, str]:
        """The name of the value of each entry of the module's state_dict: of tied tensors one has
        the value."""
        model = self.imported.model
        tensors = dict(_tensors(model))
        same = {id(tensors[name]): name for name in self.values if name in tensors}
        return {name: same[id(x)] for name in model.state_dict()
                if (x := tensors.get(name)) is not None and id(x) in same}  # fmt: skip


def _tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers by each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _trained_parameters(imported: Imported) -> dict[int, str]:
    """Return the imported name of each parameter that is trained, by its identity.

    Raises:
        ShardirError: there is none.
    """
    tensors = dict(_tensors(imported.model))
    found = {
        id(tensors[a.key]): a.key for a in arguments(imported.function.func)
        if a.role is Role.PARAMETER and a.key is not None
    }  # fmt: skip
    if not found:
        raise ShardirError(UNTRAINED)
    return found


def _check_trained(imported: Imported, optimizer: Any) -> None:
    """Check that an optimizer of torch has all parameters that are trained. Raises ShardirError."""
    if isinstance(optimizer, str):
        return
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    left = [name for key, name in _trained_parameters(imported).items() if key not in held]
    if left:
        raise ShardirError(
            f"expected an optimizer of all parameters that require gradients, got one without "
            f"{', '.join(left[:3])}{', ...' if len(left) > 3 else ''}; add them, or freeze them: "
            "requires_grad_(False)"
        )


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
    sync: str | None = None,
    stages: str | None = None,
    derived: Collection[str] = (),
    trace: bool = False,
    check: bool = False,
    **options: Any,
) -> CompiledModel:
    """Compile a module for the ranks of a mesh.

    Args:
        inputs: example arguments: a tensor, a tuple of positional ones, or a dict by keyword.
        keywords: further arguments by keyword.
        labels: the example of what `loss` gets beside the outputs; a tuple of several.
        loss: a function of the outputs, and of the labels if there are any. Without it the module
            returns the loss: a scalar, or an output of the name `loss`.
        optimizer: one of torch.optim, whose groups are read, or a text: `adamw, lr = 1e-3`.
        scheduler: one of torch.optim.lr_scheduler, of the optimizer.
        scheduler_steps: the steps of which its rates are sampled; then the last one stays. Needed
            where it does not say when its rate stays: LambdaLR of a function of one's own.
        train: False: the forward part alone. Whether dropout and batch norms train is the module's
            own `training`.
        mesh: the axes: `dp = 2, tp = 4`, or a dict; a Mesh, or a cluster.
        cluster: the name of a ready-made cluster, or the text of one; a Cluster. Without a mesh the
            fastest one is searched for, in the mode auto.
        devices: the number of devices of a cluster without a mesh, if not all.
        accumulate: as in a step of the text, as are the next ones: `tokens, microbatches = 4`, or
            `mean, ...` of a loss that averages all rows. With train=False results have all
            microbatches one after another, scalars are their mean.
        clip: `norm, max = 1.0`.
        loss_scale: `static, factor = 1024.0`.
        metrics: `gradient_norm, learning_rate`.
        sync: `nesterov, replicas = 4, every = 8, lr = 0.7, momentum = 0.9`. The mesh is that of one
            replica: by default one device.
        stages: `1f1b, ranks = 4`, with train=False of its forward parts. The mesh is that of one
            stage: by default one device. `search`, with a cluster or a number of devices: the mesh,
            the stages and the schedule of a step are searched for.
        derived: the names of autograd functions (torch.autograd.Function) whose gradients are to be
            those of their forward part; others are errors, since their backward is not exported.
        trace: the backward part is that which autograd runs, of autograd functions too; it is
            traced (make_fx) with the forward part, and not derived. The ops are those below
            autograd, so that layouts follow less often from structure.
        check: whether to compare the program with the module, as `program.check()` does.
        options: those of `shardir.compile`: plan, mode, pipeline, ...

    Raises:
        ShardirError: the module can't be exported or imported, or the compilation's errors; or the
            check's.
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
    of_training = {"trace": trace or None, "loss": loss, "optimizer": optimizer,
                   "scheduler": scheduler, "scheduler_steps": scheduler_steps,
                   "derived": derived or None, "clip": clip, "loss_scale": loss_scale,
                   "metrics": metrics, "sync": sync}  # fmt: skip
    for name, value in of_training.items():
        if not train and value is not None:
            raise ShardirError(
                f"expected no {name} with train=False, got {describe(value)}; drop {name}=..."
            )
    read: optimizers.ImportedOptimizer | None = None
    on = devices_of(mesh, cluster, devices, options | {"stages": stages, "sync": sync})
    captured = capture(model, inputs, labels, loss, train, keywords, derived, trace)
    stages = None if stages == SEARCH else stages
    alone = {"d": 1} if sync is not None or stages is not None else None
    module = Module(on.mesh if on.mesh is not None else alone, on.cluster)
    in_parts = not train and (accumulate, stages) != (None, None)
    name = MODEL if in_parts else FUNCTION
    imported = import_model(captured, module, name, train, train or in_parts)
    if in_parts:
        module.forward(FUNCTION, MODEL, accumulate=accumulate, pipeline=stages)
    elif train:
        trained = _trained_parameters(imported)
        names = {id(p): n for n, p in model.named_parameters()} | trained
        read = optimizers.read(optimizer, names, scheduler, scheduler_steps, trained)
        _check_trained(imported, optimizer)
        imported.own_numbers(read.lr_scales, read.weight_decays)
        module.step(STEP, FUNCTION, read.text, accumulate=accumulate, clip=clip,
                    loss_scale=loss_scale, metrics=metrics, sync=sync,
                    pipeline=stages)  # fmt: skip
    compiled = compile_module(module.module, **on.options)
    outputs = None if train else Outputs.of(captured.program)
    states, form = dict[str, Array](), None
    if read is not None and isinstance(optimizer, torch.optim.Optimizer):
        trained = _trained_parameters(imported)
        states = optimizer_states.read_states(optimizer, trained, compiled.module, read.count)
        form = optimizer_states.TorchForm.of(optimizer, scheduler, trained)
    schedule = None if scheduler is None else deepcopy(scheduler.state_dict())
    program = CompiledModel(
        **vars(compiled), imported=imported, state=TrainingState(imported.values, states),
        outputs=outputs, optimizer=form,
        eager=Eager(captured, loss, keywords or {}, optimizer, scheduler, schedule, clip,
                    {path: m.training for path, m in model.named_modules()}),
        example=inputs if labels is None else (inputs, labels),
    )  # fmt: skip
    if check:
        program.check()
    return program
