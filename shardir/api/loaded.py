"""A saved program whose functions Python calls in the process of each rank.

program = shardir.load("out", "model.safetensors")    # torchrun --nproc-per-node 4 generate.py
logits = program(tokens, position)
"""

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardir.backend.torch.shardir_runtime.plan.program import PlanFunction, load_plan
from shardir.backend.torch.shardir_runtime.run.compiled import compile_functions
from shardir.backend.torch.shardir_runtime.run.options import RunOptions
from shardir.backend.torch.shardir_runtime.run.process import join_ranks
from shardir.backend.torch.shardir_runtime.run.program_module import program_module
from shardir.backend.torch.shardir_runtime.run.session import Session
from shardir.backend.torch.shardir_runtime.run.trainer import Trainer
from shardir.backend.torch.started import errors, trainer_error
from shardir.diagnostics import ShardirError, check_arguments, describe, did_you_mean, several
from shardir.frontends.torch import weight_files


@check_arguments("load")
def load(
    directory: str | Path,
    weights: str | Path | Mapping[str, torch.Tensor] | None = None,
    *,
    backend: str = "gloo",
    device: str | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    compile: bool = False,
) -> "Loaded":
    """Load a saved program into this process, one of its ranks. All ranks call it.

    The process joins the other ranks by the environment of torchrun, unless torch.distributed is
    initialized already. A program of one rank needs neither.

    Args:
        weights: the values of parameters by the module's names, and optionally of other states: a
            state_dict, or a file for `CompiledModel.load_weights`.
        backend: the collectives, unless torch.distributed is initialized: gloo on CPUs, shm on the
            CPUs of one machine, nccl on GPUs.
        device: cpu or cuda, by default cuda with nccl, else cpu. With gloo and cuda, ranks share
            GPUs.
        seed: the seed of initial values without weights.
        timeout: the longest wait for a rank, in seconds.
        compile: whether to compile the code between collectives by torch.compile.

    Raises:
        ShardirError: the directory is no saved program or is for another number of ranks, or the
            weights do not fit.
    """
    if dist.is_initialized():
        backend = dist.get_backend()
    else:
        atexit.register(_leave)
    with errors():
        options = RunOptions.of(
            {"backend": backend, "device": device, "seed": seed, "timeout": timeout}
        )
        plan = load_plan(directory)
        mesh = join_ranks(plan, options)
        program = program_module(plan.directory)
        functions = {f.name: getattr(program, f.python) for f in plan.functions}
        if compile:
            functions = compile_functions(plan, functions)
        loaded = Loaded(Session(plan, mesh, functions, seed))
    if weights is not None:
        loaded.load_weights(weights)
    return loaded


class Loaded:
    """The functions of a program on this rank, and its states.

    Arguments and results are global values: every rank passes whole arguments and gets whole
    results. With `gathered=False` the results are this rank's shards."""

    def __init__(self, session: Session):
        self._session = session
        self._functions = {f.name: f for f in session.plan.functions}
        trains = any(f.kind == "step" for f in session.plan.functions)
        # a step may use autograd, which takes no tensors of inference mode
        self._mode = torch.no_grad if trains else torch.inference_mode

    def __repr__(self) -> str:
        ranks, names = self._session.plan.size, ", ".join(self._functions)
        return f"<a program of {ranks} ranks, with the functions {names}>"

    def __call__(self, *inputs: Any, gathered: bool = True, **named: Any) -> Any:
        """Call the only function. `named` are inputs by their names in the program."""
        if len(self._functions) > 1:
            raise ShardirError(
                f"expected the name of a function of {', '.join(self._functions)}, got none; "
                "use .call(name, ...)"
            )
        return self.call(next(iter(self._functions)), *inputs, gathered=gathered, **named)

    @check_arguments("call")
    def call(self, function: str, *inputs: Any, gathered: bool = True, **named: Any) -> Any:
        """Call a function, and store the new states that it returns.

        Returns:
            The other results: a tensor, or a tuple of several.

        Raises:
            ShardirError: the function does not exist, or the inputs do not fit.
        """
        if function not in self._functions:
            hint = did_you_mean(function, self._functions)
            names = ", ".join(self._functions)
            raise ShardirError(f"expected a function of {names}, got {function}{hint}")
        f, session = self._functions[function], self._session
        with self._mode(), errors():
            outputs = session.call(f, self._shards(f, inputs, named))
            results = [
                result.batch_of(session.states.gathered(x, result, result.partial))
                if gathered else x
                for result, x in zip(f.results, outputs, strict=True)
                if not result.updates and result.weighs is None
            ]  # fmt: skip
        return results[0] if len(results) == 1 else tuple(results)

    @check_arguments("start")
    def start(self, resume: str | Path | None = None) -> Trainer:
        """Return the trainer of a program with a training step, for a loop of yours (see
        `shardir.start`): it trains the states of this program. All ranks call it.

        Args:
            resume: a checkpoint, or a folder of them, from which the training goes on.

        Raises:
            ShardirError: the program has no training step, or the checkpoint does not fit.
        """
        with errors():
            trainer = Trainer(self._session, error=trainer_error)
            if resume is not None:
                trainer.load(resume)
        return trainer

    def reset(self) -> None:
        """Reset states other than parameters, such as caches, to their initial values."""
        states = self._session.states
        for arg in self._states().values():
            if arg.role == "state":
                states.values[arg.key], states.types[arg.key] = states.filled(arg), arg

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the global values of parameters and states. All ranks call it."""
        states = self._session.states
        return {key: states.state(key).clone() for key in states.types}

    @check_arguments("load_weights")
    def load_weights(self, weights: str | Path | Mapping[str, torch.Tensor]) -> None:
        """Load the values of all parameters, and of other states in `weights`. Ignores other
        entries of `weights`, such as optimizer states.

        Raises:
            ShardirError: parameters are missing, or shapes differ; no value is changed.
        """
        values = weights if isinstance(weights, Mapping) else weight_files.read(weights)
        retained = self._states()
        missing = [k for k, a in retained.items() if a.role == "parameter" and k not in values]
        errors = [f"weights of all parameters, got none of {several(missing)}"] if missing else []
        errors += [
            f"{key} of {list(arg.shape)}, got {list(values[key].shape)}"
            for key, arg in retained.items()
            if key in values and tuple(values[key].shape) != arg.shape
        ]
        if errors:
            raise ShardirError("; ".join(f"expected {text}" for text in errors))
        states = self._session.states
        for key, arg in retained.items():
            if key in values:
                states.put(arg, values[key])

    def _states(self) -> dict[str, Any]:
        """Return the arguments that are parameters or states, by key. An argument that is a
        parameter of one function and a state of another counts as a parameter."""
        retained: dict[str, Any] = {}
        for f in self._functions.values():
            for arg in f.args:
                if arg.role != "input" and (arg.role == "parameter" or arg.key not in retained):
                    retained[arg.key] = arg
        return retained

    def _shards(
        self, f: PlanFunction, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Return this rank's shards of the inputs of a function, in order."""
        wanted = [arg for arg in f.args if arg.role == "input"]
        names = [arg.name for arg in wanted]
        values = {**dict(zip(names, inputs, strict=False)), **named}
        if len(inputs) + len(named) != len(values) or values.keys() != set(names):
            got = [*(f"{len(inputs)} in order" for _ in inputs[:1]), *named]
            raise ShardirError(
                f"expected the inputs {', '.join(names) or 'none'} of {f.name}, got "
                f"{', '.join(got) or 'none'}"
            )
        return [
            self._session.states.shard_of(arg, _tensor(arg.name, values[arg.name]))
            for arg in wanted
        ]


def _leave() -> None:
    """Destroy the process group: its thread would outlive the interpreter and abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    raise ShardirError(f"expected a tensor as {name}, got {describe(value)}; use torch.tensor")
