"""Copies between devices and their hosts."""

from xdsl.ir import Operation

from shardir.analysis.aliasing import in_place
from shardir.backend.torch.emit.names import literal
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.dist.comments import names_of, needed_by
from shardir.backend.torch.ops.dist.text import write_fused
from shardir.diagnostics import size_text
from shardir.dialects import dist
from shardir.dialects.nn.types import size_of
from shardir.rewriting.placement import layout_at


def _copy(s: EmissionScope, op: dist.CopyOp) -> Text:
    to = "host" if layout_at(op.outs[0]).host else "device"
    fused = f" of {len(op.values)} tensors" if len(op.values) > 1 else ""
    started = ", started here" if dist.is_started(op) else ""
    moved = size_text(sum(map(size_of, op.values)))
    s.note(f"copy{fused} to the {to}, {moved}{started}: {needed_by(s, op)} {names_of(op)} there")
    s.left(op)
    tail = literal(to)
    for out, old in in_place(op):
        if s.may_update(old, op):
            s.storages.join(out, old)
            tail += f", into={s.operand(old)}"
    write_fused(s, op, "copy", tail)
    return None


TORCH: dict[type[Operation], Entry] = {dist.CopyOp: _copy}
