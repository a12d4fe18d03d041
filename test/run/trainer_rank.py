"""One rank of test_trainer.py: the example's loop, then steps on shards from its checkpoint.

python trainer_rank.py CHECKPOINTS DIRECTORY PORT RANK
"""

import os
import runpy
import sys

import loop
import torch
import torch.distributed as dist

import shardir
from shardir.backend.torch import started

checkpoints, directory, port, rank = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port}  # fmt: skip
if rank in "23":  # as on another machine
    started._is_there = lambda folder: False
torch.manual_seed(0)
sys.argv[1:] = [checkpoints]
runpy.run_path(loop.__file__, run_name="__main__")

place = f"file://{checkpoints}.met"
dist.init_process_group("gloo", init_method=place, rank=int(rank), world_size=4)
with shardir.start(directory, resume=checkpoints) as trainer:
    part = slice(2 * int(rank), 2 * int(rank) + 2)
    for x, labels in loop.batches(3, 2):
        loss = trainer.step(x[part], labels[part], local=True)
        print(f"rank {rank}: {trainer.steps_done} {loss.item()} 0.0")
    try:
        trainer.step(x, labels, local=True)
    except shardir.ShardirError as error:
        print(error)
    norm = sum(float(w.square().sum()) for w in trainer.state_dict().values())
print(f"rank {rank}: norm {norm} {dist.is_initialized()}")
dist.destroy_process_group()
