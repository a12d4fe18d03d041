"""One rank of the ZeRO benchmark: `zero_rank.py FOLDER OUT ROUNDS SIDE SIDES`, as zero.py starts
it.

Sides are torch's variants and the emitted ones, of a backend: `torch gloo`. Each has processes of
its own, since emitted programs set the rules of the allocator; they take turns by files in FOLDER.
"""

import gc
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.rank_program import Census, Emitted
from bench.zero_torch import VARIANTS, single
from shardir.backend.torch.shardir_runtime.collectives import blocks
from shardir.backend.torch.shardir_runtime.run.process import retain_memory
from shardir.backend.torch.shardir_runtime.shm import register

MEASURED = ("seconds", "cpu_seconds", "pages")
"""Of each step (`timed`)."""

WARM = 3
"""The steps whose losses are compared."""


def counting(census: Census) -> Any:
    """Return a context in which the messages of one collective of the runtime count as that."""
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
    folder, out, rounds, given = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    side, backend = given.split()
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    places = sorted(path for path in folder.iterdir() if path.is_dir())
    if side == "emitted":
        retain_memory()
    register()
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
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
    names = [
        f"{name} {other}"
        for other in dict.fromkeys(text.split()[1] for text in sys.argv[5].split(","))
        for name in (*makers, *(path.name for path in places))
    ]
    if side == "emitted":
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
        name = f"{name} {backend}"
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        seen = {"collectives": count[0], "bytes": count[1]} if backend == "gloo" else {}
        found[name] = {
            **seen, "peak_bytes": int(most[0]), "kept_bytes": int(most[1]), "loss_error": error,
            **{kind: [] for kind in MEASURED},
        }  # fmt: skip
        steps[name] = step
    turns, number = Turns(folder, given, sys.argv[5].split(",")), 0
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
