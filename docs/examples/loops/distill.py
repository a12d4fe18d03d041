"""Distillation: a student learns the outputs of a frozen teacher, which is in the same program."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import shardir


def build():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).double()
    student = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)).double()
    return teacher.requires_grad_(False), student


def loss(models, x, labels):
    with torch.no_grad():
        expected = log_softmax(models["teacher"](x), dim=-1)
    logits = models["student"](x)
    learnt = kl_div(log_softmax(logits, dim=-1), expected, log_target=True, reduction="batchmean")
    return learnt + 0.1 * cross_entropy(logits, labels), {"distance": learnt}


def batches(count):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 16, generator=g).double(), torch.randint(4, (8,), generator=g)


def train(steps=5):
    teacher, student = build()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    program = shardir.compile(
        {"teacher": teacher, "student": student},
        steps={"distill": shardir.Step(loss, next(batches(1)), optimizer=optimizer)},
        mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)",
    )  # fmt: skip
    losses = []
    with program.ranks() as trainer:
        for x, labels in batches(steps):
            losses.append(trainer.step(x, labels).item())
            print(f"loss {losses[-1]:.6f}, distance {trainer.metrics['distance'].item():.6f}")
        return losses, trainer.state_dict()


if __name__ == "__main__":
    train()
