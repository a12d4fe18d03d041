"""A saved program whose functions are called from Python, in the process of each rank.

program = shardir.load("out", "model.safetensors")    # torchrun --nproc-per-node 4 generate.py
logits = program(tokens, position)
"""

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardir.backend.torch.shardir_runtime.plan.program import PlanError, PlanFunction, load_plan
from shardir.backend.torch.shardir_runtime.run.compiled import compile_functions
from shardir.backend.torch.shardir_runtime.run.options import OptionError, RunOptions
from shardir.backend.torch.shardir_runtime.run.process import join_ranks
from shardir.backend.torch.shardir_runtime.run.program_module import program_module
from shardir.backend.torch.shardir_runtime.run.session import Session
from shardir.diagnostics import ShardirError, check_arguments, describe, did_you_mean
from shardir.frontends.torch import weight_files
from shardir.frontends.torch.weights import several


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
    """Load a saved program into this process, which is one of its ranks: all ranks call it.

    The process joins the other ranks by the environment of torchrun, unless torch.distributed is
    initialized already. A program of one rank needs neither.

    Args:
        weights: the values of parameters, by the module's names: a state_dict, or a file as
            `CompiledModel.load_weights` takes. Other states that it has are taken too.
        backend: the library of collectives, where torch.distributed is not initialized: gloo on
            CPUs, shm on those of one machine, nccl on GPUs.
        device: cpu or cuda, by default cuda with nccl, else cpu; with gloo and cuda ranks share
            GPUs.
        seed: of initial values, where there are no weights.
        timeout: the longest wait for a rank, in seconds.
        compile: whether to hand what is between collectives to torch.compile.

    Raises:
        ShardirError: the directory is no saved program, is for another number of ranks, or the
            weights do not fit.
    """
    if dist.is_initialized():
        backend = dist.get_backend()
    else:
        atexit.register(_leave)
    with _errors():
        given = {"backend": backend, "device": device, "seed": seed, "timeout": timeout}
        options = RunOptions.of(given)
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

    Arguments and results are global values: every rank passes the whole argument, and gets the
    whole result. With `gathered=False` results are this rank's shards."""

    def __init__(self, session: Session):
        self._session = session
        self._functions = {f.name: f for f in session.plan.functions}
        trains = any(f.kind == "step" for f in session.plan.functions)
        # A step may have autograd derive an op, which takes no tensors of inference mode.
        self._mode = torch.no_grad if trains else torch.inference_mode

    def __repr__(self) -> str:
        ranks, names = self._session.plan.size, ", ".join(self._functions)
        return f"<a program of {ranks} ranks, with the functions {names}>"

    def __call__(self, *inputs: Any, gathered: bool = True, **named: Any) -> Any:
        """Call the only function; `named` are inputs by their names in the program."""
        if len(self._functions) > 1:
            raise ShardirError(
                f"expected the name of a function of {', '.join(self._functions)}, got none; "
                "use .call(name, ...)"
            )
        return self.call(next(iter(self._functions)), *inputs, gathered=gathered, **named)

    @check_arguments("call")
    def call(self, function: str, *inputs: Any, gathered: bool = True, **named: Any) -> Any:
        """Call a function, and set the states that it returns.

        Returns:
            The other results: a tensor, or a tuple of several.

        Raises:
            ShardirError: there is no such function, or the inputs do not fit.
        """
        if function not in self._functions:
            hint = did_you_mean(function, self._functions)
            names = ", ".join(self._functions)
            raise ShardirError(f"expected a function of {names}, got {function}{hint}")
        f, session = self._functions[function], self._session
        with self._mode(), _errors():
            given = self._shards(f, inputs, named)
            outputs = session.call(f, given)
            found = [
                result.batch_of(session.states.gathered(x, result, result.partial))
                if gathered else x
                for result, x in zip(f.results, outputs, strict=True)
                if not result.updates and result.weighs is None
            ]  # fmt: skip
        return found[0] if len(found) == 1 else tuple(found)

    def reset(self) -> None:
        """Give the states that are no parameters, such as caches, their initial values."""
        states = self._session.states
        for arg in self._states().values():
            if arg.role == "state":
                states.values[arg.key], states.types[arg.key] = states.filled(arg), arg

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The global values of parameters and states; all ranks call it."""
        states = self._session.states
        return {key: states.state(key).clone() for key in states.types}

    @check_arguments("load_weights")
    def load_weights(self, weights: str | Path | Mapping[str, torch.Tensor]) -> None:
        """Take the values of parameters, and of other states that `weights` has; what else it has,
        such as the states of an optimizer, is left alone.

        Raises:
            ShardirError: parameters are missing, or shapes differ; no value is changed.
        """
        given = weights if isinstance(weights, Mapping) else weight_files.read(weights)
        retained = self._states()
        missing = [k for k, a in retained.items() if a.role == "parameter" and k not in given]
        wrong = [
            f"{key} of {list(arg.shape)}, got {list(given[key].shape)}"
            for key, arg in retained.items()
            if key in given and tuple(given[key].shape) != arg.shape
        ]
        if missing or wrong:
            found = (
                [f"weights of all parameters, got none of {several(missing)}"] if missing else []
            )
            raise ShardirError("; ".join(f"expected {text}" for text in [*found, *wrong]))
        states = self._session.states
        for key, arg in retained.items():
            if key in given:
                states.put(arg, given[key])

    def _states(self) -> dict[str, Any]:
        """The arguments that are parameters or states, by their keys: a parameter of a function
        is one in all."""
        found: dict[str, Any] = {}
        for f in self._functions.values():
            for arg in f.args:
                if arg.role != "input" and (arg.role == "parameter" or arg.key not in found):
                    found[arg.key] = arg
        return found

    def _shards(
        self, f: PlanFunction, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """This rank's shards of the inputs of a function, in their order."""
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
            self._session.states.shard_of(arg, arg.batches_of(_tensor(arg.name, values[arg.name])))
            for arg in wanted
        ]


def _leave() -> None:
    """End the process group: a thread of it that outlives the interpreter aborts the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of the runtime to errors of shardir."""
    try:
        yield
    except (PlanError, OptionError) as e:
        raise ShardirError(str(e)) from None


def _tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    raise ShardirError(f"expected a tensor as {name}, got {describe(value)}; use torch.tensor")
