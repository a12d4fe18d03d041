"""Muon as a function that needs whole matrices: each is gathered, its update is split again."""

import torch
from torch import nn

import shardir


def muon(parameter, gradient, state, *, lr, momentum):
    mean = momentum * state["mean"] + gradient
    direction = gradient + momentum * mean
    if parameter.dim() == 2:
        x = direction / direction.norm()
        for _ in range(5):  # Newton and Schulz: singular values become about 1
            a = x @ x.T
            x = 3.4445 * x + (2.0315 * a @ a - 4.775 * a) @ x
        direction = x
    return parameter - lr * direction, {"mean": mean}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double()


def batches(count):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 16, generator=g).double(), torch.randint(4, (8,), generator=g)


def train(steps=6):
    model, (x, labels) = build(), next(batches(1))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = shardir.optimizer(
        muon, [{"params": matrices, "whole": True}, {"params": vectors, "lr": 0.01}],
        lr=0.05, states={"mean": 0.0}, momentum=0.9,
    )  # fmt: skip
    program = shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, optimizer=optimizer,
        mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)",
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    )  # fmt: skip
    losses = []
    with program.ranks() as trainer:
        for x, labels in batches(steps):
            losses.append(trainer.step(x, labels).item())
            print(f"loss {losses[-1]:.6f}")
        return losses, trainer.state_dict()


if __name__ == "__main__":
    train()
