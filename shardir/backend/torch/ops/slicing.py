"""Slices and padding."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import number_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.common import ints, narrow
from shardir.dialects import nn


def _slice(s: EmissionScope, op: nn.SliceOp) -> Text:
    bounds = op.bounds(s.global_shape(op.x), op.properties)
    changed = list(op.sources(s.global_shape(op.x), op.properties))
    if not changed:
        return op.x
    text, unsharded = s.operand(op.x), []
    for d in changed:
        start, _, stride = bounds[d]
        if s.parts(op.x, d) > 1:  # this rank's elements, and zeros for the others
            s.use("ops")
            rows = f"{start}, {stride}, {s.global_shape(op.out)[d]}"
            text = f"ops.taken({text}, {d}, {rows}, {s.start(op.x, d)})"
        else:
            unsharded.append(d)
    if unsharded:
        cuts = [":"] * (unsharded[-1] + 1)
        for d in unsharded:
            start, limit, stride = bounds[d]
            cuts[d] = f"{start or ''}:{limit}{f':{stride}' if stride > 1 else ''}"
        text += f"[{', '.join(cuts)}]"
    return narrow(s, text, op.out, changed)


def _pad(s: EmissionScope, op: nn.PadOp) -> Text:
    changed = list(op.sources(s.global_shape(op.x), op.properties))
    if not changed:
        return op.x
    s.use("F")
    sides = [n for d in reversed(range(min(changed, default=0), len(op.low.data)))
             for n in (op.low.data[d], op.high.data[d])]  # fmt: skip
    value = op.filling(op.properties)
    filling = f", value={number_text(value, s.element(op.x))}" if value else ""
    return narrow(s, f"F.pad({s.operand(op.x)}, {ints(sides)}{filling})", op.out, changed)


TORCH: dict[type[Operation], Entry] = {
    nn.SliceOp: _slice,
    nn.PadOp: _pad,
}
