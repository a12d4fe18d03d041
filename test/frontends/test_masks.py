"""Masks and positions that a module computes from indices alone."""

from collections.abc import Callable

import pytest
import torch
from support.extent import extent
from support.modules.imported import assert_equal, imported, in_numpy, in_torch
from torch import Tensor, nn

from shardir.dialects.nn import AttentionOp, IotaOp, TensorOp

N = 6


def causal(x: Tensor) -> Tensor:
    """As transformers has it: positions of packed sequences, read by index."""
    at = torch.arange(N)[None].expand(len(x), -1)
    first = torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1
    of = first.cumsum(-1)
    batch = torch.arange(len(x))[:, None, None, None]
    q, k = torch.arange(N)[None, None, :, None], torch.arange(N)[None, None, None]
    return (at[batch, k] <= at[batch, q]) & (of[batch, q] == of[batch, k])


def triangle(x: Tensor) -> Tensor:
    return torch.arange(N)[None] < torch.arange(N)[:, None] + 1


def everywhere(x: Tensor) -> Tensor:
    return torch.ones(len(x), 1, N, N, dtype=torch.bool) & (torch.arange(N) < N)


def window(x: Tensor) -> Tensor:
    far = torch.arange(N)[:, None] - torch.arange(N)
    return (far >= 0) & (far < 3)


def strict(x: Tensor) -> Tensor:
    return torch.arange(N) < torch.arange(N)[:, None]


def transposed(x: Tensor) -> Tensor:
    return torch.arange(N) >= torch.arange(N)[:, None]


def of_first_key(x: Tensor) -> Tensor:
    return torch.arange(N)[None] <= 0


def of_data(x: Tensor) -> Tensor:
    return (torch.arange(N) <= torch.arange(N)[:, None]) & (x[:, None, None, :, 0] > -9)


class Attention(nn.Module):
    """Attention with a mask of its own."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return out.square().sum()


MASKS = [
    (causal, True, False, 0), (window, False, True, 9), (of_data, False, True, 12),
    (triangle, True, False, 0), (everywhere, False, False, 0), (strict, False, True, 3),
    (transposed, False, True, 3), (of_first_key, False, True, 3),
]  # fmt: skip
"""Masks, each with whether attention becomes causal, whether a mask is left, and in how many ops at
most."""


@pytest.mark.parametrize(("mask", "marked", "left", "most"), extent(MASKS[:2], MASKS))
def test_masks_of_positions(
    mask: Callable[[Tensor], Tensor], marked: bool, left: bool, most: int
) -> None:
    """Causal is what is the lower triangle, and nothing else; the ops of other masks are few."""
    model, x = Attention(mask), torch.randn(4, N, 8, generator=torch.Generator().manual_seed(0))
    found = imported(model, x, mesh="d = 2")
    ops = [op for op in found.function.block.ops if isinstance(op, TensorOp)]
    (attention,) = (op for op in ops if isinstance(op, AttentionOp))
    assert (attention.causal is not None, attention.mask is not None) == (marked, left)
    assert sum(str(op.results[0].type).endswith(("i1>", "i64>")) for op in ops) <= most
    assert_equal(in_numpy(found, "train", "fsdp"), in_torch(model, lambda m: m(x)), 1e-4)


class Positions(nn.Module):
    """A table of positions, whose indices are computed in several ops."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N + 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.ones(len(x), N, dtype=torch.long).cumsum(1)
        return (x * self.table(torch.cat([at[:, :1], at[:, 1:]], 1) + 1)).sum()


def test_positions_are_few_ops() -> None:
    model, x = Positions(), torch.randn(4, N, 8)
    found = imported(model, x)
    ops = [op for op in found.function.block.ops if isinstance(op, TensorOp)]
    assert [op.name for op in ops if str(op.results[0].type).endswith("i64>")] == [
        "nn.iota", "nn.constant", "nn.add"]  # fmt: skip
    assert isinstance(ops[0], IotaOp)
    assert_equal(in_numpy(found), in_torch(model, lambda m: m(x)), 1e-4)
