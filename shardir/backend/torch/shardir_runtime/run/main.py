"""The run of an emitted program on one rank: initialize states, run steps, report results.

torchrun or shard-run starts the ranks; plain python does for a mesh of one rank. Rank 0 reports, to
people on stdout, or as JSON lines to the launcher that SHARDIR_EVENTS names (`fd:N`, or a path):

    {"event": "start", "ranks": 4, "backend": "gloo"}
    {"event": "steps", "function": "step", "first": 1, "losses": [2.3, 2.1], "seconds": 0.4,
     "memory": 212860928, "metrics": {"learning_rate": [0.1, 0.1]}}
                                     (since the start, without evaluations; bytes of rank 0's peak)
    {"event": "evaluated", "of": "step", "step": 50, "function": "accuracy", "name": "acc",
     "value": 0.91}
    {"event": "checkpoint", "step": 50, "folder": "checkpoints"}    (its writing begins)
    {"event": "repeat", "function": "step", "step": 50, "loss": NaN, "first": 41, "done": 40}
            (steps 41 to 50 run again before the run ends; later ones are signs of life)
    {"event": "stopped", "step": 50, "signal": 15}
    {"event": "trained", "function": "step", "steps": 100, "seconds": 1.2, "steps_per_second": 83.0}
    {"event": "result", "function": "accuracy", "name": "acc", "shape": [], "dtype": "f32",
     "value": 0.97}                                        (null where there are over 4096 elements)
    {"event": "answer", "value": 0.1}           (to a call of a loop in another process: served.py)
Each rank reports its end: {"event": "done"}, or
    {"event": "error", "kind": "plan" | "program" | "late" | "lost", "message": "ValueError: ..."}
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.saving import Saving, saving
from ..checkpoints.weights import check_weights, with_weights
from ..collectives.mesh import Mesh
from ..collectives.shards import gather_global
from ..data.files import save_npz
from ..data.inputs import Inputs
from ..data.sources import with_data
from ..plan.program import PlanError, PlanFunction, PlanResult, ProgramPlan, load_plan
from .anomalies import CHECKED_STEPS, Watch, not_finite
from .compiled import compile_functions
from .evaluation import batches_of, evaluate
from .events import Events
from .options import RunOptions
from .process import as_rank, join_ranks, memory
from .replay import Replay
from .served import pipe_of_calls, serve
from .session import Session, scalars_of
from .trace import Recorder, requested_recorder
from .trainer import Trainer

REPORTED_ELEMENTS = 4096
"""The size of the largest result whose values are reported."""

REPORT_SECONDS = 0.1
"""The minimum time between two reports of losses, in seconds: it bounds the work of the
launcher."""


def main(directory: Path, functions: dict[str, Callable], single: bool = False) -> None:
    """Run all functions of the plan.json of a directory, and end the process."""

    def work(options: RunOptions, events: Events) -> int:
        plan = with_data(load_plan(directory), options.data, options.last)
        if events.rank == 0 or not options.broadcast:
            plan = with_weights(plan, options.weights)
        plan = _unsplit(plan) if single else plan
        mesh = join_ranks(plan, options)
        check_weights(options.weights, mesh.rank, mesh.size)
        if options.compile and options.detect_anomaly:
            raise PlanError("--compile: expected no --detect-anomaly, which looks at each op")
        recorder = requested_recorder(mesh.device)
        if options.compile and recorder is not None:
            raise PlanError("--compile: expected no --trace, which looks at each op")
        called = compile_functions(plan, functions) if options.compile else functions
        if recorder is not None:
            called = recorder.functions(plan, plan.directory / "program.py")
        if (calls := pipe_of_calls(mesh.rank)) is not None:
            session = Session(plan, mesh, called, options.seed)
            events.send(event="start", ranks=mesh.size, backend=options.backend)
            serve(Trainer(session, options.steps_done), calls, events)
            return 0
        runner = Runner(
            plan, mesh, called, options.seed, events, options.broadcast, recorder, functions
        )
        signal = runner.run(options)
        if recorder is not None:
            recorder.write(mesh.rank)
        return signal

    as_rank(work)


def _unsplit(plan: ProgramPlan) -> ProgramPlan:
    """Return the plan of a program on one device."""

    def unsplit(value: Any, **other: Any) -> Any:
        return replace(value, dims=((),) * len(value.shape), **other)

    functions = tuple(
        replace(
            f,
            args=tuple(map(unsplit, f.args)),
            results=tuple(unsplit(r, partial=None) for r in f.results),
        )
        for f in plan.functions
    )
    return replace(plan, axes=(), groups=(), channels=(), functions=functions)


class Runner(Session):
    """A session that runs functions on the inputs of the plan, and reports.

    Args:
        eager: the functions without torch.compile; by default `functions`.
    """

    def __init__(
        self, plan: ProgramPlan, mesh: Mesh, functions: dict, seed: int, events: Events,
        broadcasts: bool = False, recorder: Recorder | None = None, eager: dict | None = None,
    ):  # fmt: skip
        super().__init__(plan, mesh, functions, seed, broadcasts, recorder)
        self.events, self.eager = events, eager or functions
        self.evaluations = [(f, batches_of(f)) for f in self.others]
        self.inputs = {f.name: Inputs(self.states, f) for f in plan.functions}

    def run(self, options: RunOptions) -> int:
        """Run all training steps, then all other functions, and report both.

        Returns:
            The signal that ended the run after a checkpoint; 0 if the run is complete.
        """
        self.events.send(event="start", ranks=self.mesh.size, backend=options.backend)
        dump: dict[str, Tensor] = {}
        steps = [f for f in self.plan.functions if f.kind == "step"]
        if (options.checkpoints or options.resume) and len(steps) != 1:
            hint = "" if steps else "; --weights begins with the parameters of one"
            raise PlanError(f"checkpoints: expected one step function, got {len(steps)}{hint}")
        for function in steps:
            with saving(options, self.states, function, self.events) as saved:
                losses, outputs = self.train(function, options, saved)
            if saved.signal:
                return saved.signal
            if outputs:
                dump[f"losses/{function.name}"] = torch.tensor(losses, dtype=torch.float64)
                self._results(function, outputs, {}, dump, options.dump, report=False)
        for function, batches in self.evaluations:
            outputs, means = self.evaluated(function, batches)
            self._results(function, outputs, means, dump, options.dump, report=True)
        if options.dump:
            for key in self.states.types:
                dump[f"states/{key}"] = self.states.state(key)
            if self.mesh.rank == 0:
                try:
                    save_npz(options.dump, dump)
                except OSError as e:
                    why = e.strerror or e
                    raise PlanError(f"--dump {options.dump} cannot be written: {why}") from None
        return 0

    def train(
        self, function: PlanFunction, options: RunOptions, saved: Saving
    ) -> tuple[list[float], list[Tensor]]:
        """Run all steps; return their losses and the results of the last one.

        Raises:
            NotFiniteError: a loss is not finite.
        """
        scalars = scalars_of(function)
        outputs, waiting = list[Tensor](), list[Tensor]()
        losses, unsent = list[float](), list[list[float]]()
        read_every = 1 if self.mesh.device.type == "cpu" else CHECKED_STEPS
        if function.replicas:  # they do not wait for each other between two synchronisations
            read_every = min((f.every for f in self.periodic if f.every), default=read_every)
        # A step of a dynamic loss scale that is not finite is skipped.
        skips = any(arg.key == function.key_of("loss_scale") for arg in function.args)
        watch = Watch(self.plan.directory / "program.py", self.mesh.rank)
        started = reported = first_done = time.perf_counter()
        evaluating = 0.0
        steps = range(saved.start, options.steps)
        for step, inputs in zip(steps, self.inputs[function.name].ahead(steps), strict=True):
            saved.begin()
            with watch.of_step(step) if options.detect_anomaly else nullcontext():
                if options.detect_anomaly:
                    watch.look_at(function, inputs)
                outputs = self.train_step(function, step, inputs, check=step == saved.start)
            waiting += [outputs[i].double() for i in scalars]
            wrong = None
            is_last = saved.agreed() or step == options.steps - 1
            saves = saved.is_due(step + 1, is_last)
            evaluates = bool(options.eval_every) and (step + 1) % options.eval_every == 0
            if step % read_every == 0 or is_last or evaluates or saves:
                # One copy off the device for several steps.
                unsent += (new := self._rows(scalars, waiting))
                waiting = []
                if (is_last or not skips) and not options.allow_nan:
                    wrong = not_finite([row[0] for row in new[-1 if skips else 0 :]], step + 1)
            now = time.perf_counter()
            if step == saved.start:
                first_done = now
            due = now - reported > REPORT_SECONDS or step == saved.start
            if unsent and (due or is_last or evaluates or saves or wrong):
                found, *columns = map(list, zip(*unsent, strict=True))
                _, *metrics = scalars.values()
                self.events.send(
                    event="steps", function=function.name,
                    first=saved.start + len(losses) + 1, losses=found,
                    seconds=now - started - evaluating, memory=memory(self.mesh.device),
                    metrics={r.name: x for r, x in zip(metrics, columns, strict=True)},
                )  # fmt: skip
                losses, unsent, reported = losses + found, [], now
            if wrong is not None:
                replay = Replay(self, function, saved, *wrong)
                if options.detect_anomaly:
                    replay.conclude(watch)
                replay.search((now - started - evaluating) / len(losses), skips)
            if saves:
                saved.save(step + 1)
            if is_last:
                break
            if evaluates:
                self.report(function, step + 1)
                evaluating += time.perf_counter() - now
        seconds = time.perf_counter() - started - evaluating
        rest = time.perf_counter() - first_done - evaluating  # the first step also warms up
        done = len(losses)
        rate = (done - 1) / rest if done > 1 else done / max(seconds, 1e-9)
        self.events.send(
            event="trained", function=function.name, steps=done, seconds=seconds,
            steps_per_second=rate,
        )  # fmt: skip
        return losses, outputs

    def loss(self, function: PlanFunction, outputs: list[Tensor]) -> float:
        """Return the loss of a step, from this rank's results."""
        place, result = next(iter(scalars_of(function).items()))
        return self._rows({place: result}, [outputs[place].double()])[0][0]

    def _rows(self, scalars: dict[int, PlanResult], waiting: list[Tensor]) -> list[list[float]]:
        """Return the loss and the metrics of several steps, from this rank's parts."""
        columns = torch.stack(waiting).view(-1, len(scalars)).unbind(1)
        complete = [
            gather_global(self.mesh, x, ((),), r.partial, tuple(x.shape))
            for x, r in zip(columns, scalars.values(), strict=True)
        ]
        return torch.stack(complete, 1).tolist()

    def evaluated(
        self, function: PlanFunction, batches: int
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Run a function on all batches of its data (see `evaluate`)."""
        calls = (self.at_step(function, k, check=k == 0) for k in range(batches))
        return evaluate(self.states, function, calls)

    def report(self, step_function: PlanFunction, steps: int) -> None:
        """Run the functions beside the steps, and report their scalars."""
        for function, batches in self.evaluations:
            for i, mean in self.evaluated(function, batches)[1].items():
                self.events.send(
                    event="evaluated", function=function.name, name=function.results[i].name,
                    of=step_function.name, step=steps, value=float(mean),
                )  # fmt: skip

    def at_step(self, function: PlanFunction, step: int, check: bool = False) -> list[Tensor]:
        """Run a function on the inputs of a step."""
        return self.call(function, self.inputs[function.name].at(step), check)

    def _results(
        self, function: PlanFunction, outputs: list[Tensor], means: dict[int, Tensor],
        dump: dict, dumping: Any, report: bool,
    ) -> None:  # fmt: skip
        """Gather and report small results, and all results for a file. `means`: results that are
        gathered already."""
        for i, (result, output) in enumerate(zip(function.results, outputs, strict=True)):
            count = torch.Size(result.shape).numel()
            small = report and count <= REPORTED_ELEMENTS
            hidden = result.updates or result.weighs is not None
            if hidden or not (small or dumping):
                continue
            full = means.get(i)
            if full is None:
                full = result.batch_of(self.states.gathered(output, result, result.partial))
            dump[f"results/{function.name}/{i}"] = full
            if report:
                value = full.tolist() if small else None
                self.events.send(
                    event="result", function=function.name, name=result.name,
                    shape=tuple(full.shape), dtype=result.dtype, value=value,
                )  # fmt: skip
