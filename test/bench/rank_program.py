"""Emitted programs on a rank of a benchmark or a test, and the bytes of its living tensors.

A process has the runtime of one program, whose folder is on its path; other programs run by it too.
"""

import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from bench.step_rank import Count
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.plan.program import load_plan
from shardir.backend.torch.shardir_runtime.run.events import Events
from shardir.backend.torch.shardir_runtime.run.main import Runner
from shardir.backend.torch.shardir_runtime.run.options import RunOptions
from shardir.backend.torch.shardir_runtime.run.process import join_ranks
from shardir.backend.torch.shardir_runtime.run.program_module import program_module


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
        if not storage.resizable():  # what others see too, of the backend shm
            return
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


def joined(folder: Path, rank: int, ranks: int, seconds: float) -> list[Path]:
    """Join the Gloo group of the ranks that have a folder, which wait for each other for so long.
    Return the folders of the programs in it; modules are imported from these."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
    )
    places = sorted(path.parent for path in folder.glob("*/program.py"))
    return places


class Emitted:
    """An emitted program, whose first function is a step; all ranks have joined."""

    def __init__(self, place: Path):
        plan = load_plan(place)
        mesh = join_ranks(plan, RunOptions(backend="gloo", device="cpu"))
        module = program_module(place)
        events = Events(dist.get_rank())
        functions = {f.name: getattr(module, f.python) for f in plan.functions}
        self.rt, self.runner = rt, Runner(plan, mesh, functions, 0, events)
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
