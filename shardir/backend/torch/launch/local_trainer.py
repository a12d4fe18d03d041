"""A trainer of local ranks, one process each, that the loop of another process calls.

    with program.ranks() as trainer:                 # a notebook, a script
        for x, labels in loader:
            loss = trainer.step(x, labels)

The ranks are those of a run (ranks.py): no process is left at the end, after an exception, Ctrl-C,
or a kill. Without `with`, the trainer survives Ctrl-C: the call ends first. A rank reads calls from
a pipe, and rank 0 answers by an event (run/served.py).
"""

import atexit
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from shardir.backend.runs import Options, in_python_words
from shardir.backend.torch.launch.feed import Pipes
from shardir.backend.torch.launch.positions import ranks_of_a_stage
from shardir.backend.torch.launch.ranks import Ranks
from shardir.backend.torch.launch.start import read_plan
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.checkpoints import manifest as manifests
from shardir.backend.torch.shardir_runtime.checkpoints.weights import weight_arguments
from shardir.backend.torch.shardir_runtime.data import loaders
from shardir.backend.torch.shardir_runtime.plan.program import PlanFunction
from shardir.backend.torch.shardir_runtime.run.generation import (
    Sampling,
    checked_prompt,
    generating,
)
from shardir.backend.torch.shardir_runtime.run.served import CALLS, bytes_of
from shardir.backend.torch.shardir_runtime.run.states import DTYPES, checked_input, part
from shardir.backend.torch.shardir_runtime.run.trained_steps import (
    TrainedSteps,
    averages,
    check_weight_is_named,
    checked_rate,
    checked_weight,
    gradient_keys,
    separate_update,
    with_aliases,
)
from shardir.backend.torch.shardir_runtime.run.trainer import (
    bound_inputs,
    checked_batches,
    checked_path,
    checked_states,
    evaluation_of,
    function_beside,
    new_checkpoint,
)
from shardir.backend.torch.started import errors
from shardir.diagnostics import ShardirError, did_you_mean
from shardir.syntax.files import scratch_folder


@contextmanager
def _completed() -> Iterator[list[int]]:
    """Let a block of calls to the ranks end before the KeyboardInterrupt of Ctrl-C, or of a
    notebook, so that the trainer stays usable; a second one is raised at once. Yields the
    interrupts so far."""
    interrupts = list[int]()
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if len(interrupts) > 1 and callable(before):
            before(number, frame)

    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        before(signal.SIGINT, None)


class LocalTrainer(TrainedSteps):
    """The training steps of a program on local ranks, in a loop of this process.

    The methods are those of a `Trainer`. A wrong argument changes nothing; an error of a rank ends
    all of them.

    Args:
        save: writes the directory of the program.
        count: the number of ranks that it has to be for.
        steps_done: the number of steps before the first call.

    Raises:
        ShardirError: the program has no training step, or is for another number of ranks.
        LaunchError: the ranks cannot be started; RunError: one fails.
    """

    error = ShardirError

    def __init__(
        self, save: Callable[[Path], object], count: int | None, options: Options,
        steps_done: int = 0,
    ):  # fmt: skip
        self._options = options = replace(options, steps_done=steps_done)
        self._events: list[dict[str, Any]] = []
        self._stack: ExitStack | None = None
        with ExitStack() as stack:
            self._folder = stack.enter_context(scratch_folder())
            directory = self._folder / "program"
            save(directory)
            self._plan = plan = read_plan(directory)
            if count not in (None, plan.size):
                raise ShardirError(
                    f"expected {plan.size} ranks, for {plan.mesh_text()}, got {count}; compile "
                    "for another mesh"
                )
            with errors():
                super().__init__(plan, steps_done)
            self._meshes = [rt.Mesh(plan.axes, rank) for rank in range(plan.size)]
            self._pipes = Pipes(plan.size)
            pipes = ",".join(f"fd:{reader}" for reader in self._pipes.readers)
            self._ranks = Ranks(
                directory / "program.py", plan.size, options, self._pipes, {CALLS: pipes},
                ranks_of_a_stage(plan),
            )  # fmt: skip
            stack.enter_context(self._ranks.started())
            self._wait("start")
            self._stack = stack.pop_all()
        atexit.register(self.close, wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close(wait=kind is None)

    def __repr__(self) -> str:
        plan, done = self._plan, self.steps_done
        return f"<a trainer of {', '.join(self.steps)} on {plan.mesh_text()}, {done} steps done>"

    @_completed()
    def call_step(
        self, name: str, batch: tuple[Any, ...], named: Mapping[str, Any], local: bool
    ) -> Tensor:
        f = self.steps[name]
        tensors = self._shards(f, batch, named, local)
        answer = self._call("step", {"name": name}, tensors)
        self.steps_done += 1
        return self._loss(f, answer)

    def _loss(self, f: PlanFunction, answer: Mapping[str, Any]) -> Tensor:
        """Return the loss of a step, and set its metrics."""
        self.metrics_of[f.name] = {key: torch.tensor(x) for key, x in answer["metrics"].items()}
        loss = next(r for r in f.results if not r.updates and not r.shape)
        return torch.tensor(answer["loss"], dtype=DTYPES[loss.dtype])

    @_completed()
    def call_backward(
        self, name: str, batch: tuple[Any, ...], named: Mapping[str, Any], local: bool,
        weight: float,
    ) -> Tensor:  # fmt: skip
        f = self.steps[name]
        with errors():
            check_weight_is_named(batch)
            separate_update(self._plan, name)
            weight = checked_weight(weight)
        tensors = self._shards(f, batch, named, local)
        answer = self._call("backward", {"name": name, "weight": weight}, tensors)
        self.note_gradients(name, True)
        return self._loss(f, answer)

    @_completed()
    def call_update(self, name: str) -> None:
        with errors():
            separate_update(self._plan, name)
            self.check_gradients(name)
        self._call("update", {"name": name})
        self.note_gradients(name, False)
        self.steps_done += 1

    @_completed()
    def gradients_of(self, name: str) -> dict[str, Tensor]:
        with errors():
            separate_update(self._plan, name)
        f, path = self.steps[name], self._folder / "gradients.npz"
        self._call("grads", {"name": name, "path": str(path)})
        keys, dtypes = gradient_keys(f), {arg.key: arg.dtype for arg in f.args}
        arrays = self._read(path, [dtypes[k] for k in keys.values()])
        return with_aliases(self._plan, dict(zip(keys, arrays, strict=True)))

    @_completed()
    def gradient_norm_of(self, name: str) -> float:
        with errors():
            separate_update(self._plan, name)
        return self._call("grad_norm", {"name": name})

    def evaluate(
        self, batches: Iterable[Any], function: str | None = None, *, local: bool = False,
        ema: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """Evaluate a function beside the steps on batches, as `Trainer.evaluate` does."""
        with errors():
            f = evaluation_of(self._plan, function)
            batches = checked_batches(batches, f)
            self._check_averages(ema)
        shards = (self._shards(f, (batch,), {}, local) for batch in batches)
        first = next(shards, None)
        if first is None:
            raise ShardirError(f"expected batches to evaluate {f.name}, got none")
        answer = dict[str, Any]()
        with _completed() as interrupts:
            self._send("evaluate", {"function": f.name, "ema": ema})
            try:
                for tensors in chain([first], shards):
                    if interrupts:
                        break
                    self._send("batch", {}, tensors)
            finally:  # an error of the iterator, or of a batch, leaves the ranks ready
                if self._stack is not None:
                    self._send("end")
                    answer = self._wait("answer")
        return answer["value"]

    @_completed()
    def call(self, function: str, *inputs: Any, ema: bool = False, **named: Any) -> Any:
        """Call a function beside the steps, as `Trainer.call` does."""
        with errors():
            f = function_beside(self._plan, function)
            self._check_averages(ema)
        tensors = self._shards(f, inputs, named, local=False)
        path = self._folder / "results.npz"
        self._call("call", {"function": f.name, "ema": ema, "path": str(path)}, tensors)
        results = [r for r in f.results if not r.updates and r.weighs is None]
        arrays = self._read(path, [r.dtype for r in results])
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    @_completed()
    def generate(
        self, prompt: Tensor, count: int, *, function: str | None = None, temperature: float = 0.0,
        top_k: int | None = None, seed: int = 0, ema: bool = False,
    ) -> Tensor:  # fmt: skip
        """Go on from tokens by the logits of a function beside the steps, as `Trainer.generate`
        does."""
        with errors():
            f = generating(self._plan, function)
            sampling, prompt = Sampling(temperature, top_k, seed), checked_prompt(f, prompt, count)
        self._check_averages(ema)
        path = self._folder / "tokens.npz"
        given = {"count": count, "function": f.name, "ema": ema, "path": str(path)}
        self._call("generate", given | asdict(sampling), [{"prompt": prompt}] * self._plan.size)
        return self._read(path, [next(a.dtype for a in f.args if a.role == "input")])[0]

    @_completed()
    def rate_of(self, name: str) -> float:
        self._check_rate(name, 0.0)
        return self._call("lr", {"name": name})

    @_completed()
    def set_rate_of(self, name: str, rate: float | Tensor) -> None:
        self._call("set_lr", {"name": name, "rate": self._check_rate(name, rate)})

    @_completed()
    def state_dict(self, ema: bool = False) -> dict[str, Tensor]:
        """Return the parameters and buffers, whole, by their names in the module, as
        `Trainer.state_dict` does."""
        self._check_averages(ema)
        path, known = self._folder / "states.npz", weight_arguments(self._plan)
        self._call("state_dict", {"path": str(path), "ema": ema})
        arrays = self._read(path, [arg.dtype for arg in known.values()])
        found = dict(zip(known, arrays, strict=True))
        return with_aliases(self._plan, found)

    def _check_averages(self, ema: bool) -> None:
        if ema:
            with errors():
                averages(self._plan)

    @staticmethod
    def _read(path: Path, dtypes: Sequence[str]) -> list[Tensor]:
        """Return the tensors of a file by number, and remove it."""
        with np.load(path, allow_pickle=False) as file:
            arrays = [
                torch.from_numpy(np.array(file[str(i)])).to(DTYPES[dtype])
                for i, dtype in enumerate(dtypes)
            ]
        path.unlink()
        return arrays

    @_completed()
    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace the parameters and buffers, as `Trainer.load_state_dict` does."""
        with errors():
            values = checked_states(self._plan, states)
        known = weight_arguments(self._plan)
        values = {key: x.to(DTYPES[known[key].dtype]) for key, x in values.items()}
        self._call("load_state_dict", {}, [values] * self._plan.size)

    @_completed()
    def save(self, path: str | Path, keep: int = 0, loader: Any = None) -> Path:
        """Write a checkpoint, as `Trainer.save` does."""
        state = None if loader is None else self._folder / loaders.FILE
        with errors():  # one of a rank would end the training
            folder = checked_path(path).absolute()
            final = new_checkpoint(folder, self.steps_done, keep)
            if state is not None:
                state.write_bytes(loaders.state_bytes(loader))
        stored = None if state is None else str(state)
        self._call("save", {"path": str(folder), "keep": keep, "loader": stored})
        return final

    @_completed()
    def load(self, path: str | Path, loader: Any = None) -> None:
        """Go on from a checkpoint, as `Trainer.load` does."""
        with errors():
            checkpoint = manifests.checkpoint_at(checked_path(path).absolute())
            manifest = manifests.read(checkpoint)
            manifests.check_program(manifest, checkpoint, self._plan)
            manifests.check_course(manifest, checkpoint, self._plan, self.first, self._options.seed)
            state = None if loader is None else loaders.read_state(checkpoint, loader)
        self.steps_done = self._call("load", {"path": str(checkpoint)})
        self.note_loaded()
        if loader is not None:
            loader.load_state_dict(state)

    def prefetch(self, loader: Iterable[Any], ahead: int = 2) -> loaders.Prefetch:
        """Return the batches of a loader, which a thread reads ahead (`Trainer.prefetch`)."""
        with errors():
            return loaders.Prefetch(loader, ahead=ahead)

    def close(self, wait: bool = True) -> None:
        """End the ranks; a second call does nothing.

        Args:
            wait: whether to wait for their own ends, rather than to stop them.

        Raises:
            RunError: a rank fails meanwhile.
        """
        if self._stack is None:
            return
        stack, self._stack = self._stack, None
        atexit.unregister(self.close)
        with stack:
            if wait:
                self._pipes.end()
                self._ranks.watch(self._events.append)

    # ---- calls ----

    def _call(
        self, method: str, arguments: Mapping[str, Any] | None = None,
        tensors: list[dict[str, Tensor]] | None = None,
    ) -> Any:  # fmt: skip
        """Call a method on all ranks; return the answer of rank 0."""
        self._send(method, arguments, tensors)
        return self._wait("answer")["value"]

    def _send(
        self, method: str, arguments: Mapping[str, Any] | None = None,
        tensors: list[dict[str, Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """Write a call to all ranks. `tensors`: those of each rank."""
        if self._stack is None:
            raise ShardirError("expected a trainer that is open, got one whose ranks have ended")
        given = dict(arguments or {})
        each = tensors or [{}] * self._plan.size
        if all(x is each[0] for x in each):
            calls = [bytes_of(method, given, each[0])] * len(each)
        else:
            calls = [bytes_of(method, given, x) for x in each]
        self._pipes.put(calls)
        self._watch(lambda: self._pipes.is_empty)

    def _wait(self, event: str) -> dict[str, Any]:
        """Return the next event of a kind."""
        self._watch(lambda: any(e["event"] == event for e in self._events))
        found = next(e for e in self._events if e["event"] == event)
        self._events.clear()
        return found

    def _watch(self, until: Callable[[], bool]) -> None:
        """Watch the ranks until something holds; end them if it does not come to that."""
        try:
            with in_python_words():
                self._ranks.watch(self._events.append, until)
        except BaseException:  # a second Ctrl-C too: half a call cannot be taken back
            self.close(wait=False)
            raise

    def _check_rate(self, name: str, rate: float | Tensor) -> float:
        with errors():
            return checked_rate(self._plan, self.steps[name], rate)[1]

    def _shards(
        self, f: PlanFunction, batch: tuple[Any, ...], named: Mapping[str, Any], local: bool
    ) -> list[dict[str, Tensor]]:
        """Return the shards of the inputs of a function by name, for each rank."""
        with errors():
            if not local:
                pairs = list(zip(*bound_inputs(f, batch, named), strict=True))
                whole = [(arg, checked_input(arg, x, arg.shape)) for arg, x in pairs]
                return [
                    {arg.name: part(x, _bounds(mesh, arg)) for arg, x in whole}
                    for mesh in self._meshes
                ]
            parts = batch[0] if len(batch) == 1 and not named else None
            if not isinstance(parts, list | tuple) or len(parts) != len(self._meshes):
                raise ShardirError(
                    f"expected a list of the shards of each of {len(self._meshes)} ranks with "
                    "local=True"
                )
            return [
                {arg.name: checked_input(arg, x, _shape(mesh, arg), mesh.rank)
                 for arg, x in zip(*bound_inputs(f, (given,), {}), strict=True)}
                for given, mesh in zip(parts, self._meshes, strict=True)
            ]  # fmt: skip


OPTIONS = ("backend", "device", "seed", "timeout", "threads", "compile")
"""The options of a run that the ranks of a loop have too."""


def rank_options(given: Mapping[str, Any]) -> Options:
    """Return the options of ranks by name.

    Raises:
        ShardirError: a loop has no such option, or it has a wrong value.
    """
    if unknown := [name for name in given if name not in OPTIONS]:
        raise ShardirError(
            f"expected an option of {', '.join(OPTIONS)}, got {unknown[0]}"
            f"{did_you_mean(unknown[0], OPTIONS)}"
        )
    return Options.of(given)


def _bounds(mesh: rt.Mesh, arg: Any) -> list[tuple[int, int]]:
    return rt.local_bounds(mesh, arg.shape, arg.dims)


def _shape(mesh: rt.Mesh, arg: Any) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in _bounds(mesh, arg))
