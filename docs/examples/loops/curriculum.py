"""A curriculum: what is learnt changes by step, and the loop sets the rate."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import shardir

WARM = 3
"""The first steps, in which the model learns to repeat its input."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU())
        self.decoder, self.head = nn.Linear(32, 16), nn.Linear(32, 4)


def repeat(model, x):
    return mse_loss(model.decoder(model.encoder(x)), x)


def classify(model, x, labels):
    return cross_entropy(model.head(model.encoder(x)), labels)


def build():
    torch.manual_seed(0)
    model = Model().double()
    first = [*model.encoder.parameters(), *model.decoder.parameters()]
    adam = torch.optim.AdamW(first, lr=torch.tensor(0.01).double())
    return model, adam, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1).double())


def batches(count):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 16, generator=g).double(), torch.randint(4, (8,), generator=g)


def train(steps=7):
    (model, adam, sgd), (x, labels) = build(), next(batches(1))
    program = shardir.compile(model, mesh="dp = 2, tp = 2", plan="fsdp(dp)", steps={
        "repeat": shardir.Step(repeat, x, optimizer=adam),
        "classify": shardir.Step(classify, (x, labels), optimizer=sgd),
    })  # fmt: skip
    losses = []
    with program.ranks() as trainer:
        for i, (x, labels) in enumerate(batches(steps)):
            step, inputs = ("repeat", (x,)) if i < WARM else ("classify", (x, labels))
            if i > WARM:
                trainer["classify"].lr *= 0.8
            losses.append(trainer[step].step(*inputs).item())
            print(f"{step} {losses[-1]:.6f} at rate {trainer[step].lr:.4f}")
        return losses, trainer.state_dict()


if __name__ == "__main__":
    train()
