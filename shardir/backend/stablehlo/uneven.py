"""Ops on uneven shards, whose blocks end with padding on some partitions.

    nn.exp      (i) -> (i)              padding becomes padding: along a factor of the result an
                                        element depends on elements at its own index
    nn.matmul   (i, k), (k, j) -> (i, j)    along k, which is summed, padding becomes 0 before
    nn.sort     replicate i             never split

An op that reads elements of other indices (slices, windows), and sums of which nobody has said what
their padding must be, are refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.ir import Operation

from shardir.algebra.slices import SlicedDim
from shardir.backend.stablehlo.functions import lowest
from shardir.backend.stablehlo.place import PartitionPlace
from shardir.backend.stablehlo.traced import TracedArray, UnevenShards
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp


def _of_reduction(op: nn.ReduceOp, element: str) -> Any:
    match op.kind.data:
        case "max" | "any":
            return lowest(element, -1)
        case "min" | "all":
            return lowest(element, 1)
        case _:
            return 0


def _zero(op: Operation, element: str) -> Any:
    return 0


NEUTRAL: dict[type[Operation], Callable[..., Any]] = {
    nn.ReduceOp: _of_reduction,
    nn.MatmulOp: _zero,
    nn.EinsumOp: _zero,
    nn.ConvOp: _zero,
    nn.ConvTransposeOp: _zero,
    nn.ConvWeightOp: _zero,
    nn.LayerNormGradOp: _zero,
    nn.RmsNormGradOp: _zero,
    nn.AttentionGradOp: _zero,
    nn.GatherGradOp: _zero,
    nn.ScatterAddOp: _zero,
    nn.UnfoldOp: lambda op, element: 0 if op.lowest is None else lowest(element, -1),
    nn.FoldOp: _zero,
    nn.GatherOp: _zero,
    nn.PickOp: _zero,
    nn.TakeAlongAxisOp: _zero,
    nn.SliceOp: _zero,
}
"""Ops that reduce over factors, or have windows along them, with the number that adds nothing in
all their operands at once, from the op and the element type."""


def masked_operands(
    p: PartitionPlace, op: TensorOp, operands: Sequence[TracedArray], has_entry: bool
) -> list[TracedArray]:
    """Return the operands as an op can read them: padding over which it reduces is neutral.

    Args:
        has_entry: whether the op is written by an entry in ops/.

    Raises:
        UnevenShards: the op mixes padding into elements.
    """
    values = (*op.operands, *op.results)
    uneven = [p.uneven_dims(v) for v in values]
    if not any(uneven):
        return [*operands]
    factors = op.factors(p.mesh)
    masked, n = [*operands], len(operands)
    for i, (v, dims, ds) in enumerate(
        zip(values, (*factors.operands, *factors.results), uneven, strict=True)
    ):
        what = f"operand {i}" if i < n else f"result {i - n}"
        summed = []
        for d in ds:
            dim = dims[d]
            f = dim[0] if len(dim) == 1 and not isinstance(dim, SlicedDim) else None
            is_moved = f in factors.moved and (i < n or not has_entry)
            if f is None or is_moved or (f in factors.sliding and type(op) not in NEUTRAL):
                raise UnevenShards(f"dimension {d} of {what}, whose elements it moves")
            if i < n and f in factors.reduced | factors.sliding:
                summed.append(d)
        if not summed:
            continue
        if type(op) not in NEUTRAL:
            raise UnevenShards(f"dimension {summed[0]} of {what}, over which it reduces")
        x = masked[i]
        masked[i] = p.masked(x, v, summed, NEUTRAL[type(op)](op, x.element))
    return masked
