"""One rank of test_frameworks.py: prints the names in a profile of a step.

python profiled_rank.py DIRECTORY PORT RANK
"""

import os
import sys

import loop
import torch.distributed as dist
from torch.profiler import profile

import shardir

directory, port, rank = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port}  # fmt: skip
dist.init_process_group("gloo")
with shardir.start(directory) as trainer:
    plain = [trainer.step(*batch).item() for batch in loop.batches(1, 2)]
with shardir.start(directory) as trainer:
    first, second = loop.batches(1, 2)
    losses = [trainer.step(*first).item()]
    with profile() as profiled:
        losses.append(trainer.step(*second).item())
    print("equal losses" if losses == plain else f"{losses} differ from {plain}")
dist.destroy_process_group()
print(*[event.name for event in profiled.events() or []], sep="\n")
