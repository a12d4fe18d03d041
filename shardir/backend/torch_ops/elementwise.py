"""Elementwise ops."""

from collections.abc import Callable
from math import isnan

from xdsl.ir import Operation

from shardir.backend.emit import Scope, Text, number_text
from shardir.dialects import nn


def _infix(sign: str) -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        x, y = op.operands
        if (number := s.scalar(y)) is not None:
            return f"{s.operand(x)} {sign} {number}"
        if (number := s.scalar(x)) is not None:
            return f"{number} {sign} {s.operand(y)}"
        return f"{s.operand(x)} {sign} {s.operand(y)}"

    return entry


def _mul(s: Scope, op: nn.MulOp) -> Text:
    """A number stands behind the tensor, as people write it."""
    x, y = op.operands
    if s.scalar(x) is not None and s.scalar(y) is None:
        x, y = y, x
    if s.scalar(y) == "1.0" and s.shape_of(x) == s.shape_of(op.out):
        return x
    return f"{s.operand(x)} * {s.scalar(y) or s.operand(y)}"


def _div(s: Scope, op: nn.DivOp) -> Text:
    """torch reads `number / x` as number times the reciprocal, which rounds twice."""
    if s.scalar(op.lhs) == "1.0":
        return f"{s.operand(op.rhs)}.reciprocal()"
    return f"{s.operand(op.lhs)} / {s.scalar(op.rhs) or s.operand(op.rhs)}"


def _max(s: Scope, op: nn.MaxOp) -> Text:
    for x, y in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
        number = s.number(y)
        if s.scalar(y) is not None and not isnan(number or 0):
            return f"{s.operand(x)}.clamp(min={number_text(number or 0, s.element(y))})"
    return f"torch.maximum({s.operand(op.lhs)}, {s.operand(op.rhs)})"


_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _compare(s: Scope, op: nn.CompareOp) -> Text:
    return _infix(_SIGNS[op.how.data])(s, op)


def _select(s: Scope, op: nn.SelectOp) -> Text:
    """One of the two may be a plain number: its type is then that of the other."""
    condition = s.operand(op.condition)
    y = s.scalar(op.rhs)
    x = s.scalar(op.lhs) if y is None else None
    return f"torch.where({condition}, {x or s.operand(op.lhs)}, {y or s.operand(op.rhs)})"


def _method(name: str) -> Callable[[Scope, Operation], Text]:
    return lambda s, op: f"{s.operand(op.operands[0])}.{name}()"


def _neg(s: Scope, op: nn.NegOp) -> Text:
    return f"-{s.operand(op.x)}"


def _gelu(s: Scope, op: nn.GeluOp) -> Text:
    s.use("torch.nn.functional as F")
    return f'F.gelu({s.operand(op.x)}, approximate="tanh")'


def _activation_grad(call: str, last: str = "") -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        s.use("aten")
        saved, dy = op.operands
        return f"aten.{call}({s.operand(dy)}, {s.operand(saved)}{last})"

    return entry


def _convert(s: Scope, op: nn.ConvertOp) -> Text:
    if s.dtype(op.x) == s.dtype(op.out):
        return op.x
    return f"{s.operand(op.x)}.to({s.dtype(op.out)})"


def _stop_gradient(s: Scope, op: nn.StopGradientOp) -> Text:
    return op.x


TORCH: dict[type[Operation], Callable[..., Text]] = {
    nn.AddOp: _infix("+"),
    nn.SubOp: _infix("-"),
    nn.MulOp: _mul,
    nn.DivOp: _div,
    nn.MaxOp: _max,
    nn.NegOp: _neg,
    nn.ExpOp: _method("exp"),
    nn.LogOp: _method("log"),
    nn.SqrtOp: _method("sqrt"),
    nn.ReluOp: _method("relu"),
    nn.ReluGradOp: _activation_grad("threshold_backward", ", 0"),
    nn.TanhOp: _method("tanh"),
    nn.TanhGradOp: _activation_grad("tanh_backward"),
    nn.SigmoidOp: _method("sigmoid"),
    nn.SigmoidGradOp: _activation_grad("sigmoid_backward"),
    nn.GeluOp: _gelu,
    nn.GeluGradOp: _activation_grad("gelu_backward", ', approximate="tanh"'),
    nn.CompareOp: _compare,
    nn.SelectOp: _select,
    nn.ConvertOp: _convert,
    nn.StopGradientOp: _stop_gradient,
}
