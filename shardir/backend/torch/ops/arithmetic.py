"""Elementwise arithmetic."""

from collections.abc import Callable
from math import isnan

from xdsl.ir import Operation

from shardir.backend.torch.emit.biases import biased_product
from shardir.backend.torch.emit.literals import number_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.common import infix, method
from shardir.dialects import nn


def _mul(s: EmissionScope, op: nn.MulOp) -> Text:
    """Write a scalar after the tensor."""
    x, y = op.operands
    if s.scalar(x) is not None and s.scalar(y) is None:
        x, y = y, x
    if s.scalar(y) == "1.0" and s.shape_of(x) == s.shape_of(op.out):
        return x
    return f"{s.operand(x)} * {s.scalar(y) or s.operand(y)}"


def _div(s: EmissionScope, op: nn.DivOp) -> Text:
    """torch computes `number / x` as number times the reciprocal, which rounds twice."""
    if s.scalar(op.lhs) == "1.0":
        return f"{s.operand(op.rhs)}.reciprocal()"
    return f"{s.operand(op.lhs)} / {s.scalar(op.rhs) or s.operand(op.rhs)}"


def _extreme(call: str, bound: str) -> Callable[[EmissionScope, Operation], Text]:
    def entry(s: EmissionScope, op: Operation) -> Text:
        lhs, rhs = op.operands
        for x, y in ((lhs, rhs), (rhs, lhs)):
            number = s.number(y)
            if s.scalar(y) is not None and not isnan(number or 0):
                return f"{s.operand(x)}.clamp({bound}={number_text(number or 0, s.element(y))})"
        return f"torch.{call}({s.operand(lhs)}, {s.operand(rhs)})"

    return entry


def _quotient(s: EmissionScope, op: nn.QuotientOp) -> Text:
    divisor = s.scalar(op.rhs) or s.operand(op.rhs)
    return f'torch.div({s.operand(op.lhs)}, {divisor}, rounding_mode="trunc")'


def _lerp(s: EmissionScope, op: nn.LerpOp) -> Text:
    weight = s.scalar(op.weight) or s.operand(op.weight)
    return f"torch.lerp({s.operand(op.lhs)}, {s.operand(op.rhs)}, {weight})"


def _neg(s: EmissionScope, op: nn.NegOp) -> Text:
    return f"-{s.operand(op.x)}"


_sum = infix("+")


def _add(s: EmissionScope, op: nn.AddOp) -> Text:
    return op.lhs if biased_product(op) is not None else _sum(s, op)


TORCH: dict[type[Operation], Entry] = {
    nn.AddOp: _add,
    nn.SubOp: infix("-"),
    nn.MulOp: _mul,
    nn.DivOp: _div,
    nn.RemainderOp: infix("%"),
    nn.QuotientOp: _quotient,
    nn.LerpOp: _lerp,
    nn.MaxOp: _extreme("maximum", "min"),
    nn.MinOp: _extreme("minimum", "max"),
    nn.NegOp: _neg,
    nn.AbsOp: method("abs"),
    nn.SignOp: method("sign"),
    nn.FloorOp: method("floor"),
    nn.CeilOp: method("ceil"),
    nn.RoundOp: method("round"),
    nn.TruncOp: method("trunc"),
}
