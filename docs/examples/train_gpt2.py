"""Train a small GPT-2 of transformers on the text of Python's reference, on 4 ranks.

    pip install 'shardir[torch]' transformers
    python docs/examples/train_gpt2.py --steps 300

docs/start/tutorial.md explains it.
"""

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardir

ROWS, LENGTH = 32, 32
"""The sequences of a batch, and their bytes."""

TEXT = " ".join(" ".join(topics.values()).split()).encode("ascii", "ignore")


def batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of sequences from random places of the text; a token is a byte."""
    data = torch.tensor(list(TEXT))
    for _ in range(count):
        places = torch.randint(len(data) - LENGTH, (ROWS,)).tolist()
        ids = torch.stack([data[i : i + LENGTH] for i in places])
        yield {"input_ids": ids, "labels": ids}


def main(steps: int, plan: str) -> list[float]:
    """Train, print the plan, the losses and a sentence, and return the losses."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
                   bos_token_id=0, eos_token_id=0, use_cache=False)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    program = shardir.compile(
        model, next(batches(1)), optimizer=optimizer, mesh="dp = 2, tp = 2", plan=plan
    )
    report = program.run(batches(steps), steps=steps)
    model.load_state_dict(program.state_dict())

    print(program.plan)
    losses = report.losses["step"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps on {report.ranks} ranks")
    start = torch.tensor([list(b"The ")])
    model.eval()
    (tokens,) = model.generate(
        start, max_length=LENGTH, do_sample=True, top_k=5, pad_token_id=0, use_cache=False
    ).tolist()
    print(repr(bytes(tokens).decode("ascii", "replace")))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on 4 local ranks.")
    parser.add_argument("--steps", type=int, default=300, help="training steps (300)")
    parser.add_argument("--plan", default="megatron(tp) * fsdp(dp)", help="a plan or presets")
    given = parser.parse_args()
    main(given.steps, given.plan)
