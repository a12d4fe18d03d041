"""Attention of an emitted program, where torch's own call has no argument for it. Copied beside
every program; needs only torch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def causal(q: Tensor, k: Tensor, start: int, mask: Tensor | None = None) -> Tensor:
    """The mask of the keys that each row of q, the first with index `start`, attends to: those up
    to its index that `mask` allows (bool), or the sum of both masks."""
    rows = torch.arange(start, start + q.shape[-2], device=q.device)
    allowed = torch.arange(k.shape[-2], device=q.device) <= rows.unsqueeze(-1)
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.where(allowed, float("-inf"))


def backward(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The cotangents of q, k and v; the forward part is recomputed."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return torch.autograd.grad(out, (q, k, v), dy)
