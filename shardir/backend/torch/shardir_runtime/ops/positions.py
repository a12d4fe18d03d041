"""Positions in an emitted program: rotary embeddings and sinusoids."""

import torch
from torch import Tensor


def _angles(positions: Tensor, pairs: Tensor, d: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return [.., pairs], each position times the frequencies of these pairs of d numbers: in f32,
    or in f64 for f64."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = (base ** (-2.0 * pairs.double() / d)).to(dtype)
    return positions.unsqueeze(-1).to(dtype) * frequencies


def rotary(
    x: Tensor, positions: Tensor, base: float, interleaved: bool = False, reverse: bool = False
) -> Tensor:
    """Turn each pair of the last dimension by its frequency times the row's position."""
    d = x.shape[-1]
    turn = _angles(positions, torch.arange(d // 2, device=x.device), d, base, x.dtype)
    cos, sin = turn.cos(), turn.sin() * (-1.0 if reverse else 1.0)
    pairs = x.unflatten(-1, (d // 2, 2) if interleaved else (2, d // 2)).to(turn.dtype)
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], axis).flatten(-2).to(x.dtype)


def sinusoid(
    positions: Tensor, first: int, rows: int, d: int, base: float, dtype: torch.dtype,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Return `rows` columns, from `first` on, of the d sines and cosines of each position."""
    column = torch.arange(first, first + rows, device=positions.device)
    pair, second = (column // 2, column % 2) if interleaved else (
        column % (d // 2), column // (d // 2)
    )  # fmt: skip
    turn = _angles(positions, pair, d, base, dtype)
    return torch.where(second == 1, turn.cos(), turn.sin()).to(dtype)
