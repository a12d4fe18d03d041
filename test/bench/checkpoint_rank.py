"""One rank of the checkpoint benchmark: `checkpoint_rank.py PROGRAM FOLDER OUT ROUNDS`, as
checkpoint.py starts it."""

import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.checkpoints.distributed import Checkpoints
from shardir.backend.torch.shardir_runtime.plan.program import load_plan
from shardir.backend.torch.shardir_runtime.run.states import States

Begun = Callable[[], object]
"""Waits until a save that has begun is complete."""


def ours(program: Path, folder: Path) -> tuple[Any, Callable[[Path], Begun]]:
    """The states of a program, and what saves them."""
    plan = load_plan(program)
    mesh = rt.Mesh(plan.axes, dist.get_rank(), "cpu")
    states = States(plan, mesh, 0)
    checkpoints = Checkpoints(folder / "shardir", states, plan.functions[0])

    def save(path: Path) -> Begun:
        checkpoints.folder = path
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        checkpoints.save(1)
        return checkpoints.finish

    return states, save


def peers(states: Any) -> dict[str, Callable[[Path], Begun]]:
    """DTensors of the same shards, saved by torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group: Any = dist.new_group(backend="gloo")
    tensors = {k: DTensor.from_local(x, mesh, [Shard(0)]) for k, x in states.values.items()}

    def variant(writer: Callable[[str], Any]) -> Callable[[Path], Begun]:
        def save(path: Path) -> Begun:
            made = writer(str(path))
            saved: Any = dcp.async_save(tensors, storage_writer=made, process_group=group)
            return saved.result

        return save

    return {
        "DCP, safetensors": variant(
            lambda path: dcp.HuggingFaceStorageWriter(path, save_distributed=True)
        ),
        "DCP, its own form": variant(dcp.FileSystemWriter),
    }


def main() -> None:
    program, folder, out, rounds = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo")
    states, save = ours(Path(program), Path(folder))
    variants = {"shardir": save, **peers(states)}
    found: dict[str, Any] = {name: {"blocked": [], "complete": []} for name in variants}
    for number in range(int(rounds)):
        for name, save in variants.items():
            path = Path(folder) / f"{number}-{name.replace(', ', '-').replace(' ', '-')}"
            dist.barrier()
            begun = time.perf_counter()
            wait = save(path)
            blocked = time.perf_counter() - begun
            wait()
            both = torch.tensor([blocked, time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            for kind, seconds in zip(("blocked", "complete"), both.tolist(), strict=True):
                found[name][kind].append(seconds)
            if dist.get_rank() == 0:
                files = [f for f in path.rglob("*") if f.is_file()]
                found[name] |= {"files": len(files), "bytes": sum(f.stat().st_size for f in files)}
                shutil.rmtree(path)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
