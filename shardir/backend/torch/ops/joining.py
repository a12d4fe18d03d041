"""Ops that join values or split a value."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.common import ints, narrow
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of


def _join(call: str) -> Callable[[EmissionScope, nn.ConcatOp | nn.StackOp], Text]:
    def entry(s: EmissionScope, op: nn.ConcatOp | nn.StackOp) -> Text:
        axis = axis_of(op.properties, "axis", len(s.shape_of(op.out)))
        operands = ", ".join(s.operand(x) for x in op.xs)
        return narrow(s, f"torch.{call}(({operands},), {axis})", op.out, [axis])

    return entry


def _split(s: EmissionScope, op: nn.SplitOp) -> Text:
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.x)))
    text = f"{s.operand(op.x)}.split({ints(op.sizes.data)}, {axis})"
    if all(s.parts(out, axis) == 1 for out in op.outs):
        return text if len(op.outs) > 1 else f"{text}[0]"
    s.use("ops")
    parts = [f"({s.start(out, axis)}, {s.size(out, axis)})" for out in op.outs]
    text = f"ops.parts({text}, {axis}, {tuple_text(parts)})"
    return text if len(op.outs) > 1 else f"{text}[0]"


TORCH: dict[type[Operation], Entry] = {
    nn.ConcatOp: _join("cat"),
    nn.StackOp: _join("stack"),
    nn.SplitOp: _split,
}
