"""One rank of test_measured_memory.py: `memory_rank.py FOLDER RANK`, on which each program of a
folder takes steps. Rank 0 writes found.json: of each program and rank, the bytes of all living
tensors at the peak of a step, on the device and on its host."""

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.rank_program import Census, Emitted, joined
from torch.utils._pytree import tree_leaves

from shardir.backend.torch.shardir_runtime.collectives import host

RANKS, STEPS, SECONDS = 4, 5, 300
"""The minimum peak of the steps counts: in the first one groups and buffers may be made, and a
thread of Gloo may hold what it has sent a moment longer."""


class Memories(Census):
    """A census of what is on the device; of what is on its host, which on a CPU is the same memory,
    `host` is one of its own. There are the states that a plan has there, copies to it, and the
    results of ops on them."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Census()
        self._is_host = False

    def watch(self, program: Emitted) -> None:
        """Count the states and the copies of a program where they belong."""
        for key, x in program.runner.states.values.items():
            if program.runner.states.types[key].host:
                self._move(x.untyped_storage())
        copies: Any = host
        plain = copies._start_copy

        def copied(mesh: Any, x: torch.Tensor, to: str, into: Any) -> torch.Tensor:
            self._is_host = to == "host"
            try:
                return plain(mesh, x, to, into)
            finally:
                self._is_host = False

        copies._start_copy = copied
        weakref.finalize(self, setattr, copies, "_start_copy", plain)

    def _move(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.sizes:
            self.forget(storage._cdata)
        self.host.see(storage)

    def reset(self) -> None:
        super().reset()
        self.host.reset()

    def see(self, storage: torch.UntypedStorage) -> None:
        is_new = storage._cdata not in self.sizes
        if storage._cdata in self.host.sizes or (is_new and self._is_host):
            self.host.see(storage)
        else:
            super().see(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        copying = self._is_host
        self._is_host |= any(x.untyped_storage()._cdata in self.host.sizes for x in given)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._is_host = copying


def main(folder: Path, rank: int) -> None:
    found: dict[str, list[list[int]]] = {}
    for place in joined(folder, rank, RANKS, SECONDS):
        with Memories() as census:
            program, minimum, host = Emitted(place), sys.maxsize, sys.maxsize
            census.watch(program)
            for _ in range(STEPS):
                gc.collect()
                census.reset()
                loss = program.step()
                del loss
                minimum, host = min(minimum, census.peak), min(host, census.host.peak)
        del program, census
        gc.collect()
        peaks = [torch.zeros(2, dtype=torch.int64) for _ in range(RANKS)]
        dist.all_gather(peaks, torch.tensor([minimum, host]))
        found[place.name] = [p.tolist() for p in peaks]
        print(place.name, *found[place.name], flush=True)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
