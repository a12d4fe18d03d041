"""One rank of test_measured_memory.py: `memory_rank.py FOLDER RANK`, on which each program of a
folder takes steps. Rank 0 writes found.json: of each program and rank, the bytes of all living
tensors at the peak of a step."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from rank_program import Census, Emitted, joined

RANKS, STEPS, SECONDS = 4, 10, 300
"""The minimum peak of the steps counts: in the first one groups and buffers may be made, and a
thread of Gloo may hold what it has sent a moment longer."""


def main(folder: Path, rank: int) -> None:
    found: dict[str, list[int]] = {}
    for place in joined(folder, rank, RANKS, SECONDS):
        with Census() as census:
            program, minimum = Emitted(place), sys.maxsize
            for _ in range(STEPS):
                gc.collect()
                census.reset()
                loss = program.step()
                del loss
                minimum = min(minimum, census.peak)
        del program
        gc.collect()
        peaks = [torch.zeros((), dtype=torch.int64) for _ in range(RANKS)]
        dist.all_gather(peaks, torch.tensor(minimum))
        found[place.name] = [int(p) for p in peaks]
        print(place.name, *found[place.name], flush=True)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
