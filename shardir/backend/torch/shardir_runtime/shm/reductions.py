"""Reductions of tensors in shared memory, in the order of ranks: they have the same bits on all."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 16
"""The elements that are reduced at once: partial sums stay in the cache."""

_ops = dist.ReduceOp

_OF_TWO: dict[Any, Callable[..., Tensor]] = {
    _ops.SUM: torch.add, _ops.AVG: torch.add, _ops.PRODUCT: torch.mul, _ops.MAX: torch.maximum,
    _ops.MIN: torch.minimum, _ops.BAND: torch.bitwise_and, _ops.BOR: torch.bitwise_or,
    _ops.BXOR: torch.bitwise_xor,
}  # fmt: skip
"""By reduction. A NaN is the maximum and the minimum."""

_WIDE = (_ops.SUM, _ops.AVG, _ops.PRODUCT)


def function_of(op: Any) -> Callable[..., Tensor]:
    """Return the function of two tensors.

    Raises:
        ValueError: there is none.
    """
    if op not in _OF_TWO:
        known = ", ".join(known.name for known in _OF_TWO)
        raise ValueError(f"shm: expected a reduction of {known}, got {op}; use gloo")
    return _OF_TWO[op]


def reduce(op: Any, operands: Sequence[Tensor], out: Tensor) -> None:
    """Reduce flat tensors of one size and dtype, in their order, into `out`, which may be one of
    them. Sums and products of floats shorter than f32 are made in f32."""
    function = function_of(op)
    wide = out.is_floating_point() and out.element_size() < 4 and op in _WIDE
    for start in range(0, out.numel(), CHUNK):
        into = out[start : start + CHUNK]
        partial, *rest = (x[start : start + CHUNK] for x in operands)
        if wide:
            partial = partial.float()
        for k, x in enumerate(rest[:-1]):
            partial = function(partial, x, out=partial if wide or k else None)
        if rest:
            partial = function(partial, rest[-1], out=partial if wide else into)
        if op == _ops.AVG and rest:
            partial.div_(len(operands))
        if partial is not into:
            into.copy_(partial)
