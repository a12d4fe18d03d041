"""Comparisons and logic."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.common import infix, method
from shardir.dialects import nn

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _compare(s: EmissionScope, op: nn.CompareOp) -> Text:
    return infix(_SIGNS[op.how.data])(s, op)


def _not(s: EmissionScope, op: nn.NotOp) -> Text:
    return f"~{s.operand(op.x)}"


TORCH: dict[type[Operation], Entry] = {
    nn.IsnanOp: method("isnan"),
    nn.IsinfOp: method("isinf"),
    nn.IsfiniteOp: method("isfinite"),
    nn.AndOp: infix("&"),
    nn.OrOp: infix("|"),
    nn.XorOp: infix("^"),
    nn.ShiftLeftOp: infix("<<"),
    nn.ShiftRightOp: infix(">>"),
    nn.NotOp: _not,
    nn.CompareOp: _compare,
}
