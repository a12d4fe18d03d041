"""Reads and additions along one dimension."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.indexing import rows
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of


def _take_along_axis(s: EmissionScope, op: nn.TakeAlongAxisOp) -> Text:
    s.use("ops")
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.x)))
    where = f"{axis}, {rows(s, op.x, axis)}"
    return f"ops.take_along_axis({s.operand(op.x)}, {s.operand(op.ids)}, {where})"


def _scatter_add(s: EmissionScope, op: nn.ScatterAddOp) -> Text:
    s.use("ops")
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.out)))
    where = f"{axis}, {s.size(op.out, axis)}, {rows(s, op.out, axis)}"
    return f"ops.scatter_add({s.operand(op.ids)}, {s.operand(op.src)}, {where})"


def _scatter_reduce(s: EmissionScope, op: nn.ScatterReduceOp) -> Text:
    s.use("ops")
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.out)))
    where = f"{axis}, {s.size(op.out, axis)}, {rows(s, op.out, axis)}"
    kind = {"max": "amax", "min": "amin"}.get(op.kind.data, op.kind.data)
    return f'ops.scatter_reduce({s.operand(op.ids)}, {s.operand(op.src)}, "{kind}", {where})'


TORCH: dict[type[Operation], Entry] = {
    nn.TakeAlongAxisOp: _take_along_axis,
    nn.ScatterAddOp: _scatter_add,
    nn.ScatterReduceOp: _scatter_reduce,
}
