"""The modules of torch of which figures.py draws programs and runs."""

from typing import Any

import torch
from torch import nn

import shardir


def perceptron(plan: str, mesh: str = "dp = 2, tp = 2") -> tuple[nn.Module, Any, Any, Any]:
    """Return two linear layers, inputs and labels, and their program by a plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    x, labels = torch.randn(128, 64), torch.randint(10, (128,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, x, labels, shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, optimizer=optimizer, mesh=mesh,
        plan=plan,
    )  # fmt: skip


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, width // 128, 128).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self, layers: int, width: int, vocabulary: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*[Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.table(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt() -> tuple[Any, Any]:
    """Return a GPT of 1.3 billion parameters on the meta device, and its inputs."""
    with torch.device("meta"):
        model = Gpt(24, 2048, 50304)
        tokens = torch.zeros(32, 2048, dtype=torch.int64)
    return model, (tokens, tokens)
