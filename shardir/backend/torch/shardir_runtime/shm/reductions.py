"""Reductions of tensors in shared memory, in the order of ranks: all ranks get the same bits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 16
"""The number of elements to reduce at a time: partial sums stay in the cache."""

_ops = dist.ReduceOp

_OF_TWO: dict[Any, Callable[..., Tensor]] = {
    _ops.SUM: torch.add, _ops.AVG: torch.add, _ops.PRODUCT: torch.mul, _ops.MAX: torch.maximum,
    _ops.MIN: torch.minimum, _ops.BAND: torch.bitwise_and, _ops.BOR: torch.bitwise_or,
    _ops.BXOR: torch.bitwise_xor,
}  # fmt: skip
"""The function of two tensors for each reduction. Maxima and minima propagate NaN."""

_WIDE = (_ops.SUM, _ops.AVG, _ops.PRODUCT)


def function_of(op: Any) -> Callable[..., Tensor]:
    """Return the function of two tensors for a reduction.

    Raises:
        ValueError: the reduction is not supported.
    """
    if op not in _OF_TWO:
        known = ", ".join(known.name for known in _OF_TWO)
        raise ValueError(f"shm: expected a reduction of {known}, got {op}; use gloo")
    return _OF_TWO[op]


def reduce(op: Any, operands: Sequence[Tensor], out: Tensor) -> None:
    """Reduce flat tensors of one size and dtype, in their order, into `out`, which may be one of
    the operands. Sums and products of f16 and bf16 accumulate in f32."""
    function = function_of(op)
    wide = out.is_floating_point() and out.element_size() < 4 and op in _WIDE
    for start in range(0, out.numel(), CHUNK):
        into = out[start : start + CHUNK]
        partial, *addends = (x[start : start + CHUNK] for x in operands)
        if wide:
            partial = partial.float()
        for k, x in enumerate(addends[:-1]):
            partial = function(partial, x, out=partial if wide or k else None)
        if addends:
            partial = function(partial, addends[-1], out=partial if wide else into)
        if op == _ops.AVG and addends:
            partial.div_(len(operands))
        if partial is not into:
            into.copy_(partial)
