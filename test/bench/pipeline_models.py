"""The models of pipeline_step.py: a GPT, and stages whose parts sleep."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, BATCH, SEQ, HIDDEN, HEADS, VOCAB, LR = 8, 8, 128, 512, 8, 2048, 1e-3
"""BATCH is the number of microbatches too, of one sample each."""


def resize(hidden: int, seq: int, vocab: int, layers: int) -> None:
    """Let models made from now on have these sizes."""
    globals().update(HIDDEN=hidden, SEQ=seq, VOCAB=vocab, LAYERS=layers)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).split(HIDDEN, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Part(nn.Module):
    """Some layers of the GPT, with the embeddings before the first ones and the head after the
    last ones."""

    def __init__(
        self, layers: Sequence[nn.Module], first: nn.Module | None, last: nn.Module | None
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.first, self.last = first, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.last is None else self.last(x)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) + self.positions(torch.arange(SEQ))


def gpt(stages: int = 1) -> list[Part]:
    """Return the parts of the GPT, with the same parameters for any number of stages."""
    torch.manual_seed(0)
    first, layers = Embeddings(), [Layer() for _ in range(LAYERS)]
    last = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False))
    each = LAYERS // stages
    return [
        Part(
            layers[i * each : (i + 1) * each],
            first if i == 0 else None,
            last if i == stages - 1 else None,
        )
        for i in range(stages)
    ]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, VOCAB, (BATCH, SEQ), generator=g) for _ in range(2))
    return tokens, targets


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def nearly(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The output of a stage that sleeps, ours and torch's: `x` [1, SEQ, HIDDEN] plus a product of
    its first column with `w` [1, HIDDEN], so that the gradient of a weight is a product too, which
    can wait, and takes next to no time."""
    return x + x[..., :1] @ w


class Slight(nn.Module):
    """A stage whose parts take next to no time."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nearly(x, self.w)


class Slights(nn.Module):
    """Such stages, of activations of the size of the GPT's; the first adds a parameter, whose
    gradient all stages wait for."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(HIDDEN))
        self.layers = nn.ModuleList(Slight() for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.offset
        for layer in self.layers:
            x = layer(x)
        return x
