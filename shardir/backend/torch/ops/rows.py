"""Replacement of rows by index."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.indexing import rows
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of


def _index_copy(s: EmissionScope, op: nn.IndexCopyOp) -> Text:
    """Update x in place if nothing reads it later, as for a key-value cache."""
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.x)))
    x, ids, new = s.operand(op.x), s.operand(op.ids), s.operand(op.rows)
    unsharded = s.parts(op.x, axis) == 1 and s.element(op.ids) == "i64"
    call = f"{axis}, {ids}, {new}" if unsharded else f"{ids}, {new}, {axis}, {rows(s, op.x, axis)}"
    if not unsharded:
        s.use("ops")
    if s.may_update(op.x, op):
        s.line(f"{x}.index_copy_({call})" if unsharded else f"ops.index_copy_({x}, {call})")
        return op.x
    return f"{x}.index_copy({call})" if unsharded else f"ops.index_copy_({x}.clone(), {call})"


TORCH: dict[type[Operation], Entry] = {nn.IndexCopyOp: _index_copy}
