"""Lion, an optimizer that torch does not have, as a function. It runs on shards of parameters."""

import torch
from torch import nn

import shardir


def lion(parameter, gradient, state, *, lr, beta1, beta2, weight_decay):
    mean = state["mean"]
    direction = (beta1 * mean + (1 - beta1) * gradient).sign() + weight_decay * parameter
    return parameter - lr * direction, {"mean": beta2 * mean + (1 - beta2) * gradient}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double()


def batches(count):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 16, generator=g).double(), torch.randint(4, (8,), generator=g)


def train(steps=6):
    model, (x, labels) = build(), next(batches(1))
    program = shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, mesh="dp = 4", plan="fsdp",
        optimizer=shardir.optimizer(
            lion, lr=torch.tensor(0.01), states={"mean": 0.0}, beta1=0.9, beta2=0.99,
            weight_decay=0.1,
        ),
    )  # fmt: skip
    losses = []
    with program.ranks() as trainer:
        for i, (x, labels) in enumerate(batches(steps)):
            trainer.lr = 0.01 * (1 - i / steps)
            losses.append(trainer.step(x, labels).item())
            print(f"loss {losses[-1]:.6f} at rate {trainer.lr:.4f}")
        return losses, trainer.state_dict()


if __name__ == "__main__":
    train()
