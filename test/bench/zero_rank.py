"""One rank of the ZeRO benchmark: `zero_rank.py FOLDER OUT ROUNDS SIDE SIDES`, as zero.py starts
it.

Sides are torch's variants and the emitted ones. Each has processes of its own, since emitted
programs set the rules of the allocator; they take turns by files in FOLDER.
"""

import gc
import json
import logging
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from step_rank import Count
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from zero_torch import VARIANTS, single

MEASURED = ("seconds", "cpu_seconds", "pages")
"""Of each step (`timed`)."""

WARM = 3
"""The steps whose losses are compared."""


class Census(Count):
    """Counts collectives too; and the bytes of the storages of living tensors that were made under
    it: `live`, and their `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.alive: dict[int, Any] = {}
        self.live = self.peak = 0
        storages: Any = torch.UntypedStorage
        plain = storages.resize_

        def resize_(storage: torch.UntypedStorage, *sizes: Any) -> Any:
            out = plain(storage, *sizes)  # FSDP2 frees so what it has gathered
            self.see(storage)
            return out

        storages.resize_ = resize_

    def reset(self) -> None:
        self.peak, self.collectives, self.bytes = self.live, 0, 0

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.alive[key] = weakref.ref(storage, lambda _: self.forget(key))
        self.live += storage.nbytes() - self.sizes.get(key, 0)
        self.sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.live)

    def forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key)
        del self.alive[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
                self.see(x.untyped_storage())
        return out


def counting(census: Census) -> Any:
    """Return a context in which the messages of one collective of the runtime count as that."""
    blocks = import_module("runtime_blocks")
    plain = blocks._exchange

    def exchange(group: Any, sent: Any, received: Any, wait: bool) -> Any:
        counts = census.collectives + 1, census.bytes + sum(_larger(x) for x in (*sent,))
        out = plain(group, sent, received, wait)
        census.collectives, census.bytes = counts
        return out

    return mock.patch.object(blocks, "_exchange", exchange)


def _larger(blocks: Any) -> int:
    """Return the bytes of the blocks of all ranks."""
    return sum(x.numel() * x.element_size() for x in blocks)


class Turns:
    """The turns of both sides: of each measurement, which has a number."""

    def __init__(self, folder: Path, side: str, sides: list[str]):
        self.folder = folder
        self.mark(f"ready {side}")
        for other in sides:
            self.wait(f"ready {other}")

    def mark(self, name: str) -> None:
        if dist.get_rank() == 0:
            (self.folder / name).touch()

    def wait(self, name: str) -> None:
        """Wait on rank 0; the others wait for that."""
        while dist.get_rank() == 0 and not (self.folder / name).exists():
            time.sleep(0.01)
        dist.barrier()


class Emitted:
    """An emitted program, by the runtime beside the first."""

    def __init__(self, place: Path):
        rt, main = import_module("runtime"), import_module("runtime_main")
        plan = import_module("runtime_plan").load_plan(place)
        mesh = rt.Mesh(plan.axes, dist.get_rank(), "cpu")
        for axes in plan.groups:
            mesh.group(axes)
        spec = util.spec_from_file_location(f"program_{place.name}", place / "program.py")
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        events = import_module("runtime_events").Events(dist.get_rank())
        functions = {f.name: getattr(module, f.python) for f in plan.functions}
        self.rt, self.runner = rt, main.Runner(plan, mesh, functions, 0, events)
        self.mesh, self.function = mesh, plan.functions[0]
        self.inputs = self.runner.inputs[self.function.name].at(0)

    def step(self) -> torch.Tensor:
        with torch.no_grad():
            return self.runner.call(self.function, self.inputs)[0]

    def number(self, loss: torch.Tensor) -> float:
        due = self.function.results[0].partial
        return self.rt.gather_global(self.mesh, loss, (), due, ()).item()

    def everything(self) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Return copies of the parameters and of the global inputs."""
        states = self.runner.states
        parameters = [a.key for a in self.function.args if a.role == "parameter"]
        given = [a for a in self.function.args if a.role == "input"]
        inputs = [
            self.rt.gather_global(self.mesh, x, a.dims, None, a.shape).long()
            for a, x in zip(given, self.inputs, strict=True)
        ]
        return {key: states.state(key).clone() for key in parameters}, inputs


def mean(loss: torch.Tensor) -> float:
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def timed(step: Callable[[], Any]) -> tuple[float, ...]:
    """Return the seconds from the first rank that begins to the last that ends, and the means of
    the ranks' processor seconds and of the pages that the system has mapped."""
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.perf_counter()
    out = step()
    ended = time.perf_counter()
    del out
    after = resource.getrusage(resource.RUSAGE_SELF)
    span = torch.tensor([-begun, ended], dtype=torch.float64)
    dist.all_reduce(span, dist.ReduceOp.MAX)
    busy = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    pages = after.ru_minflt - before.ru_minflt
    return span.sum().item(), mean(torch.tensor(busy)), mean(torch.tensor(float(pages)))


def main() -> None:
    folder, out, rounds, side = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    places = sorted(path for path in folder.iterdir() if path.is_dir())
    sys.path[:0] = map(str, places)
    weights, (x, y) = Emitted(places[0]).everything()
    reference = single(weights, x, y)
    expected = [reference().item() for _ in range(WARM)]
    del reference
    mine = [each.chunk(dist.get_world_size())[dist.get_rank()] for each in (x, y)]
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], Any]] = {}
    makers: dict[str, Callable[[], Any]] = {
        name: partial(f, weights, *mine, mesh) for name, f in VARIANTS.items()
    }
    names = [*makers, *(path.name for path in places)]
    if side == "emitted":
        import_module("runtime_process").retain_memory()
        makers = {path.name: partial(Emitted, path) for path in places}
    for name, make in makers.items():
        with Census() as census, counting(census):
            made = make()
            step, number = (made.step, made.number) if isinstance(made, Emitted) else (made, mean)
            losses, count, most = [], (0, 0), torch.zeros(2, dtype=torch.int64)
            for _ in expected:
                gc.collect()
                census.reset()
                loss = step()
                most[0], count = census.peak, (census.collectives, census.bytes)
                losses.append(number(loss))
                del loss
            gc.collect()
            most[1] = census.live
        dist.all_reduce(most, dist.ReduceOp.MAX)
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        found[name] = {
            "collectives": count[0], "bytes": count[1], "peak_bytes": int(most[0]),
            "kept_bytes": int(most[1]), "loss_error": error,
            **{kind: [] for kind in MEASURED},
        }  # fmt: skip
        steps[name] = step
    turns, number = Turns(folder, side, sys.argv[5].split()), 0
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name in steps:
                if number:
                    turns.wait(str(number - 1))
                for kind, value in zip(MEASURED, timed(steps[name]), strict=True):
                    found[name][kind].append(value)
                turns.mark(str(number))
            number += 1
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
