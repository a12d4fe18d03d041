"""A small language model: training, evaluation and sampling in a plain loop.

torchrun --nproc-per-node 4 plain.py
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardir

WORDS, LENGTH = 12, 6


def build():
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, WORDS)
    model = nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.03)


def loss(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def next_word(model, words):
    return model(words).argmax(-1)


def batches(count, seed):  # each row counts upwards, from a random start
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield (torch.randint(WORDS, (8, 1), generator=g) + torch.arange(LENGTH)) % WORDS


def compiled():
    (model, optimizer), tokens = build(), next(batches(1, 0))
    return shardir.compile(model, mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)", steps={
        "train": shardir.Step(loss, tokens, optimizer=optimizer),
        "valid": shardir.Inference(loss, tokens),
        "next_word": shardir.Inference(next_word, tokens[:, 0]),
    })  # fmt: skip


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    with shardir.start(compiled() if rank == 0 else None) as trainer:
        for i, tokens in enumerate(batches(20, seed=1)):
            value = trainer.step(tokens)
            if i % 10 == 9:
                valid = trainer.evaluate(batches(2, seed=2), "valid")["loss"]
                text = [torch.arange(8)]
                for _ in range(5):
                    text.append(trainer.call("next_word", text[-1]))
                line = f"{i + 1} {value.item()} {valid} {torch.stack(text, 1)[0].tolist()}"
                print(f"rank {rank}: {line}", flush=True)
