"""Ops that move elements along a dimension, which is unsharded in the operand.

If the result is split along the dimension, the call computes all of it, and `narrow` takes this
rank's shard.
"""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.common import ints, narrow
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of, dims_of


def _flip(s: EmissionScope, op: nn.FlipOp) -> Text:
    dims = dims_of(op.properties, "dims", len(s.shape_of(op.x)))
    return narrow(s, f"{s.operand(op.x)}.flip({ints(dims)})", op.out, dims)


def _roll(s: EmissionScope, op: nn.RollOp) -> Text:
    dims = list(op.sources(s.global_shape(op.x), op.properties))
    shifts = [op.shifts.data[d] for d in dims]
    if not dims:
        return f"{s.operand(op.x)}.clone()"
    text = f"{s.operand(op.x)}.roll({ints(shifts)}, {ints(dims)})"
    return narrow(s, text, op.out, dims)


def _tile(s: EmissionScope, op: nn.TileOp) -> Text:
    text = f"{s.operand(op.x)}.repeat({ints(op.repeats.data)})"
    return narrow(s, text, op.out, list(op.sources(s.global_shape(op.x), op.properties)))


def _repeat_interleave(s: EmissionScope, op: nn.RepeatInterleaveOp) -> Text:
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.x)))
    repeats = op.repeats.value.data
    text = f"{s.operand(op.x)}.repeat_interleave({repeats}, {axis})"
    if repeats < 2 or s.axes(op.x, axis) == s.axes(op.out, axis):
        return text
    have, want = s.start(op.x, axis), s.start(op.out, axis)
    first = want if have == "0" else f"{want} - ({have}) * {repeats}"
    return f"{text}.narrow({axis}, {first}, {s.size(op.out, axis)})"


TORCH: dict[type[Operation], Entry] = {
    nn.FlipOp: _flip,
    nn.RollOp: _roll,
    nn.TileOp: _tile,
    nn.RepeatInterleaveOp: _repeat_interleave,
}
