"""Presets of modules of torch: bytes against formulas, where a module merges what is split."""

from math import prod

import pytest
import torch
from torch import nn

import shardir
from shardir.cost import report

BATCH, ROWS, WIDTH, HEADS = 8, 64, 16, 4


class Fused(nn.Module):
    """An attention whose queries, keys and values are one product, as GPT-2 has it."""

    def __init__(self, values: int):
        super().__init__()
        self.sizes = [WIDTH, values, values]
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.qkv(x.view(-1, WIDTH)).view(*x.shape[:-1], -1).split(self.sizes, dim=-1)
        q, k, v = (y.view(*x.shape[:-1], -1, WIDTH // HEADS).transpose(1, 2) for y in given)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def packed() -> nn.Module:
    """torch's own, which merges samples and heads into one batch of the attention."""
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)


def received(model: nn.Module, plan: str, devices: int) -> int:
    """The bytes that a device receives in a step."""
    made = shardir.compile(
        model, torch.zeros(BATCH, ROWS, WIDTH), loss=lambda y: y.square().mean(),
        optimizer="sgd, lr = 0.1", mesh={"a": devices}, plan=plan,
    )  # fmt: skip
    (cost,) = report(made.module)
    return sum(bytes for bytes, _ in cost.communication.values())


def test_samples_stay_split_where_a_module_merges_them() -> None:
    """Gradients and the loss alone are communicated: 2 (n - 1) / n of their bytes."""
    model = packed()
    numbers = 1 + sum(p.numel() for p in model.parameters())
    assert received(model, "ddp", 2) == 4 * numbers


@pytest.mark.parametrize(
    ("model", "cut", "reductions"),
    [
        (packed(), 3 * WIDTH, 3),  # the inputs need no gradient
        (Fused(WIDTH), 3 * WIDTH, 1),
        (Fused(WIDTH // 2), 2 * WIDTH, 1),
    ],
    ids=["packed", "queries, keys and values", "shared keys and values"],
)
def test_heads_stay_split_where_one_product_makes_them(
    model: nn.Module, cut: int, reductions: int
) -> None:
    """Megatron's all-reduces, of an activation each, of 2 (n - 1) / n of its bytes. In addition
    parts of the weight and of its gradient, of (n - 1) / n^2 of their bytes, and of the gradient of
    the bias, of (n - 1) / n."""
    n = 2
    activation = 4 * prod((BATCH, ROWS, WIDTH))
    weights = 2 * 4 * cut * WIDTH * (n - 1) // n**2 + 4 * cut * (n - 1) // n
    found = received(model, "megatron", n)
    assert found == reductions * 2 * activation * (n - 1) // n + weights
