"""Tensor ops of an emitted program that write into the memory of `into`: a tensor without elements,
or the result of the last call."""

from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(like: Tensor, shape: Sequence[int], into: Tensor | None) -> Tensor:
    """Return zeros with the type of `like`."""
    if into is None:
        return like.new_zeros(shape)
    return torch.zeros(shape, dtype=into.dtype, device=into.device, out=into)


def contiguous(x: Tensor, into: Tensor) -> Tensor:
    """Return a row-major copy of x."""
    return into.resize_(x.shape).copy_(x)


def converted(x: Tensor, into: Tensor) -> Tensor:
    """Convert x to the type of `into`, with the strides of torch's own conversion."""
    if into.shape != x.shape:
        like = torch.empty_like(x, device="meta")
        into.as_strided_(like.shape, like.stride())
    return into.copy_(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor) -> Tensor:
    """F.linear, as torch computes it."""
    if bias is None:
        return torch.matmul(x, weight.mT, out=into)
    if x.dim() > 2 and not x.is_contiguous():
        return torch.matmul(x, weight.mT, out=into).add_(bias)
    torch.addmm(bias, x.flatten(0, -2), weight.mT, out=into)
    return into.view(*x.shape[:-1], weight.shape[0])


def embedding(ids: Tensor, table: Tensor, into: Tensor) -> Tensor:
    """Return the rows of the table at the indices."""
    found = torch.index_select(table, 0, ids.reshape(-1), out=into)
    return found.view(*ids.shape, table.shape[1])
