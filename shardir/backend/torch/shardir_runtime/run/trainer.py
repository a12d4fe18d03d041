"""A training whose loop is the user's: the step of a program, called on ranks that stay up.

    trainer = start("out")              # all ranks call it: torchrun --nproc-per-node 4 loop.py
    for x, labels in loader:
        loss = trainer.step(x, labels)
    trainer.save("checkpoints")

The step is that of a run (Session.train_step); the batches are the loop's. A loss is not read, so
that no call waits for a GPU, and one that is not finite does not end the training.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoints import manifest as manifests
from ..checkpoints.saving import check_safetensors
from ..checkpoints.weights import weight_arguments
from ..data import loaders
from ..plan.fields import differences
from ..plan.program import Axes, PlanError, PlanFunction, ProgramPlan, load_plan
from .compiled import compile_functions
from .evaluation import averaged_results, evaluate
from .generation import Sampling, checked_prompt, generated, generating
from .options import RunOptions
from .process import join_ranks, rank_and_size, use_processor
from .program_module import program_module
from .session import Session, scalars_of
from .trained_steps import (
    TrainedSteps,
    averages,
    check_weight_is_named,
    checked_rate,
    checked_weight,
    gradient_keys,
    separate_update,
    with_aliases,
    without_files,
)

P = ParamSpec("P")
R = TypeVar("R")


def _reported(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method of a trainer whose errors it makes."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except PlanError as error:
            trainer: Any = args[0]
            raise trainer.error(str(error)) from None

    return call


class Trainer(TrainedSteps):
    """The training steps of a program on this rank. All ranks call its methods, in the same order.

    Args:
        session: the functions and states of a program with training steps.
        steps_done: the number of steps before the first call.
        leaves: whether `close` destroys the process group.
        error: makes the errors of its methods from their texts.

    Attributes:
        rank: the number of this rank.

    Raises:
        PlanError: the program has no training step.
    """

    def __init__(
        self, session: Session, steps_done: int = 0, leaves: bool = False,
        error: Callable[[str], Exception] = PlanError,
    ):  # fmt: skip
        self._session, self._states = session, session.states
        _ = session.plan.digest  # for checkpoints, when the directory may be gone
        super().__init__(session.plan, steps_done)
        self._leaves, self.error = leaves, error
        self._checkpoints: dict[Path, Any] = {}
        self.rank = session.mesh.rank
        self._is_open, self._checked = True, set[str]()

    @classmethod
    def of(
        cls, directory: Path, options: RunOptions, resume: str | Path | None = None,
        **arguments: Any,
    ) -> Self:  # fmt: skip
        """Return the trainer of a saved program, on this rank (see `start`). Its directory is not
        read later.

        Args:
            arguments: those of a trainer.
        """
        plan, leaves = load_plan(directory), not dist.is_initialized()
        if (size := rank_and_size()[1]) != plan.size:
            raise PlanError(
                f"expected {plan.size} ranks, for {plan.mesh_text()}, got {size}; start this "
                f"script by `torchrun --nproc-per-node {plan.size}`"
            )
        use_processor(options)
        mesh = join_ranks(plan, options)
        program = program_module(plan.directory)
        functions = {f.name: getattr(program, f.python) for f in plan.functions}
        if options.compile:
            functions = compile_functions(plan, functions)
        session = Session(plan, mesh, functions, options.seed)
        given: dict[str, Any] = {"leaves": leaves, **arguments}
        trainer = cls(session, **given)
        if resume is not None:
            trainer.load(resume)
        return trainer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close(wait=kind is None)

    def __repr__(self) -> str:
        plan, done = self._session.plan, self.steps_done
        return f"<a trainer of {', '.join(self.steps)} on {plan.mesh_text()}, {done} steps done>"

    @_reported
    def call_step(
        self, name: str, batch: tuple[Any, ...], named: Mapping[str, Any], local: bool
    ) -> Tensor:
        f = self.steps[name]
        inputs = self._inputs(f, batch, named, local)
        with torch.no_grad():
            check = name not in self._checked
            loss = self._loss(f, self._session.train_step(f, self.steps_done, inputs, check))
        self.steps_done += 1
        return loss

    def _loss(self, f: PlanFunction, outputs: list[Tensor]) -> Tensor:
        """Return the loss of a step, and set its metrics."""
        loss, *metrics = (
            (r.name, self._states.gathered(outputs[i], r, r.partial))
            for i, r in scalars_of(f).items()
        )
        self._checked.add(f.name)
        self.metrics_of[f.name] = dict(metrics)
        return loss[1]

    @_reported
    def call_backward(
        self, name: str, batch: tuple[Any, ...], named: Mapping[str, Any], local: bool,
        weight: float,
    ) -> Tensor:  # fmt: skip
        f, values = self.steps[name], self._states.values
        check_weight_is_named(batch)
        separate_update(self._session.plan, name)
        inputs, key = self._inputs(f, batch, named, local), f.key_of("loss_weight")
        one = values[key]
        values[key] = torch.full_like(one, checked_weight(weight))
        try:
            with torch.no_grad():
                self._session.begin_step(self.steps_done)
                outputs = self._session.call(f, inputs, check=name not in self._checked)
                self.note_gradients(name, True)
                return self._loss(f, outputs)
        finally:
            values[key] = one

    @_reported
    def call_update(self, name: str) -> None:
        self._check_open()
        update = separate_update(self._session.plan, name)
        self.check_gradients(name)
        with torch.no_grad():
            self._session.begin_step(self.steps_done)
            self._session.call(update, [])
        self.note_gradients(name, False)
        self.steps_done += 1

    @_reported
    def gradients_of(self, name: str) -> dict[str, Tensor]:
        self._check_open()
        separate_update(self._session.plan, name)
        keys = gradient_keys(self.steps[name])
        gradients = {p: self._states.state(key).to("cpu", copy=True) for p, key in keys.items()}
        return with_aliases(self._session.plan, gradients)

    @_reported
    def gradient_norm_of(self, name: str) -> float:
        self._check_open()
        separate_update(self._session.plan, name)
        return self._states.norm(gradient_keys(self.steps[name]).values())

    @_reported
    def evaluate(
        self, batches: Iterable[Any], function: str | None = None, *, local: bool = False,
        ema: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """Evaluate a function beside the steps on batches, with the current parameters.

        Args:
            batches: each as the argument of `step`.
            function: its name, by default of the only one.
            local: whether the batches have this rank's shards.
            ema: whether the parameters are their moving averages.

        Returns:
            The means of its scalars over all rows, or over all tokens, by name.

        Raises:
            PlanError: the program has no such function, there are no batches, or one does not fit.
        """
        f, session = evaluation_of(self._session.plan, function), self._session
        batches = checked_batches(batches, f)
        with torch.no_grad(), self._averaged(ema):
            calls = (session.call(f, self._inputs(f, (batch,), {}, local)) for batch in batches)
            outputs, means = evaluate(self._states, f, calls)
        if not outputs:
            raise PlanError(f"expected batches to evaluate {f.name}, got none")
        return {f.results[i].name: float(x) for i, x in means.items()}

    @_reported
    def call(
        self, function: str, *inputs: Any, local: bool = False, ema: bool = False, **named: Any
    ) -> Any:
        """Call a function beside the steps, such as samples, with the current parameters.

        Args:
            inputs: as those of `step`.
            local: whether they are this rank's shards.
            ema: whether the parameters are their moving averages.

        Returns:
            Its results, whole: a tensor, or a tuple of several.

        Raises:
            ShardirError: the program has no such function, or the inputs do not fit.
        """
        f = function_beside(self._session.plan, function)
        with torch.no_grad(), self._averaged(ema):
            outputs = self._session.call(f, self._inputs(f, inputs, named, local))
            results = [
                r.batch_of(self._states.gathered(x, r, r.partial))
                for r, x in zip(f.results, outputs, strict=True)
                if not r.updates and r.weighs is None
            ]
        return results[0] if len(results) == 1 else tuple(results)

    @_reported
    def generate(
        self, prompt: Tensor, count: int, *, function: str | None = None, temperature: float = 0.0,
        top_k: int | None = None, seed: int = 0, ema: bool = False,
    ) -> Tensor:  # fmt: skip
        """Go on from tokens by a function beside the steps that returns the logits [B, S, V] of
        each next token of [B, S], with the current parameters.

        The whole function is called for each token; a program with a cache of keys and values is
        one of its own (`shardir.load`). Each token reads the last S ones. After a shorter prompt
        there are zeros, which a causal function does not read.

        Args:
            prompt: the tokens before, [B, P], the same on all ranks.
            count: the number of new tokens.
            function: its name, by default of the only one.
            temperature: by which logits are divided before a token is drawn; 0: the token with the
                largest logit.
            top_k: the number of tokens with the largest logits that are drawn from; None: all.
            seed: of the random numbers, which do not depend on the mesh.
            ema: whether the parameters are their moving averages.

        Returns:
            The prompt and the new tokens, [B, P + count], on the CPU, the same on all ranks.

        Raises:
            ShardirError: the program has no such function, or an argument has a wrong value.
        """
        f = generating(self._session.plan, function)
        sampling, prompt = Sampling(temperature, top_k, seed), checked_prompt(f, prompt, count)

        def call(tokens: Tensor) -> list[Tensor]:
            return self._session.call(f, self._inputs(f, (tokens,), {}, local=False))

        with torch.no_grad(), self._averaged(ema):
            return generated(self._states, f, call, prompt, count, sampling)

    @contextmanager
    def _averaged(self, ema: bool) -> Iterator[None]:
        """Put the moving averages in the places of parameters, for a block."""
        states, keys = self._states, averages(self._session.plan) if ema else {}
        before = {key: (states.values[key], states.types[key]) for key in keys}
        for key, average in keys.items():
            states.values[key] = states.values[average]
            states.types[key] = states.types[average]
        try:
            yield
        finally:
            for key, (x, type) in before.items():
                states.values[key], states.types[key] = x, type

    @_reported
    def rate_of(self, name: str) -> float:
        self._check_open()
        return float(self._states.values[checked_rate(self._session.plan, self.steps[name])[0]])

    @_reported
    def set_rate_of(self, name: str, rate: float | Tensor) -> None:
        self._check_open()
        key, value = checked_rate(self._session.plan, self.steps[name], rate)
        # A new tensor: the metrics of the last step may have the old one.
        self._states.values[key] = torch.full_like(self._states.values[key], value)

    @_reported
    def state_dict(self, ema: bool = False) -> dict[str, Tensor]:
        """Return the parameters and buffers, whole, by their names in the module, on the CPU. Each
        rank gets all of them.

        Args:
            ema: whether the parameters are their moving averages.
        """
        self._check_open()
        with self._averaged(ema):
            found = {
                key: self._states.state(key).to("cpu", copy=True)
                for key in weight_arguments(self._session.plan)
            }
        return with_aliases(self._session.plan, found)

    @_reported
    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace the parameters and buffers. The optimizer keeps its states, as in torch.

        Args:
            states: whole tensors, by the names of `state_dict`.

        Raises:
            PlanError: names are missing or unknown, or shapes differ; nothing has changed.
        """
        self._check_open()
        known = weight_arguments(self._session.plan)
        values = checked_states(self._session.plan, states)
        for key, x in values.items():
            self._states.put(known[key], x)

    @_reported
    def save(self, path: str | Path, keep: int = 0, loader: Any = None) -> Path:
        """Write a checkpoint in the form of a run's, which any mesh reads: all states, and the
        number of steps.

        Args:
            path: the folder of checkpoints, which all ranks see.
            keep: the number of checkpoints that stay, the last ones; 0: all.
            loader: the loader of this rank's batches, whose `state_dict()` is stored too.

        Returns:
            The new folder in it, `step-00000100`, once all ranks have written it.

        Raises:
            PlanError: it cannot be written, the folder has checkpoints of later steps, or the
                loader has no state.
        """
        return self.checkpoint(path, keep, None if loader is None else loaders.state_bytes(loader))

    def checkpoint(self, path: str | Path, keep: int, loader: bytes | None) -> Path:
        """Write a checkpoint with the stored state of a loader, if there is one (`save`)."""
        from ..checkpoints.distributed import Checkpoints

        self._check_open()
        check_safetensors()
        folder = checked_path(path).absolute()
        final = new_checkpoint(folder, self.steps_done, keep)
        if folder not in self._checkpoints:
            self._checkpoints[folder] = Checkpoints(
                folder, self._states, self.first, self.steps_done
            )
        checkpoints = self._checkpoints[folder]
        checkpoints.keep = keep
        checkpoints.save(self.steps_done, loader)
        checkpoints.finish()
        return final

    @_reported
    def load(self, path: str | Path, loader: Any = None) -> None:
        """Go on from a checkpoint, which a trainer or a run has written on any mesh.

        Args:
            path: the checkpoint, or a folder whose last complete one counts.
            loader: the loader of this rank's batches, which goes on from its stored state.

        Raises:
            PlanError: it is damaged, of another program or seed, or has no state of the loader.
        """
        from ..checkpoints.distributed import restore

        self._check_open()
        check_safetensors()
        checkpoint, size = manifests.checkpoint_at(checked_path(path)), self._session.mesh.size
        state = None if loader is None else loaders.read_state(checkpoint, loader, self.rank, size)
        self.steps_done = restore(checkpoint, self._states, self.first).step
        self.note_loaded()
        if loader is not None:
            loader.load_state_dict(state)

    @property
    def data_rank(self) -> int:
        """The number of this rank's part of a global batch, of `data_size` parts: the `rank` of a
        sampler whose batches are local."""
        return self._session.mesh.index(axes_of_rows(self.first))

    @property
    def data_size(self) -> int:
        """The number of parts of a global batch. Ranks with an equal `data_rank` have equal
        parts."""
        return self._session.mesh.count(axes_of_rows(self.first))

    @_reported
    def prefetch(self, loader: Iterable[Any], ahead: int = 2) -> loaders.Prefetch:
        """Return the batches of a loader, which a thread reads ahead of the loop that takes them.
        On a GPU their tensors are copied there meanwhile. An error of the loader is raised in the
        loop. The batches have the state of the loader, for `save` and `load`.

        Args:
            ahead: the number of batches that are read ahead, at least 1.
        """
        return loaders.Prefetch(loader, loaders.to_device(self._session.mesh.device), ahead)

    def close(self, wait: bool = True) -> None:
        """End the training; a second call does nothing.

        Args:
            wait: whether to wait for all ranks, which close too.
        """
        if self._is_open and self._leaves and dist.is_initialized():
            if wait:
                dist.barrier()
            dist.destroy_process_group()
        self._is_open = False

    # ---- the inputs of a function ----

    def _check_open(self) -> None:
        if not self._is_open:
            raise PlanError("expected a trainer that is open, got one after close()")

    def _inputs(
        self, f: PlanFunction, batch: tuple[Any, ...], named: Mapping[str, Any], local: bool
    ) -> list[Tensor]:
        """Return this rank's shards of the inputs of a function, in their order."""
        self._check_open()
        shard = self._states.shard_of
        return [shard(arg, x, local) for arg, x in zip(*bound_inputs(f, batch, named), strict=True)]


def evaluation_of(plan: ProgramPlan, name: str | None) -> PlanFunction:
    """Return the function beside the steps of a name, by default the only one.

    Raises:
        PlanError: there is none, or several; or it has no scalars to average.
    """
    others = [f.name for f in plan.functions if f.is_beside]
    if name is None and len(others) > 1:
        raise PlanError(f"expected the name of a function of {', '.join(others)}, got none")
    f = function_beside(plan, name or next(iter(others), ""))
    if not averaged_results(f):
        raise PlanError(
            f"expected a scalar of floats among the results of {f.name}, whose means are the "
            "evaluation, got none; trainer.call returns its results"
        )
    return f


def function_beside(plan: ProgramPlan, name: str) -> PlanFunction:
    """Return a function beside the steps. Raises PlanError if there is none of this name."""
    others = {f.name: f for f in plan.functions if f.is_beside}
    if not others:
        raise PlanError(
            "expected a program with a function beside the step, got one without; compile the "
            "module with evaluate=True, or with steps= and a shardir.Inference"
        )
    if name not in others:
        raise PlanError(f"expected a function of {', '.join(others)}, got {name!r:.60}")
    return without_files(others[name])


def axes_of_rows(f: PlanFunction) -> Axes:
    """Return the axes that split the rows of the first input of a step."""
    for arg in f.args:
        if arg.role == "input" and len(arg.dims) > (arg.microbatches is not None):
            return arg.dims[arg.microbatches is not None]
    return ()


def checked_states(plan: ProgramPlan, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters and buffers of a `state_dict` by their keys.

    Raises:
        PlanError: they are no tensors, names are missing or unknown, or shapes differ.
    """
    known = weight_arguments(plan)
    if not isinstance(states, Mapping):
        raise PlanError(f"expected tensors by name, got {type(states).__name__}")
    for name, x in states.items():
        if not isinstance(x, Tensor) or x.is_complex():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise PlanError(f"expected a tensor of real numbers as {name}, got {got}")
    values = {plan.aliases.get(name, name): x for name, x in states.items()}
    wrong = [
        f"{key} of {list(known[key].shape)}, got {list(x.shape)}"
        for key, x in values.items() if key in known and tuple(x.shape) != known[key].shape
    ]  # fmt: skip
    kind = "parameters and buffers"
    if text := differences(known, known, values, wrong, kind, f"all {kind}"):
        raise PlanError(f"expected {text}")
    return values


def new_checkpoint(folder: Path, steps_done: int, keep: int) -> Path:
    """Make a folder of checkpoints, of which `keep` stay; return the folder of the next one in it.

    Raises:
        PlanError: the folder cannot be made, it has a checkpoint of this step or a later one, or
            `keep` is no number of at least 0.
    """
    if not isinstance(keep, int) or keep < 0:
        raise PlanError(f"expected a number of checkpoints of at least 0 as keep, got {keep!r:.60}")
    final = manifests.step_folder(folder, steps_done)
    if final.exists():
        raise PlanError(f"expected no checkpoint of step {steps_done} yet, got {final}")
    last = manifests.complete(folder)[-1:]
    if last and manifests.step_of(last[0]) > steps_done:
        raise PlanError(
            f"expected no checkpoint after step {steps_done}, got {last[0]}; give another folder, "
            "or move it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"expected a folder that can be written, got {folder}: {error.strerror}"
        ) from None
    return final


def checked_path(path: Any) -> Path:
    """Return a path. Raises PlanError for another kind of value."""
    if isinstance(path, str | PathLike):
        return Path(path)
    raise PlanError(f"expected the path of a folder, got {path!r:.60}")


def checked_batches(batches: Any, f: PlanFunction) -> Iterator[Any]:
    """Return an iterator of batches. Raises PlanError for a value without one, or for one tensor,
    which would be read row by row."""
    inputs = sum(arg.role == "input" for arg in f.args)
    is_batch = isinstance(batches, tuple) and len(batches) == inputs > 1
    if is_batch and all(isinstance(x, Tensor) for x in batches):
        raise PlanError(
            f"expected an iterable of batches to evaluate {f.name}, got one batch; give [(x, y)]"
        )
    if isinstance(batches, Iterable) and not isinstance(batches, Tensor | str | Mapping):
        return iter(batches)
    raise PlanError(
        f"expected an iterable of batches to evaluate {f.name}, got {type(batches).__name__}; "
        "give a list of one batch"
    )


def bound_inputs(
    f: PlanFunction, batch: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[list[Any], list[Tensor]]:
    """Return the inputs of a function, and a tensor for each.

    Args:
        batch: trees of tensors. A tensor in a mapping is of the input of its key; others are the
            remaining inputs, in their order.

    Raises:
        PlanError: there are not as many tensors, or they have other names.
    """
    wanted = {arg.name: arg for arg in f.args if arg.role == "input"}
    leaves = [*_leaves(batch), *_leaves(named)]
    found = {name: x for name, x in leaves if name}
    rest = [x for name, x in leaves if not name]
    free = [name for name in wanted if name not in found]
    values = {**found, **dict(zip(free, rest, strict=False))}
    if len(leaves) != len(values) or values.keys() != wanted.keys():
        got = [*(f"{len(rest)} in order" for _ in rest[:1]), *found]
        raise PlanError(
            f"expected the inputs {', '.join(wanted) or 'none'} of {f.name}, got "
            f"{', '.join(got) or 'none'}"
        )
    values = {name: loaders.as_tensor(x) for name, x in values.items()}
    for name, x in values.items():
        if not isinstance(x, Tensor):
            raise PlanError(
                f"expected a tensor as {name}, got {type(x).__name__}; use torch.as_tensor"
            )
    return list(wanted.values()), [values[name] for name in wanted]


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree, with the keys of mappings as their names."""
    if isinstance(tree, Mapping):
        for key, x in tree.items():
            yield from _leaves(x, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for i, x in enumerate(tree):
            yield from _leaves(x, f"{name}.{i}" if name else "")
    else:
        yield name, tree


def start(
    directory: str | Path, *, resume: str | Path | None = None, backend: str = "gloo",
    device: str | None = None, seed: int = 0, timeout: float = 300.0, threads: int = 0,
    compile: bool = False,
) -> Trainer:  # fmt: skip
    """Start the training of a saved program in this process, one of its ranks. All ranks call it.

    It joins the other ranks by the environment of torchrun, unless torch.distributed is initialized
    already; a program of one rank needs neither.

    Args:
        resume: a checkpoint, or a folder of them, from which the training goes on.
        backend, device, seed, timeout, threads, compile: as of a run.

    Raises:
        PlanError: the directory is no program with one training step, or for another number of
            ranks; or the checkpoint does not fit.
        OptionError: an option has a wrong value.
    """
    options = start_options(
        backend=backend, device=device, seed=seed, timeout=timeout, threads=threads, compile=compile
    )
    return Trainer.of(Path(directory), options, resume)


def start_options(**given: Any) -> RunOptions:
    """Return the options with which ranks are joined. Raises OptionError for a wrong value."""
    if dist.is_initialized():
        given["backend"] = dist.get_backend()
    return RunOptions.of(given)
