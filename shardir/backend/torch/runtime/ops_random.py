"""Random tensor ops of an emitted program. Copied beside every program; needs only torch.

An element depends on the key, the stream and its index in the global tensor alone, so that it is
equal on every mesh, and when it is recomputed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import runtime_random
import torch
from torch import Tensor

Bounds = Sequence[tuple[int, int]]
"""The rows [start, stop) of each dimension that this rank holds."""


def draw(
    kind: str, params: Mapping[str, Any], shape: Sequence[int], part: Bounds, key: Tensor,
    stream: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """This rank's part of a tensor of random numbers of this (global) shape."""
    seed = runtime_random.seed_at(key, stream)
    return runtime_random.fill(kind, params, shape, part, seed, dtype)


def dropout(
    x: Tensor, p: float, shape: Sequence[int], part: Bounds, key: Tensor, stream: int
) -> Tensor:
    """x / (1 - p), but zeros at a fraction p of the elements."""
    if p == 1:
        return x * 0.0
    seed = runtime_random.seed_at(key, stream)
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    flat = mask.view(-1)
    for begin, end, index in runtime_random.runs(shape, part, x.device):
        flat[begin:end] = runtime_random.kept(p, seed, index)
    return (x * mask).mul_(1 / (1 - p))
