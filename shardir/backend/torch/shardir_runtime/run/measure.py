"""The times of functions of emitted programs on one rank: all programs in one start, in turns.

`main` is called by a script of the launcher (launch/measure.py), which has turns.json beside it:

    {"programs": ["/where/one", "/where/other"], "rounds": 5, "seconds": 0.02,
     "traced": [true, false]}

Programs are emitted directories. In each round, each function has a turn of about `seconds`, with
at least four calls in sequence. A step that reads rows of files takes its inputs as a run does,
from the first step on; other functions have equal inputs in all calls. Besides the events of
main.py, rank 0 reports

    {"event": "round", "done": 3, "of": 5}
    {"event": "times", "program": 0, "function": "step", "seconds": [0.0031, 0.003]}

with the mean time of a call in each round. A program that is `traced` has two more calls in each
round, with the times of its lines in trace0/rank0.json, ... beside turns.json (trace.py).
"""

import json
import math
import sys
import time
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist

from ..collectives.mesh import Mesh
from ..plan.program import PlanFunction, load_plan
from .events import Events
from .main import Runner
from .options import RunOptions
from .process import as_rank, join_ranks, make_groups
from .program_module import program_module
from .trace import Recorder

MIN_CALLS, MAX_CALLS = 4, 2000
"""The bounds of the number of calls in a turn. Ranks that share cores leave a barrier milliseconds
apart: in several calls, as in a run, this is a smaller part of the time."""

TRIES = 3
"""The number of single calls; the shortest determines the number of calls in a turn."""


class Timed:
    """A function, and the number of its calls in a turn."""

    def __init__(self, program: int, runner: Runner, function: PlanFunction, seconds: float):
        self.program, self.runner, self.function = program, runner, function
        self.seconds: list[float] = []
        inputs = runner.inputs[function.name]
        reads = function.kind == "step" and any(arg.epochs is not None for arg in function.args)
        self.inputs = inputs.ahead(range(sys.maxsize)) if reads else repeat(inputs.at(0))
        runner.call(function, next(self.inputs), check=True)
        self.calls = 1
        once = min(self.alone() for _ in range(TRIES))
        most = _most(runner.mesh, [once])[0]
        self.calls = max(MIN_CALLS, min(MAX_CALLS, math.ceil(seconds / most)))

    def alone(self) -> float:
        """Return the time of a turn on this rank, in seconds."""
        begun = time.perf_counter()
        for _ in range(self.calls):
            self.runner.call(self.function, next(self.inputs))
        _finish(self.runner.mesh)
        return time.perf_counter() - begun

    def turn(self) -> float:
        """Return the mean time of a call in seconds, from the begin on the first rank to the end on
        the last: ranks that share cores may run one after the other."""
        mesh = self.runner.mesh
        _finish(mesh)
        if mesh.size > 1:
            dist.barrier()
        begun = time.perf_counter()  # of one clock: all ranks are on this machine
        minus_first, last = _most(mesh, [-begun, begun + self.alone()])
        return (last + minus_first) / self.calls


class Traced:
    """The calls of a program that record the times of its lines."""

    def __init__(self, folder: Path, runner: Runner, calls: int):
        self.runner = runner
        folder.mkdir(exist_ok=True)
        self.recorder = Recorder(calls, folder, runner.mesh.device)
        plan = runner.plan
        self.functions = self.recorder.functions(plan, plan.directory / "program.py")

    def call(self, timed: Timed) -> None:
        """Record two calls of a function."""
        runner = self.runner
        before, runner.functions, runner.recorder = runner.functions, self.functions, self.recorder
        if runner.mesh.size > 1:
            dist.barrier()
        for _ in range(2):
            runner.call(timed.function, next(timed.inputs))
        runner.functions, runner.recorder = before, None


def _finish(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()


def _most(mesh: Mesh, numbers: list[float]) -> list[float]:
    """Return the maximum of each number over all ranks."""
    found = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
    if mesh.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def work(folder: Path, options: RunOptions, events: Events) -> None:
    """Measure all programs of turns.json in a folder. Programs on equal meshes share their process
    groups."""
    turns = json.loads((folder / "turns.json").read_text())
    meshes: dict[tuple, Mesh] = {}
    first: Mesh | None = None
    timed, traced = list[Timed](), dict[int, Traced]()
    for number, name in enumerate(turns["programs"]):
        plan = load_plan(name)
        if first is None:
            first = meshes[plan.axes] = join_ranks(plan, options)
        mesh = meshes.setdefault(plan.axes, Mesh(plan.axes, first.rank, first.device))
        make_groups(plan, mesh)
        module = program_module(plan.directory)
        functions = {f.name: getattr(module, f.python) for f in plan.functions}
        runner = Runner(plan, mesh, functions, options.seed, events)
        timed += [Timed(number, runner, f, turns["seconds"]) for f in plan.functions]
        if turns["traced"][number]:
            traced[number] = Traced(folder / f"trace{number}", runner, 2 * turns["rounds"])
    for number in range(turns["rounds"]):
        for one in timed:
            one.seconds.append(one.turn())
            if one.program in traced:
                traced[one.program].call(one)
        events.send(event="round", done=number + 1, of=turns["rounds"])
    for each in traced.values():
        each.recorder.write(each.runner.mesh.rank)
    for one in timed:
        events.send(
            event="times", program=one.program, function=one.function.name, seconds=one.seconds
        )


def main(script: str) -> None:
    """Measure the programs of the turns.json beside a script, and end the process."""
    as_rank(partial(work, Path(script).absolute().parent))
