"""Runs an emitted program on one rank: makes the mesh, fills the states, trains, reports.

Started by torchrun or by shard-run, or with plain python where the mesh has one rank. Rank 0
reports: to people on stdout, or as JSON lines to the launcher that is named by SHARDIR_EVENTS
(`fd:N`, or a path):

    {"event": "start", "ranks": 4, "backend": "gloo"}
    {"event": "steps", "function": "step", "first": 1, "losses": [2.3, 2.1]}
    {"event": "trained", "function": "step", "steps": 100, "seconds": 1.2, "steps_per_second": 83.0}
    {"event": "result", "function": "accuracy", "name": "acc", "shape": [], "dtype": "f32",
     "value": 0.97}                                        (null where there are over 4096 elements)
    {"event": "done"}
and from any rank {"event": "error", "rank": 2, "kind": "plan" | "peer" | "program", "message"}.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import runtime as rt
import runtime_random
import torch
import torch.distributed as dist
from runtime_events import Events
from runtime_files import open_npy, save_npz
from runtime_plan import (
    START_SECONDS,
    PlanArgument,
    PlanError,
    PlanFunction,
    PlanValue,
    ProgramPlan,
    load_plan,
)
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
REPORT_SECONDS = 0.1
# What torch says when it is another rank that has failed.
PEER_WORDS = ("closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "refused")


def main(functions: dict[str, Callable], single: bool = False) -> None:
    """Runs all functions of plan.json beside this file and ends the process."""

    def work(options: argparse.Namespace, events: Events) -> None:
        plan = load_plan(Path(__file__).parent)
        plan = plan.unsplit() if single else plan
        for function in plan.functions:
            if function.name not in functions:
                raise PlanError(f"plan.json names {function.name!r}, which the program has not")
        mesh = start(plan, options)
        Runner(plan, mesh, functions, options.seed, events).run(options)

    as_rank(work)


def as_rank(work: Callable[[argparse.Namespace, Events], None]) -> None:
    """Does the work of one rank, without gradients, and ends the process: how it ended is the last
    event."""
    options = _options()
    events = Events(int(os.environ.get("RANK", "0")))
    try:
        _behave(options)
        with torch.no_grad():
            work(options, events)
        events.send(event="done")
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except PlanError as error:
        events.send(always=True, event="error", kind="plan", message=str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: leaving in good order would wait for the other ranks
    except Exception as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0][:1000]
        peer = isinstance(error, RuntimeError) and any(w in str(error).lower() for w in PEER_WORDS)
        kind = "peer" if peer else "program"
        events.send(always=True, event="error", kind=kind, message=message)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs one rank of a compiled program.")
    parser.add_argument("--steps", type=int, default=100, help="training steps (100)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (0)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--threads", type=int, default=0, help="threads a rank (gloo: 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for a rank")
    parser.add_argument("--dump", metavar="FILE", help="write all states and results to an .npz")
    return parser.parse_args()


# ---- starting --------------------------------------------------------------------------------


def _behave(options: argparse.Namespace) -> None:
    """Dies with the launcher, and shares few cores well."""
    launcher = os.environ.get("SHARDIR_LAUNCHER")
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(launcher):
            sys.exit("the launcher is gone")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if hasattr(os, "SCHED_BATCH") and local > len(os.sched_getaffinity(0)):
        # Longer turns on a core: five times faster small collectives where ranks share cores.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if options.backend == "gloo" or options.threads:
        torch.set_num_threads(options.threads or 1)


def start(plan: ProgramPlan, options: argparse.Namespace) -> rt.Mesh:
    """Joins the other ranks and makes the process groups, in the same order on all of them."""
    given = os.environ.get("WORLD_SIZE")
    rank = int(os.environ.get("RANK", "0"))
    if int(given or "1") != plan.size:
        raise PlanError(
            f"the program is compiled for {plan.size} ranks ({plan.mesh_text()}), but was started"
            f" on {given or '1'}: use `torchrun --nproc-per-node {plan.size} program.py`"
            f" or `shard-run {plan.directory}`"
        )
    device = "cpu"
    if options.backend == "nccl":
        local, seen = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= seen:
            raise PlanError(f"rank {rank} needs GPU {local}, but there are {seen}: try gloo")
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    if plan.size > 1:
        timeout = timedelta(seconds=options.timeout)
        dist.init_process_group(
            options.backend, rank=rank, world_size=plan.size, timeout=timeout,
            store=_launchers_store(rank, plan.size),
        )  # fmt: skip
    mesh = rt.Mesh(plan.axes, rank, device)
    for axes in plan.groups:
        mesh.group(axes)
    return mesh


def _launchers_store(rank: int, size: int) -> Any:
    """The store in which all ranks meet, however late the last one is. Rank 0 serves it on the
    socket that the launcher opened, so that the port cannot be taken."""
    socket = os.environ.get("SHARDIR_STORE_FD")
    if socket is None:
        return None  # torchrun: from the environment
    store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=START_SECONDS)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return store(host, port, size, True, timeout, master_listen_fd=int(socket))
    return store(host, port, size, False, timeout)


# ---- running ---------------------------------------------------------------------------------


class Runner:
    """The states of one rank, and the functions that use and change them."""

    def __init__(
        self, plan: ProgramPlan, mesh: rt.Mesh, functions: dict, seed: int, events: Events
    ):  # fmt: skip
        self.plan, self.mesh, self.functions, self.seed = plan, mesh, functions, seed
        self.events = events
        self.states: dict[str, Tensor] = {}
        self.types: dict[str, PlanValue] = {}  # of the states: how each is split now
        self.inputs: dict[tuple, Callable[[int], Tensor]] = {}
        for function in plan.functions:
            for arg in function.args:
                if arg.role != "input" and arg.key not in self.states:
                    self.states[arg.key], self.types[arg.key] = self._filled(arg), arg
                elif arg.role == "input":
                    self.inputs[function.name, arg.name] = self._input(function, arg)

    def run(self, options: argparse.Namespace) -> None:
        """Trains all steps, then evaluates all other functions, and reports both."""
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
        """The losses of so many steps, and what the last one returned."""
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
        """Runs the program's function on this rank and keeps the states that it returns."""
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
                    f" {result.name!r} on rank {self.mesh.rank}; plan.json says {shape}"
                    f" {DTYPES[result.dtype]} (of {list(result.shape)})"
                )

    def _results(
        self, function: PlanFunction, outputs: list[Tensor], dump: dict, dumping: Any, report: bool
    ) -> None:
        """Puts results together, where they are small or wanted in a file."""
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
        """The state as this function wants it split; usually it is so already."""
        have = self.types[arg.key]
        if have.dims == arg.dims:
            return self.states[arg.key]
        full = self._gathered(self.states[arg.key], have)
        return _part(full, self._bounds(arg)).contiguous()

    def _filled(self, arg: PlanArgument) -> Tensor:
        """This rank's part of an initial value: the same numbers on any mesh."""
        kind, bounds = arg.init["kind"], self._bounds(arg)
        if kind == "file":
            full = open_npy(self.plan.directory / arg.init["file"])
            return _part(full, bounds).to(self.mesh.device, DTYPES[arg.dtype], copy=True)
        key = f"{self.seed}/{arg.key}"
        filled = runtime_random.fill(kind, arg.init, arg.shape, bounds, key, DTYPES[arg.dtype])
        return filled.to(self.mesh.device)

    def _input(self, function: PlanFunction, arg: PlanArgument) -> Callable[[int], Tensor]:
        """Makes an input at each step: rows of a file, or the same random numbers each time."""
        if arg.init["kind"] != "file" or function.kind != "step":
            same = self._filled(arg)
            return lambda step: same
        data = open_npy(self.plan.directory / arg.init["file"])
        (start, stop), *columns = self._bounds(arg)
        shuffle = arg.init.get("shuffle", True)
        number, count = arg.init.get("microbatch", 0), arg.init.get("microbatches", 1)

        def batch(step: int) -> Tensor:
            step = step * count + number  # a microbatch is the batch of a step without them
            if shuffle:
                rows = runtime_random.batch_rows(len(data), step, arg.shape[0], self.seed)
            else:
                rows = torch.arange(step * arg.shape[0], (step + 1) * arg.shape[0]) % len(data)
            mine = data[rows[start:stop]]
            return _part(mine, [(0, stop - start), *columns]).to(
                self.mesh.device, DTYPES[arg.dtype], memory_format=torch.contiguous_format
            )

        return batch


def _part(x: Tensor, bounds: Iterable[tuple[int, int]]) -> Tensor:
    for dim, (start, stop) in enumerate(bounds):
        x = x.narrow(dim, start, stop - start)
    return x
