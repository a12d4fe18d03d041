"""Early stopping: the best checkpoint is kept, and loaded at the end."""

import sys
import tempfile

import torch
from torch import nn

import shardir

PATIENCE = 2
"""The evaluations without a better one after which the training stops."""


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.03)


def data(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 16, generator=g).double()
    return x, x[:, :4].argmax(-1)


def train(folder):
    (model, optimizer), (x, labels) = build(), data(seed=1)
    program = shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, optimizer=optimizer,
        mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)", evaluate=True,
    )  # fmt: skip
    history, best, waited = [], float("inf"), 0
    with program.ranks() as trainer:
        while waited < PATIENCE:
            loss = trainer.step(x, labels).item()
            valid = trainer.evaluate([data(seed=2)])["loss"]
            history.append((loss, valid))
            print(f"step {trainer.steps_done}: loss {loss:.6f}, valid {valid:.6f}")
            if valid < best:
                best, waited = valid, 0
                trainer.save(folder, keep=1)
            else:
                waited += 1
        trainer.load(folder)
        print(f"the best is step {trainer.steps_done}: {best:.6f}")
        return history, trainer.steps_done, trainer.state_dict()


if __name__ == "__main__":
    train(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp())
