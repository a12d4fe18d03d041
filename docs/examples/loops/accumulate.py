"""Gradients accumulated by hand over four batches, with clipping that looks at their norm."""

import torch
from torch import nn

import shardir

PARTS = 4


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def batches(count):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 16, generator=g).double(), torch.randint(4, (8,), generator=g)


def train(updates=3):
    model, optimizer = build()
    x, labels = next(batches(1))
    program = shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, optimizer=optimizer,
        mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)", clip="norm, max = 0.5",
        separate_update=True,
    )  # fmt: skip
    losses, norms = [], []
    with program.ranks() as trainer:
        for i, batch in enumerate(batches(PARTS * updates)):
            losses.append(trainer.backward(*batch, weight=1 / PARTS).item())
            if i % PARTS == PARTS - 1:
                norms.append(float(trainer.grad_norm))
                trainer.lr = 0.01 / (1 + i // PARTS)
                trainer.update()
                print(f"update {i // PARTS}: loss {losses[-1]:.6f}, norm {norms[-1]:.6f}")
        return losses, norms, trainer.state_dict()


if __name__ == "__main__":
    train()
