"""Checkpoints, gradients written by hand, and ops that have no entry in the table: an export runs
through all of them without a trace."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.modules.imported import assert_equal, imported, in_numpy, in_torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardir
from shardir.diagnostics import ShardirError
from shardir.dialects.nn import CustomOp, EinsumOp
from shardir.rewriting.marks import RECOMPUTE


class Layers(nn.Module):
    """Layers in checkpoints, of the reentrant form or not; None: in none."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(2)
        )
        self.first, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)  # the reentrant form needs an input with a gradient
        for layer in self.layers:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return (x * x).sum()


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_checkpoints_are_computed_again(reentrant: bool | None) -> None:
    model = Layers(reentrant)
    found = imported(model, X, mesh="d = 2")
    again = Counter(op.name for op in found.function.block.ops if RECOMPUTE in op.attributes)
    # a layer's result, of the GELU, is used outside, so that it is saved
    once = {"nn.layer_norm": 2, "nn.einsum": 2, "nn.add": 2}
    assert again == ({} if reentrant is None else once)
    assert_equal(in_numpy(found, "train"), in_torch(model, lambda m: m(X)), 1e-4)


def test_a_reentrant_checkpoint_without_a_gradient_trains_nothing_within() -> None:
    """As in torch, which warns of it too."""

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.first, x, use_reentrant=True)).square().sum()

    model = Segments()
    with pytest.warns(UserWarning, match="nothing within is trained; use use_reentrant=False"):
        found = imported(model, X, mesh="d = 2")
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        wanted = in_torch(model, lambda m: m(X))
    values = in_numpy(found, "train")
    assert not values.gradients["first.weight"].any() and values.gradients["head.weight"].any()
    assert_equal(values, wanted, 1e-4)


def test_a_module_within_autocast_is_imported_as_it_runs_there() -> None:
    torch.manual_seed(0)  # of one weight in twenty a gradient is a sum that cancels in bf16
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        found = imported(model, X, loss=loss)
        wanted = in_torch(model, lambda m: loss(m(X)))
    dtypes = {str(op.out.type.element_type) for op in found.function.block.ops
              if isinstance(op, EinsumOp)}  # fmt: skip
    assert dtypes == {"bf16"}
    assert_equal(in_numpy(found), wanted, 2e-2)


class Doubled(torch.autograd.Function):
    """A gradient that does not follow from the forward part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return Doubled.apply(self.linear(x)).sum()


def test_gradients_written_by_hand_are_refused() -> None:
    assert shardir.compile(ByHand(), X, train=False).text.count("nn.exp") == 1
    shardir.compile(ByHand(), X, optimizer="sgd, lr = 0.1", mesh="d = 1", derived=["Doubled"])
    with pytest.raises(ShardirError, match=r"autograd function Doubled.* at .*test_regions\.py:\d"):
        shardir.compile(ByHand(), X, optimizer="sgd, lr = 0.1")


class Rare(nn.Module):
    """Ops of ATen that have no entry in the table and no decomposition into ops that have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        largest, where = torch.cummax(h, 1)
        h = torch.special.i0e(h) + largest * where + torch.special.i1e(h).bfloat16()
        return h.sum() + torch.linalg.pinv(h.T @ h + torch.eye(4)).sum()


def test_rare_ops_are_those_of_torch() -> None:
    torch.manual_seed(0)
    model = Rare()
    found = imported(model, X, mesh="d = 2")
    called = {op.callee.data for op in found.function.block.ops if isinstance(op, CustomOp)}
    assert "aten.special_i0e.default" in called
    wanted = in_torch(model, lambda m: m(X))
    assert_equal(in_numpy(found), wanted, 1e-4)
    with pytest.warns(UserWarning, match='for the op "aten.special_i0e.default"'):
        assert_equal(in_numpy(found, "train"), wanted, 1e-4)
