"""One rank of pipeline_step.py: `pipeline_step_rank.py PROGRAMS OUT ROUNDS NAP BACKEND`.

PROGRAMS is a file with the folder of each program, by name, and the seconds for which the parts of
its stages sleep, or null.
"""

import ctypes
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from bench import pipeline_models as models
from shardir.backend.torch.shardir_runtime.plan.program import load_plan
from shardir.backend.torch.shardir_runtime.run.events import Events
from shardir.backend.torch.shardir_runtime.run.main import Runner
from shardir.backend.torch.shardir_runtime.run.options import RunOptions
from shardir.backend.torch.shardir_runtime.run.process import join_ranks
from shardir.backend.torch.shardir_runtime.run.program_module import program_module
from shardir.backend.torch.shardir_runtime.shm import register

THEIRS = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
          "zbv": ScheduleZBVZeroBubble}  # fmt: skip
PR_SET_TIMERSLACK = 29
"""Sets the nanoseconds by which a sleep may end late: 50,000 without it, in each of the naps."""

Step = Callable[[], float]
"""A step, with its loss on the ranks that have it, and 0 on others."""


# ---- torch's ----


class Nap(torch.autograd.Function):
    """Sleeps in the backward part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *d: Any) -> Any:
        time.sleep(ctx.seconds)
        return d[0], None


class Sleeping(nn.Module):
    """A stage that sleeps in F, in I and in W."""

    def __init__(self, first: bool, seconds: float):
        super().__init__()
        self.first, self.seconds = first, seconds
        self.w = nn.Parameter(torch.zeros(1, models.HIDDEN))
        self.offset = nn.Parameter(torch.zeros(models.HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = x + self.offset
        time.sleep(self.seconds)
        return models.nearly(Nap.apply(x, self.seconds), Nap.apply(self.w, self.seconds))


def torch_step(
    name: str,
    make: Callable[[int], Sequence[nn.Module]],
    x: torch.Tensor,
    y: torch.Tensor,
    loss: Any,
) -> Step:
    """A step of torch.distributed.pipelining; `make` makes the modules of all stages."""
    me, world = dist.get_rank(), dist.get_world_size()
    chunks = 1 if name == "1f1b" else 2
    stages = chunks * world
    second = stages - 1 - me if name == "zbv" else me + world
    mine = [me] if chunks == 1 else [me, second]
    modules = make(stages)
    parts: list[Any] = [PipelineStage(modules[i], i, stages, torch.device("cpu")) for i in mine]
    given: Any = parts[0] if chunks == 1 else parts
    schedule = THEIRS[name](given, models.BATCH, loss_fn=loss)
    optimizer = models.optimizer([p for i in mine for p in modules[i].parameters()])
    last = stages - 1 in mine

    def step() -> float:
        losses: list[torch.Tensor] = []
        how: dict[str, Any] = {"target": y, "losses": losses} if last else {}
        schedule.step(*((x,) if 0 in mine else ()), **how)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if last else 0.0

    return step


def one_process(x: torch.Tensor, y: torch.Tensor) -> Step:
    (model,) = models.gpt()
    optimizer = models.optimizer(list(model.parameters()))

    def step() -> float:
        if dist.get_rank():
            return 0.0
        loss = models.loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


# ---- ours ----


class Emitted:
    """A program of ours; `naps`: seconds for which the parts of each
    stage sleep."""

    def __init__(self, program: Path, naps: Sequence[float] | None):
        emitted, plan = program_module(program), load_plan(program)
        self.rank = dist.get_rank()
        mesh = join_ranks(plan, RunOptions(backend="gloo"))
        events = Events(self.rank)
        functions = {f.name: getattr(emitted, f.name) for f in plan.functions}
        self.runner = Runner(plan, mesh, functions, 0, events)
        self.function = plan.functions[0]
        self.inputs = self.runner.inputs[self.function.name].at(0)  # as a run prepares them ahead
        self.last = emitted.STEP.rank_of[max(emitted.STEP.rank_of)]
        if naps is not None:
            _sleep(emitted.STEP, naps)

    def step(self) -> float:
        with torch.no_grad():
            found = self.runner.call(self.function, self.inputs)[0]
        return found.item() if self.rank == self.last else 0.0


def _sleep(step: Any, naps: Sequence[float]) -> None:
    """Let the parts of a step in stages sleep: F, I and W one nap of the stage, B, and W without I,
    two."""
    kinds = {(p.kind, p.stage) for p in step.parts}

    def sleeping(part: Any) -> Any:
        both = part.kind == "B" or (part.kind == "W" and ("I", part.stage) not in kinds)
        count = 2 if both else int(part.kind in "FIW")

        def function(*args: Any) -> Any:
            time.sleep(count * naps[part.stage])
            return part.function(*args)

        return part._replace(function=function)

    step.parts[:] = map(sleeping, step.parts)
    step.index()


def measured(steps: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Return the losses of two steps, the seconds of steps in turns, from the first rank that
    begins to the last that ends, and the processor seconds of all ranks in them."""
    found: dict[str, Any] = {name: {"losses": [], "seconds": [], "cpu": []} for name in steps}
    for name, step in steps.items():
        for _ in range(2):
            loss = torch.tensor([step()], dtype=torch.float64)
            dist.all_reduce(loss)
            found[name]["losses"].append(loss.item())
    names = list(steps)
    for r in range(rounds):
        at = r % len(names)
        for name in names[at:] + names[:at]:
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            steps[name]()
            ends = torch.tensor([-begun, time.perf_counter()], dtype=torch.float64)
            work = torch.tensor(time.process_time() - used, dtype=torch.float64)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            dist.all_reduce(work)
            found[name]["seconds"].append(ends.sum().item())
            found[name]["cpu"].append(work.item())
    return found


def main() -> None:
    given, out, rounds, nap, backend, *sizes = sys.argv[1:]
    models.resize(*map(int, sizes))
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):  # Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    programs = json.loads(Path(given).read_text())
    register()
    dist.init_process_group(backend)
    x, y = models.data()
    activations = torch.zeros(models.BATCH, models.SEQ, models.HIDDEN)

    def sleeping(naps: Sequence[float]) -> list[nn.Module]:
        return [Sleeping(i == 0, each) for i, each in enumerate(naps)]

    def evenly(stages: int) -> list[nn.Module]:
        return sleeping([float(nap) * dist.get_world_size() / stages] * stages)

    steps: dict[str, Step] = {}
    asked = {name.split()[0] for name in programs}
    if "gpt" in asked:
        steps["gpt one process"] = one_process(x, y)
    for name in THEIRS:
        if "gpt" in asked:
            steps[f"gpt torch {name}"] = torch_step(name, models.gpt, x, y, models.loss)
        if "sleeping" in asked:
            steps[f"sleeping torch {name}"] = torch_step(
                name, evenly, activations, activations, lambda out, _: out.mean()
            )
    for name, (program, naps) in programs.items():
        if naps is not None and len({*naps}) > 1:
            steps["sleeping torch zbv, split"] = torch_step(
                "zbv", lambda _, naps=naps: sleeping(naps), activations, activations,
                lambda out, _: out.mean(),
            )  # fmt: skip
        steps[name] = Emitted(Path(program), naps).step
    found = measured(steps, int(rounds))
    for name, record in found.items():
        model = name.split()[0]
        expected = found["gpt one process" if model == "gpt" else "sleeping torch 1f1b"]["losses"]
        pairs = zip(record["losses"], expected, strict=True)
        record["loss_error"] = max(abs(a - b) / abs(b or 1) for a, b in pairs)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the process groups of torch's schedules and of programs do not end in one order


if __name__ == "__main__":
    main()
