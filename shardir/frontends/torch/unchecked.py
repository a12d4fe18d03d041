"""Functions of torch.nn.functional that raise by the values of tensors, without that: an export has
no values."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn import functional as F


@contextmanager
def unchecked() -> Iterator[None]:
    """A context of an export in which these functions do not look at values."""
    with patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss):
        yield


def _gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float, full: bool = False,
    eps: float = 1e-6, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """torch's, for variances that are not negative: as there, no gradient is lost below `eps`."""
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    losses = losses + 0.5 * math.log(2 * math.pi) if full else losses
    return losses if reduction == "none" else getattr(losses, reduction)()
