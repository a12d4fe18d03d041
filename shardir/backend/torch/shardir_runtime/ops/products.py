"""Large matrix products in f32, by oneDNN where it is faster than torch's default library.

On AMD processors torch uses MKL, which has no AVX-512 kernels for them; oneDNN, which torch also
includes, has. The choice depends on the processor and on strides alone, so that a run is
reproducible bit by bit.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import memory


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """F.linear: the product of x [..., k] and the transpose of `weight` [n, k], plus `bias` [n]."""
    if _is_by_onednn(x, weight):
        bias = bias if bias is None else bias.contiguous()  # the kernel ignores its strides
        made = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return made if into is None else memory.contiguous(made, into)
    if into is None:
        return F.linear(x, weight, bias)
    return memory.linear(x, weight, bias, into)


def _is_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes a product: it needs contiguous rows or columns that do not overlap,
    and at least one term in each sum. torch.compile has kernels of its own."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not onednn_is_faster():
        return False
    (rows, columns), (row, column) = weight.shape, weight.stride()
    return columns > 0 and ((column == 1 and row >= columns) or (row == 1 and column >= rows))


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN's products are faster than torch's default on this processor."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.cpu.get_capabilities()["cpu_name"].startswith("AMD")
    )
