"""The value that a broadcast repeats: its operand, where that is smaller than the result."""

from dataclasses import replace
from math import prod

from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout
from shardir.dialects.nn.properties import dims_of
from shardir.dialects.nn.shape import BroadcastOp
from shardir.dialects.nn.types import unsharded_type

RepeatedDims = tuple[int, ...]
"""Of each dimension of an operand that of the result, -1 if it is repeated along it too."""


def repeated(v: SSAValue) -> tuple[SSAValue, RepeatedDims] | None:
    """Return the value that a broadcast's result repeats; None for other values."""
    if not isinstance(op := v.owner, BroadcastOp):
        return None
    small, shape = unsharded_type(op.x).get_shape(), unsharded_type(v).get_shape()
    if prod(small) >= prod(shape):
        return None
    dims = dims_of(op.properties, "dims", len(shape))
    return op.x, tuple([d if n == shape[d] else -1 for d, n in zip(dims, small, strict=True)])


def repeated_layout(layout: Layout, dims: RepeatedDims) -> Layout:
    """Return the layout of what is repeated, from that of the result."""
    return replace(layout, dims=tuple([layout.dims[d] if d >= 0 else () for d in dims]))
