"""A moving average of the parameters, and the evaluation of both."""

import torch
from torch import nn

import shardir

DECAY = 0.9


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = model.double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(count, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(8, 16, generator=g).double(), torch.randint(4, (8,), generator=g)


def train(steps=6):
    (model, optimizer), (x, labels) = build(), next(batches(1, 0))
    program = shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, optimizer=optimizer,
        mesh="dp = 4", plan="zero1(dp)", ema=DECAY, evaluate=True,
    )  # fmt: skip
    valid = list(batches(2, seed=2))
    losses = []
    with program.ranks() as trainer:
        for i, (x, labels) in enumerate(batches(steps, seed=1)):
            losses.append(trainer.step(x, labels).item())
            if i % 3 == 2:
                last, mean = trainer.evaluate(valid), trainer.evaluate(valid, ema=True)
                print(f"loss {losses[-1]:.6f}, valid {last['loss']:.6f}, ema {mean['loss']:.6f}")
        return losses, last["loss"], mean["loss"], trainer.state_dict(ema=True)


if __name__ == "__main__":
    train()
