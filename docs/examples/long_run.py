"""A GPT that is trained, interrupted, resumed on another mesh, evaluated, and that writes text.

    python docs/examples/long_run.py write out
    shard-run out/dp2-tp2 --steps 600 --data tokens,targets=out/train.bin:u8 --checkpoints out/ckpt
    python docs/examples/long_run.py evaluate out
    torchrun --nproc-per-node 4 docs/examples/long_run.py generate out

docs/guides/long-runs.md explains it. The text is that of Python's reference; a token is a
character.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from generate import BATCH, GPT, LENGTH, save
from torch import Tensor
from torch.nn import functional

import shardir

ROWS = 32
"""The sequences of a batch."""

FIRST = 32
"""The character that is token 0, the first printable one."""


class Trained(GPT):
    """The mean loss of all tokens. It has the parameters of the GPT that generates, by name."""

    def __init__(self) -> None:
        super().__init__(cache=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.hidden(tokens, torch.arange(LENGTH)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def write(out: Path) -> None:
    """Write the data, and the programs: of two meshes, of the loss alone, and of the generation."""
    out.mkdir(exist_ok=True)
    text = " ".join(" ".join(topics.values()).split()).encode("ascii", "ignore")
    data = np.clip(np.frombuffer(text, np.uint8), FIRST, 127) - FIRST
    cut = len(data) * 9 // 10
    data[:cut].tofile(out / "train.bin")
    data[cut:].tofile(out / "valid.bin")

    torch.manual_seed(0)
    model = Trained()
    example = tuple(torch.zeros(2, ROWS, LENGTH, dtype=torch.long))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for name, mesh, plan in [("dp2-tp2", "dp = 2, tp = 2", "megatron(tp) * fsdp(dp)"),
                             ("dp2", "dp = 2", "fsdp")]:  # fmt: skip
        program = shardir.compile(
            model, example, optimizer=optimizer, mesh=mesh, plan=plan, clip="norm, max = 1.0",
            metrics="gradient_norm",
        )  # fmt: skip
        program.save(out / name)
    shardir.compile(model, example, train=False, mode="stand_alone").save(out / "loss")
    save(out / "generate")


def evaluate(out: Path) -> float:
    """Return the mean loss of the last checkpoint over the text that was not trained on."""
    loss = shardir.load(out / "loss", out / "ckpt")
    data = torch.from_numpy(np.fromfile(out / "valid.bin", np.uint8)).long()
    count = (len(data) - 1) // (ROWS * LENGTH)
    shape = count, ROWS, LENGTH
    tokens, targets = (data[i : i + count * ROWS * LENGTH].view(shape) for i in (0, 1))
    losses = [loss(x, y) for x, y in zip(tokens, targets, strict=True)]
    return float(torch.stack(losses).mean())


def generate(out: Path) -> list[str]:
    """Return the most likely text of the last checkpoint after some words, on all ranks."""
    program = shardir.load(out / "generate", out / "ckpt")
    starts = [f"The {word:4.4}" for word in ("name", "valu", "type", "obje")]
    prompt = torch.tensor([[ord(c) - FIRST for c in start] for start in starts[:BATCH]])
    tokens = list(prompt.split(1, dim=1))
    for i in range(LENGTH - 1):
        logits = program(tokens[i], torch.tensor([i]))
        if i + 1 == len(tokens):
            tokens.append(logits.argmax(-1, keepdim=True))
    return ["".join(chr(t + FIRST) for t in row) for row in torch.cat(tokens, 1).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["write", "evaluate", "generate"])
    parser.add_argument("out", type=Path, help="the folder of data, programs and checkpoints")
    given = parser.parse_args()
    if given.action == "write":
        write(given.out)
    elif given.action == "evaluate":
        print(f"loss {evaluate(given.out):.3f}")
    else:
        for line in generate(given.out):
            if os.environ["RANK"] == "0":
                print(line)


if __name__ == "__main__":
    main()
