"""Ops over whole rows."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import Scope, Text
from shardir.dialects import nn
from shardir.dialects.nn.base import axis_of, float_of


def _row(call: str) -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        (x,) = op.operands
        return f"{s.operand(x)}.{call}({axis_of(op.properties, 'axis', len(s.shape_of(x)))})"

    return entry


def _row_grad(call: str) -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        s.use("aten")
        y, dy = op.operands
        axis = axis_of(op.properties, "axis", len(s.shape_of(y)))
        return f"aten.{call}({s.operand(dy)}, {s.operand(y)}, {axis}, {s.dtype(y)})"

    return entry


def _layer_norm(s: Scope, op: nn.LayerNormOp) -> Text:
    s.use("torch.nn.functional as F")
    shape = tuple_text(s.sizes(op.weight))
    x, weight, bias = (s.operand(v) for v in op.operands)
    return f"F.layer_norm({x}, {shape}, {weight}, {bias}, {float_of(op, 'eps')!r})"


def _layer_norm_grad(s: Scope, op: nn.LayerNormGradOp) -> Text:
    s.use("ops_runtime as ops")
    given = ", ".join(s.operand(v) for v in op.operands)
    return f"ops.layer_norm_grad({given}, {float_of(op, 'eps')!r})"


TORCH: dict[type[Operation], Callable[..., Text]] = {
    nn.SoftmaxOp: _row("softmax"),
    nn.SoftmaxGradOp: _row_grad("_softmax_backward_data"),
    nn.LogSoftmaxOp: _row("log_softmax"),
    nn.LogSoftmaxGradOp: _row_grad("_log_softmax_backward_data"),
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
}
