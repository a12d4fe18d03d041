"""Modules whose weights are frozen but for adapters (LoRA): frozen weights are split as those that
are trained, whose gradients are torch's."""

from typing import Any

import pytest
import torch
from support.modules.imported import assert_equal, imported, in_numpy, in_torch
from support.modules.zoo import PLANS
from torch import nn

import shardir

WORDS, WIDTH, RANK = 32, 16, 4
TOKENS, LABELS = torch.randint(WORDS, (8, 6)), torch.randint(WORDS, (8, 6))


class Adapted(nn.Module):
    """A frozen linear layer, and two narrow ones beside it that are trained."""

    def __init__(self, n: int, m: int):
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(False)
        self.a, self.b = nn.Linear(n, RANK, bias=False), nn.Linear(RANK, m, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up, self.down = Adapted(WIDTH, 4 * WIDTH), Adapted(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between a table and a head that are frozen; a buffer is added and another one
    multiplies, as positions do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)
        self.register_buffer("positions", torch.randn(6, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.table(tokens) + self.positions))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compiled(model: nn.Module, plan: str) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return shardir.compile(
        model, TOKENS, labels=LABELS, loss=loss, optimizer=torch.optim.AdamW(trained, lr=0.01),
        mesh="dp = 2, tp = 2", plan=plan,
    )  # fmt: skip


@pytest.mark.parametrize("plan", ["fsdp", "megatron"])
def test_gradients_of_adapters_are_those_of_torch(plan: str) -> None:
    model = Net().double()
    found = imported(model, TOKENS, LABELS, loss, mesh="dp = 2, tp = 2")
    wanted = in_torch(model, lambda m: loss(m(TOKENS), LABELS))
    assert len(wanted.gradients) > len(in_numpy(found).gradients) == 8
    assert_equal(in_numpy(found, *PLANS[plan]), wanted, 1e-9)


@pytest.mark.parametrize(
    ("plan", "lines"),
    [
        (
            "fsdp",
            {
                '"table.weight" : [{dp, tp}], uses [], recompute',
                '"blocks.*.up.base.weight" : [{dp, tp}], uses [], recompute',
                '"head.weight" : [{dp, tp}], uses [], recompute',
            },
        ),
        (
            "megatron(tp) * ddp(dp)",
            {
                '"table.weight" : [{tp}]',
                '"blocks.*.up.base.{weight,bias}" : [{tp}]',
                '"blocks.*.down.base.weight" : [{}, {tp}]',
                '"head.weight" : [{tp}]',
            },
        ),
    ],
)
def test_frozen_weights_are_split(plan: str, lines: set[str]) -> None:
    found = compiled(Net(), plan).plan.splitlines()
    assert lines <= {*found}
    assert not any(line.startswith('"positions"') for line in found)
