"""Text that a trainer generates, equal to a loop in torch on one device."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import shardir
from shardir import Inference, ShardirError, Step

BATCH, LENGTH, WORDS = 4, 8, 12


class Causal(nn.Module):
    """A layer of causal attention between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(WORDS, 16), nn.Linear(16, 48)
        self.positions, self.head = nn.Embedding(LENGTH, 16), nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))


def loss(model: Causal, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def logits(model: Causal, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens)


def small() -> tuple[Causal, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Causal().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def text_of(model: Causal, prompt: torch.Tensor, count: int, temperature: float, top_k: int) -> Any:
    """The tokens by torch: only those that are there are passed, without zeros after them."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        with torch.no_grad():
            last = model(prompt[:, -LENGTH:])[:, -1]
        if temperature:
            shares = torch.zeros_like(last)
            values, places = last.topk(top_k)
            shares.scatter_(-1, places, (values / temperature).softmax(-1))
            token = torch.multinomial(shares, 1, generator=generator)
        else:
            token = last.argmax(-1, keepdim=True)
        prompt = torch.cat([prompt, token], 1)
    return prompt


@pytest.mark.parametrize(
    ("mesh", "plan"), [("tp = 2", "megatron(tp)"), ("dp = 2, tp = 2", "inputs : [{dp}, {tp}]")]
)
def test_text_is_that_of_torch(mesh: str, plan: str) -> None:
    """From prompts that are shorter and longer than the function's, while the model trains; where
    the logits are split by samples, by words, and by positions."""
    (model, optimizer), (eager, of_eager) = small(), small()
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    program = shardir.compile(model, mesh=mesh, plan=plan, steps={
        "train": Step(loss, tokens, optimizer=optimizer),
        "logits": Inference(logits, tokens),
    })  # fmt: skip
    if "inputs" in plan:
        assert "return %head : tensor<2x4x12xf64" in program.text
    with program.ranks() as trainer:
        for _ in range(2):
            expected = loss(eager, tokens)
            of_eager.zero_grad()
            expected.backward()
            of_eager.step()
            assert trainer.step(tokens).item() == pytest.approx(expected.item(), rel=1e-12)
            for prompt in (tokens[:, :3], torch.cat([tokens, tokens[:, :2]], 1)):
                greedy = trainer.generate(prompt, 6)
                assert torch.equal(greedy, text_of(eager, prompt, 6, 0.0, 0))
                drawn = trainer.generate(prompt, 6, temperature=1.5, top_k=5, seed=7)
                assert torch.equal(drawn, text_of(eager, prompt, 6, 1.5, 5))
        for arguments, message in [
            ((tokens[:2], 3), "expected tokens of [4, P] of integers, P of at least 1, got [2, 8]"),
            ((tokens.double(), 3), "got [4, 8] and torch.float64"),
            ((tokens, -1), "expected a number of new tokens of at least 0, got -1"),
        ]:
            with pytest.raises(ShardirError) as error:
                trainer.generate(*arguments)
            assert message in str(error.value)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"temperature": -1}, "expected a temperature of at least 0, got -1"),
            ({"top_k": 3}, "top_k=3: expected a temperature above 0"),
            ({"temperature": 1, "top_k": 0}, "expected a number of tokens of at least 1"),
            ({"function": "train"}, "expected a function of logits, got 'train'"),
            ({"ema": True}, "expected a program with moving averages"),
        ]
        for options, message in wrong:
            with pytest.raises(ShardirError) as error:
                trainer.generate(tokens, 3, **options)
            assert message in str(error.value)
        assert torch.equal(trainer.generate(tokens, 0), tokens)
