"""The run of an emitted program on one rank: states are filled, steps are run, results reported.

Ranks are started by torchrun or shard-run, or by plain python where the mesh has one rank. Rank 0
reports: to people on stdout, or as JSON lines to the launcher that SHARDIR_EVENTS names (`fd:N`, or
a path):

    {"event": "start", "ranks": 4, "backend": "gloo"}
    {"event": "steps", "function": "step", "first": 1, "losses": [2.3, 2.1]}
    {"event": "trained", "function": "step", "steps": 100, "seconds": 1.2, "steps_per_second": 83.0}
    {"event": "result", "function": "accuracy", "name": "acc", "shape": [], "dtype": "f32",
     "value": 0.97}                                        (null where there are over 4096 elements)
and each rank how it ended: {"event": "done"}, or
    {"event": "error", "kind": "plan" | "program" | "late" | "lost", "message": "ValueError: ..."}
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import runtime as rt
import torch
from runtime_data import input_of
from runtime_events import Events
from runtime_files import save_npz
from runtime_options import RunOptions
from runtime_plan import PlanFunction, ProgramPlan, load_plan
from runtime_process import as_rank, join_ranks
from runtime_session import Session
from torch import Tensor

REPORTED_ELEMENTS = 4096
"""The size of the largest result whose values are reported."""

REPORT_SECONDS = 0.1
"""The minimum time between two reports of losses, in seconds."""


def main(functions: dict[str, Callable], single: bool = False) -> None:
    """Run all functions of the plan.json beside this file, and end the process."""

    def work(options: RunOptions, events: Events) -> None:
        plan = load_plan(Path(__file__).parent)
        plan = _unsplit(plan) if single else plan
        mesh = join_ranks(plan, options)
        Runner(plan, mesh, functions, options.seed, events).run(options)

    as_rank(work)


def _unsplit(plan: ProgramPlan) -> ProgramPlan:
    """Return the plan of the same program on one device."""

    def one(value: Any, **other: Any) -> Any:
        return replace(value, dims=((),) * len(value.shape), **other)

    functions = tuple(
        replace(
            f, args=tuple(map(one, f.args)), results=tuple(one(r, partial=None) for r in f.results)
        )
        for f in plan.functions
    )
    return replace(plan, axes=(), groups=(), functions=functions)


class Runner(Session):
    """A session whose functions run on the inputs of the plan, and that reports."""

    def __init__(
        self, plan: ProgramPlan, mesh: rt.Mesh, functions: dict, seed: int, events: Events
    ):  # fmt: skip
        super().__init__(plan, mesh, functions, seed)
        self.events = events
        self.inputs = {
            f.name: [input_of(self.states, f, arg) for arg in f.args if arg.role == "input"]
            for f in plan.functions
        }

    def run(self, options: RunOptions) -> None:
        """Run all training steps, then all other functions, and report both."""
        self.events.send(event="start", ranks=self.mesh.size, backend=options.backend)
        dump: dict[str, Tensor] = {}
        for function in self.plan.functions:
            if function.kind == "step":
                losses, outputs = self.train(function, options.steps)
                if outputs is not None:
                    dump[f"losses/{function.name}"] = torch.tensor(losses, dtype=torch.float64)
                    self._results(function, outputs, dump, options.dump, report=False)
        for function in self.plan.functions:
            if function.kind == "function":
                outputs = self.at_step(function, 0, check=True)
                self._results(function, outputs, dump, options.dump, report=True)
        if options.dump:
            for key in self.states.values:
                dump[f"states/{key}"] = self.states.state(key)
            if self.mesh.rank == 0:
                save_npz(options.dump, dump)

    def train(self, function: PlanFunction, steps: int) -> tuple[list[float], list[Tensor] | None]:
        """Run a number of steps; return their losses and the results of the last one."""
        place, loss = next(
            (i, r) for i, r in enumerate(function.results) if not r.updates and not r.shape
        )
        outputs, waiting, losses = None, [], []
        started = reported = first_done = time.perf_counter()
        for step in range(steps):
            outputs = self.at_step(function, step, check=step == 0)
            waiting.append(rt.gather_global(self.mesh, outputs[place], (), loss.partial, ()))
            now = time.perf_counter()
            if step == 0:
                first_done = now
            if now - reported > REPORT_SECONDS or step in (0, steps - 1):
                new = torch.stack(waiting).double().tolist()  # one copy off the device for many
                first = len(losses) + 1
                losses += new
                waiting, reported = [], now
                self.events.send(event="steps", function=function.name, first=first, losses=new)
        seconds = time.perf_counter() - started
        rest = time.perf_counter() - first_done  # the first step also warms up
        rate = (steps - 1) / rest if steps > 1 else steps / max(seconds, 1e-9)
        self.events.send(
            event="trained", function=function.name, steps=steps, seconds=seconds,
            steps_per_second=rate,
        )  # fmt: skip
        return losses, outputs

    def at_step(self, function: PlanFunction, step: int, check: bool = False) -> list[Tensor]:
        """Run a function on the inputs of a step."""
        return self.call(function, [make(step) for make in self.inputs[function.name]], check)

    def _results(
        self, function: PlanFunction, outputs: list[Tensor], dump: dict, dumping: Any, report: bool
    ) -> None:
        """Gather the results that are small, or wanted in a file."""
        for i, (result, output) in enumerate(zip(function.results, outputs, strict=True)):
            count = torch.Size(result.shape).numel()
            small = report and count <= REPORTED_ELEMENTS
            if result.updates or not (small or dumping):
                continue
            full = self.states.gathered(output, result, result.partial)
            dump[f"results/{function.name}/{i}"] = full
            if report:
                value = full.tolist() if small else None
                self.events.send(
                    event="result", function=function.name, name=result.name,
                    shape=result.shape, dtype=result.dtype, value=value,
                )  # fmt: skip
