"""One rank of test_loaders.py, with a loader of its own, whose state is in the checkpoint.

python loader_rank.py DIRECTORY CHECKPOINTS RESUME STEPS PORT RANK
"""

import os
import sys

from support.loaders import loader

import shardir

directory, checkpoints, resume, steps, port, rank = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port}  # fmt: skip
with shardir.start(directory) as trainer:
    batches = trainer.prefetch(loader(4 // trainer.data_size, seed=trainer.data_rank))
    if resume != "none":
        trainer.load(resume, loader=batches)
    while trainer.steps_done < int(steps):
        for x, labels in batches:
            loss = trainer.step(x, labels, local=True)
            print(f"rank {rank}: {trainer.steps_done} {loss.item()}")
            if trainer.steps_done == int(steps):
                break
    trainer.save(checkpoints, loader=batches)
    try:
        trainer.save(checkpoints, loader=[1])
    except shardir.ShardirError as error:
        print(error)
