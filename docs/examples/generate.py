"""Text from a GPT on several ranks, token by token, with a key-value cache.

    python docs/examples/generate.py out                               # compile and save
    torchrun --nproc-per-node 4 docs/examples/generate.py out          # generate, on all ranks

The keys and values of each layer are buffers of the module, which its forward part changes. So they
are states of the program: the heads are split over tp, as the columns of the layers are, the
samples over dp. Each token is one call, in which the ranks exchange two all-reduces a layer.
"""

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardir

BATCH, LENGTH, WORDS = 4, 32, 96


class Attention(nn.Module):
    """Attention of new tokens to all before them. A cache retains keys and values; without one all
    tokens are new."""

    def __init__(self, width: int, heads: int, cache: bool):
        super().__init__()
        self.heads, self.size, self.cache = heads, width // heads, cache
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        for name in ("keys", "values") if cache else ():
            self.register_buffer(name, torch.zeros(BATCH, heads, LENGTH, self.size))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, self.size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.cache:
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
            k, v = self.keys, self.values
        seen = torch.arange(LENGTH) <= position[:, None]
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, cache: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, cache)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), position)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The logits of the next token. position: [tokens], of the tokens that are given."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, cache: bool = True):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads, cache) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def hidden(self, tokens: Tensor, position: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(position)
        for layer in self.layers:
            x = layer(x, position)
        return x

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(tokens, position)[:, -1]))


def example() -> tuple[Tensor, Tensor]:
    """A token of each sample, and its position."""
    return torch.zeros(BATCH, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)


def save(directory: str) -> None:
    """Compile the model for four ranks; its weights are written beside the program."""
    torch.manual_seed(0)
    model, plan = GPT().eval(), "megatron(tp) * ddp(dp)"
    program = shardir.compile(model, example(), mesh="dp = 2, tp = 2", plan=plan, train=False)
    program.save(directory)


def generate(model: Callable[[Tensor, Tensor], Tensor], count: int) -> Tensor:
    """The most likely tokens after the first ones, [samples, count]. `model` may be the module, or
    the program: they are called in the same way."""
    tokens = [torch.arange(BATCH)[:, None]]
    for i in range(count):
        logits = model(tokens[-1], torch.tensor([i]))
        tokens.append(logits.argmax(-1, keepdim=True))
    return torch.cat(tokens[1:], dim=1)


def main() -> None:
    directory = sys.argv[1]
    if "RANK" not in os.environ:
        save(directory)
        return
    text = generate(shardir.load(directory), 20)
    if os.environ["RANK"] == "0":
        for sample in text.tolist():
            print(*sample)


if __name__ == "__main__":
    main()
