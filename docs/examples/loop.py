"""A training whose loop is your own, on 4 ranks: torchrun --nproc-per-node 4 loop.py FOLDER"""

import os
import sys

import torch
from torch import nn

import shardir

RANK = int(os.environ.get("RANK", "0"))


def build():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def batches(seed, count):  # global batches, the same on all ranks
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(8, 16, dtype=torch.float64, generator=g), torch.arange(8) % 4


def compiled():
    (model, optimizer), (x, labels) = build(), next(batches(0, 1))
    return shardir.compile(model, x, labels=labels, loss=nn.functional.cross_entropy,
                           optimizer=optimizer, mesh="dp = 2, tp = 2", evaluate=True,
                           plan="megatron(tp) * fsdp(dp)")  # fmt: skip


if __name__ == "__main__":
    with shardir.start(compiled() if RANK == 0 else None) as trainer:
        for i, (x, labels) in enumerate(batches(1, 6)):
            loss = trainer.step(x, labels)
            if i % 3 == 2:
                valid = trainer.evaluate(batches(2, 3))["loss"]
                print(f"rank {RANK}: {trainer.steps_done} {loss.item()} {valid}", flush=True)
                trainer.lr *= 0.5
        trainer.save(sys.argv[1])
