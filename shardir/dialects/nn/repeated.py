"""The operand of a broadcast that repeats it."""

from dataclasses import replace
from math import prod

from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout
from shardir.dialects.nn.properties import dims_of
from shardir.dialects.nn.shape import BroadcastOp
from shardir.dialects.nn.types import unsharded_type

RepeatedDims = tuple[int, ...]
"""The dimension of the result for each dimension of the operand; -1 if its size 1 is repeated."""


def repeated(v: SSAValue) -> tuple[SSAValue, RepeatedDims] | None:
    """Return the operand of the broadcast that makes a value, and its dimensions in the result;
    None for other values, and if nothing is repeated."""
    if not isinstance(op := v.owner, BroadcastOp):
        return None
    small, shape = unsharded_type(op.x).get_shape(), unsharded_type(v).get_shape()
    if prod(small) >= prod(shape):
        return None
    dims = dims_of(op.properties, "dims", len(shape))
    return op.x, tuple([d if n == shape[d] else -1 for d, n in zip(dims, small, strict=True)])


def repeated_layout(layout: Layout, dims: RepeatedDims) -> Layout:
    """Return the operand's layout from the result's."""
    return replace(layout, dims=tuple([layout.dims[d] if d >= 0 else () for d in dims]))
