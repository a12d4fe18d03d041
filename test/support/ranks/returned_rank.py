"""One rank of test_returned_values.py: `returned_rank.py FOLDER RANK`, on which each program of a
folder calls its functions. Rank 0 writes found.json: by program and result, the bytes of the
returned value, of those in its storage together, and of the storage."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from bench.rank_program import Emitted, joined

RANKS, SECONDS = 4, 120


def main(folder: Path, rank: int) -> None:
    found: dict[str, dict[str, list]] = {}
    for place in joined(folder, rank, RANKS, SECONDS):
        runner, found[place.name] = Emitted(place).runner, {}
        for function in runner.plan.functions:
            with torch.no_grad():
                outputs = runner.at_step(function, 0)
            together: dict[int, int] = {}
            for x in outputs:
                key = x.untyped_storage()._cdata
                together[key] = together.get(key, 0) + x.nbytes
            for result, x in zip(function.results, outputs, strict=True):
                storage = x.untyped_storage()
                found[place.name][f"{function.name} {result.name}"] = [
                    bool(result.updates), x.nbytes, together[storage._cdata], storage.nbytes()
                ]  # fmt: skip
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
