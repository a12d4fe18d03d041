"""Softmax and log-softmax."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of


def _row(call: str) -> Callable[[EmissionScope, Operation], Text]:
    def entry(s: EmissionScope, op: Operation) -> Text:
        (x,) = op.operands
        return f"{s.operand(x)}.{call}({axis_of(op.properties, 'axis', len(s.shape_of(x)))})"

    return entry


def _row_grad(call: str) -> Callable[[EmissionScope, Operation], Text]:
    def entry(s: EmissionScope, op: Operation) -> Text:
        s.use("aten")
        y, dy = op.operands
        axis = axis_of(op.properties, "axis", len(s.shape_of(y)))
        return f"aten.{call}({s.operand(dy)}, {s.operand(y)}, {axis}, {s.dtype(y)})"

    return entry


TORCH: dict[type[Operation], Entry] = {
    nn.SoftmaxOp: _row("softmax"),
    nn.SoftmaxGradOp: _row_grad("_softmax_backward_data"),
    nn.LogSoftmaxOp: _row("log_softmax"),
    nn.LogSoftmaxGradOp: _row_grad("_log_softmax_backward_data"),
}
