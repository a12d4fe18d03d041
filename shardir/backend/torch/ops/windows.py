"""Windows of the local rows of a dimension."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn


def _start(s: EmissionScope, op: nn.UnfoldOp | nn.FoldOp) -> str:
    """Local row at which this rank's first window starts."""
    rows, windows = op.ends(op.operands, op.results)
    offset = op.offset.value.data
    if s.parts(windows, op.at) == 1:
        return str(offset)
    return f"{s.start(windows, op.at)} * {op.step.value.data} + {offset} - ({s.start(rows, op.at)})"


def _unfold(s: EmissionScope, op: nn.UnfoldOp) -> Text:
    s.use("windows")
    count, start = s.size(op.out, op.at), _start(s, op)
    lowest = ", lowest=True" if op.lowest is not None else ""
    numbers = f"{op.at}, {count}, {s.size(op.out, op.at + 1)}, {op.step.value.data}, {start}"
    return f"windows.unfold({s.operand(op.x)}, {numbers}{lowest})"


def _fold(s: EmissionScope, op: nn.FoldOp) -> Text:
    s.use("windows")
    numbers = f"{op.at}, {s.size(op.out, op.at)}, {op.step.value.data}, {_start(s, op)}"
    return f"windows.fold({s.operand(op.x)}, {numbers})"


TORCH: dict[type[Operation], Entry] = {
    nn.UnfoldOp: _unfold,
    nn.FoldOp: _fold,
}
