"""One rank of the benchmark of arenas: `arena_rank.py FOLDER OUT ROUNDS`, as arena.py starts it."""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.rank_program import Census, Emitted
from bench.zero_rank import MEASURED, timed
from shardir.backend.torch.shardir_runtime.run.process import retain_memory

WARM = 3


class Storages(Census):
    """Counts the storages that are made, too."""

    made = 0

    def see(self, storage: torch.UntypedStorage) -> None:
        self.made += storage._cdata not in self.sizes
        super().see(storage)


def main() -> None:
    folder, out, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    forms = {name: folder / name for name in ("plain", "arena")}
    retain_memory()
    dist.init_process_group("gloo")
    programs, found = dict[str, Emitted](), dict[str, Any]()
    for name, place in forms.items():
        with Storages() as storages:
            programs[name] = program = Emitted(place)
            kept, losses = storages.live, []
            for _ in range(WARM):
                gc.collect()
                storages.reset()
                storages.made = 0
                losses.append(program.number(program.step()))
        found[name] = {
            "losses": losses, "kept_bytes": kept, "peak_bytes": storages.peak,
            "storages": storages.made, **{kind: [] for kind in MEASURED},
        }  # fmt: skip
    for turn in range(rounds):
        for name in sorted(programs, reverse=turn % 2 == 1):
            for kind, value in zip(MEASURED, timed(programs[name].step), strict=True):
                found[name][kind].append(value)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
