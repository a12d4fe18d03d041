"""Recurrent networks, against torch: all forms of their modules, forward and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extent import extent
from support.modules.imported import assert_equal, imported, in_numpy, in_torch
from torch import nn

from shardir.dialects.nn import CustomOp, DropoutOp

STEPS, BATCH, WIDTH, HIDDEN = 3, 2, 4, 6

FORMS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 4}),
    (nn.LSTM, {"num_layers": 2, "bias": False}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"bias": False, "batch_first": True}),
    (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    (nn.RNN, {"num_layers": 2}),
]


class Sum(nn.Module):
    """A scalar of all results of a network, each element with a weight of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *given: Any) -> torch.Tensor:
        found = self.network(*given)
        results = [found] if isinstance(found, torch.Tensor) else [found[0], *_flat(found[1:])]
        sums = [(r * torch.arange(r.numel()).reshape(r.shape)).sum() for r in results]
        return torch.stack(sums).sum()


def _flat(tree: Any) -> list[torch.Tensor]:
    return [tree] if isinstance(tree, torch.Tensor) else [x for part in tree for x in _flat(part)]


def compare(model: nn.Module, *given: Any) -> None:
    found = imported(model, given)
    assert not any(isinstance(op, CustomOp) for op in found.function.block.ops)
    assert_equal(in_numpy(found), in_torch(model, lambda m: m(*given)), 1e-9)


@pytest.mark.parametrize(("kind", "options"), extent([FORMS[1], FORMS[5]], FORMS))
def test_networks(kind: Callable[..., nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = kind(WIDTH, HIDDEN, **options).double()
    first = options.get("batch_first", False)
    x = torch.randn(*((BATCH, STEPS) if first else (STEPS, BATCH)), WIDTH, dtype=torch.float64)
    compare(Sum(network), x)
    rows = network.num_layers * (1 + network.bidirectional)
    hidden = torch.randn(rows, BATCH, network.proj_size or HIDDEN, dtype=torch.float64)
    memory = torch.randn(rows, BATCH, HIDDEN, dtype=torch.float64)
    compare(Sum(network), x, (hidden, memory) if kind is nn.LSTM else hidden)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind: Callable[..., nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    compare(Sum(kind(WIDTH, HIDDEN).double()), torch.randn(BATCH, WIDTH, dtype=torch.float64))


def test_layers_have_dropout_between_them() -> None:
    """torch's decomposition leaves it out; torch's own kernel, which trains, has it."""
    model = Sum(nn.LSTM(WIDTH, HIDDEN, num_layers=3, dropout=0.5))
    x = torch.randn(STEPS, BATCH, WIDTH)
    for train, count in ((True, 2), (False, 0)):
        ops = imported(model.train(train), (x,)).function.block.ops
        assert sum(isinstance(op, DropoutOp) for op in ops) == count
