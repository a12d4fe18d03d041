"""Two nodes with two ranks each: where one is lost, torchrun starts all again, on both nodes:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 elastic.py FOLDER STEPS
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import shardir

BATCH = 8


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def rows():
    g = torch.Generator().manual_seed(1)
    return torch.randn(48, 16, generator=g).double(), torch.randint(4, (48,), generator=g)


def compiled():
    (model, optimizer), (x, labels) = build(), rows()
    return shardir.compile(
        model, x[:BATCH], labels=labels[:BATCH], loss=nn.functional.cross_entropy,
        optimizer=optimizer, mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)",
    )  # fmt: skip


def main(folder, steps):
    rank, dataset = int(os.environ["RANK"]), TensorDataset(*rows())
    with shardir.start(compiled() if rank == 0 else None) as trainer:
        parts = trainer.data_size
        sampler = StatefulDistributedSampler(dataset, parts, trainer.data_rank, seed=2)
        loader = StatefulDataLoader(dataset, BATCH // parts, sampler=sampler)
        if any(folder.glob("step-*[0-9]")):
            trainer.load(folder, loader=loader)
        while trainer.steps_done < steps:  # an epoch
            sampler.set_epoch(trainer.steps_done * BATCH // len(dataset))
            for x, labels in loader:
                loss = trainer.step(x, labels, local=True).item()
                print(f"rank {rank}, step {trainer.steps_done}: {loss:.15f}", flush=True)
                trainer.save(folder, keep=2, loader=loader)
                if trainer.steps_done == steps:
                    return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
