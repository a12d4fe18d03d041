"""One rank of the benchmark of recompute: `recompute_rank.py FOLDER OUT ROUNDS`, as recompute.py
starts it."""

import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.rank_program import Census, Emitted
from bench.zero_rank import timed

WARM = 3
"""The steps after which the parameters are compared."""


def main() -> None:
    folder, out, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    places = sorted(path for path in folder.iterdir() if path.is_dir())
    found: dict[str, dict[str, Any]] = {}
    programs: dict[str, Emitted] = {}
    first: list[torch.Tensor] = []
    for place in places:
        losses = list[torch.Tensor]()
        with Census() as census:
            program = programs[place.name] = Emitted(place)
            for _ in range(WARM):
                gc.collect()
                census.reset()
                losses.append(program.step().clone())
            peak = torch.tensor(census.peak)
        states = [*losses, *program.everything()[0].values()]
        first = first or states
        equal = torch.tensor(all(map(torch.equal, states, first)))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        found[place.name] = {"peak": int(peak), "equal": bool(equal), "seconds": []}
    for turn in range(rounds):
        names = [*programs]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name]["seconds"].append(timed(programs[name].step)[0])
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
