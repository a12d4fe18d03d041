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

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import runtime as rt
import runtime_random
import torch
from runtime_events import Events
from runtime_files import open_npy, save_npz
from runtime_plan import (
    PlanArgument,
    PlanError,
    PlanFunction,
    PlanValue,
    ProgramPlan,
    load_plan,
)
from runtime_process import as_rank, join_ranks
from torch import Tensor

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i1": torch.bool,
}
REPORTED_ELEMENTS = 4096
"""The size of the largest result whose values are reported."""

REPORT_SECONDS = 0.1
"""The minimum time between two reports of losses, in seconds."""


def main(functions: dict[str, Callable], single: bool = False) -> None:
    """Run all functions of the plan.json beside this file, and end the process."""

    def work(options: argparse.Namespace, events: Events) -> None:
        plan = load_plan(Path(__file__).parent)
        plan = _unsplit(plan) if single else plan
        for function in plan.functions:
            if function.name not in functions:
                raise PlanError(
                    f"plan.json names {function.name!r}, which the program does not have"
                )
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


class Runner:
    """The states of one rank, and the functions that use and change them."""

    def __init__(
        self, plan: ProgramPlan, mesh: rt.Mesh, functions: dict, seed: int, events: Events
    ):  # fmt: skip
        self.plan, self.mesh, self.functions, self.seed = plan, mesh, functions, seed
        self.events = events
        self.states: dict[str, Tensor] = {}
        self.types: dict[str, PlanValue] = {}  # of the states, with their current layouts
        self.inputs: dict[tuple, Callable[[int], Tensor]] = {}
        for function in plan.functions:
            for arg in function.args:
                if arg.role != "input" and arg.key not in self.states:
                    self.states[arg.key], self.types[arg.key] = self._filled(arg), arg
                elif arg.role == "input":
                    self.inputs[function.name, arg.name] = self._input(function, arg)

    def run(self, options: argparse.Namespace) -> None:
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
                outputs = self.call(function, 0, check=True)
                self._results(function, outputs, dump, options.dump, report=True)
        if options.dump:
            for key, value in self.states.items():
                dump[f"states/{key}"] = self._gathered(value, self.types[key])
            if self.mesh.rank == 0:
                save_npz(Path(options.dump), dump)

    def train(self, function: PlanFunction, steps: int) -> tuple[list[float], list[Tensor] | None]:
        """Run a number of steps; return their losses and the results of the last one."""
        place, loss = next(
            (i, r) for i, r in enumerate(function.results) if not r.updates and not r.shape
        )
        outputs, waiting, losses = None, [], []
        started = reported = first_done = time.perf_counter()
        for step in range(steps):
            outputs = self.call(function, step, check=step == 0)
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

    def call(self, function: PlanFunction, step: int, check: bool) -> list[Tensor]:
        """Run a function of the program on this rank, and retain the states that it returns."""
        args = [
            self.inputs[function.name, arg.name](step) if arg.role == "input" else self._state(arg)
            for arg in function.args
        ]
        outputs = self.functions[function.name](self.mesh, *args)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if check:
            self._check(function, outputs)
        for result, output in zip(function.results, outputs, strict=True):
            if result.updates:
                self.states[result.updates], self.types[result.updates] = output, result
        self.mesh.wait()
        return outputs

    def _check(self, function: PlanFunction, outputs: list[Tensor]) -> None:
        """Raise PlanError unless the results have the types of the plan: a later error would be
        hard to trace."""
        if len(outputs) != len(function.results):
            raise PlanError(
                f"{function.name} returns {len(outputs)} results, not {len(function.results)}"
            )
        for result, output in zip(function.results, outputs, strict=True):
            shape = [stop - start for start, stop in self._bounds(result)]
            if list(output.shape) != shape or output.dtype != DTYPES[result.dtype]:
                raise PlanError(
                    f"{function.name} returns {list(output.shape)} {output.dtype} as"
                    f" {result.name!r} on rank {self.mesh.rank}; expected {shape} by plan.json"
                    f" {DTYPES[result.dtype]} (of {list(result.shape)})"
                )

    def _results(
        self, function: PlanFunction, outputs: list[Tensor], dump: dict, dumping: Any, report: bool
    ) -> None:
        """Gather the results that are small, or wanted in a file."""
        for i, (result, output) in enumerate(zip(function.results, outputs, strict=True)):
            count = torch.Size(result.shape).numel()
            small = report and count <= REPORTED_ELEMENTS
            if result.updates or not (small or dumping):
                continue
            full = self._gathered(output, result, result.partial)
            dump[f"results/{function.name}/{i}"] = full
            if report:
                value = full.tolist() if small else None
                self.events.send(
                    event="result", function=function.name, name=result.name,
                    shape=result.shape, dtype=result.dtype, value=value,
                )  # fmt: skip

    # ---- values ----

    def _bounds(self, value: PlanValue) -> list[tuple[int, int]]:
        return rt.local_bounds(self.mesh, value.shape, value.dims)

    def _gathered(self, x: Tensor, value: PlanValue, partial: Any = None) -> Tensor:
        return rt.gather_global(self.mesh, x, value.dims, partial, value.shape)

    def _state(self, arg: PlanArgument) -> Tensor:
        """Return a state with the layout that a function expects; usually it has it already."""
        have = self.types[arg.key]
        if have.dims == arg.dims:
            return self.states[arg.key]
        full = self._gathered(self.states[arg.key], have)
        return _part(full, self._bounds(arg)).contiguous()

    def _filled(self, arg: PlanArgument) -> Tensor:
        """Return this rank's shard of an initial value, which is the same on any mesh."""
        kind, bounds = arg.init["kind"], self._bounds(arg)
        if kind == "file":
            full = open_npy(self.plan.directory / arg.init["file"])
            return _part(full, bounds).to(self.mesh.device, DTYPES[arg.dtype], copy=True)
        key = f"{self.seed}/{arg.key}"
        filled = runtime_random.fill(kind, arg.init, arg.shape, bounds, key, DTYPES[arg.dtype])
        return filled.to(self.mesh.device)

    def _input(self, function: PlanFunction, arg: PlanArgument) -> Callable[[int], Tensor]:
        """Return the function from a step to an input: rows of a file, or random values."""
        if arg.init["kind"] != "file" or function.kind != "step":
            same = self._filled(arg)
            return lambda step: same
        data = open_npy(self.plan.directory / arg.init["file"])
        several = "microbatches" in arg.init
        *microbatches, (start, stop) = self._bounds(arg)[: several + 1]
        columns, size = self._bounds(arg)[several + 1 :], arg.shape[several]
        shuffle = arg.init.get("shuffle", True)

        def batch(number: int) -> Tensor:
            if shuffle:
                rows = runtime_random.batch_rows(len(data), number, size, self.seed)
            else:
                rows = torch.arange(number * size, (number + 1) * size) % len(data)
            mine = data[rows[start:stop]]
            return _part(mine, [(0, stop - start), *columns]).to(
                self.mesh.device, DTYPES[arg.dtype], memory_format=torch.contiguous_format
            )

        def batches(step: int) -> Tensor:  # a microbatch is the batch of a step without them
            (first, last), first_of_step = microbatches[0], step * arg.shape[0]
            return torch.stack([batch(first_of_step + k) for k in range(first, last)])

        return batches if several else batch


def _part(x: Tensor, bounds: Iterable[tuple[int, int]]) -> Tensor:
    for dim, (start, stop) in enumerate(bounds):
        x = x.narrow(dim, start, stop - start)
    return x
