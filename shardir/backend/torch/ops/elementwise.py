"""Elementwise ops."""

from collections.abc import Callable
from math import isnan

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import number_text
from shardir.backend.torch.emit.scope import Scope, Text
from shardir.dialects import nn
from shardir.dialects.nn.base import float_of, int_of


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


def _extreme(call: str, bound: str) -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        lhs, rhs = op.operands
        for x, y in ((lhs, rhs), (rhs, lhs)):
            number = s.number(y)
            if s.scalar(y) is not None and not isnan(number or 0):
                return f"{s.operand(x)}.clamp({bound}={number_text(number or 0, s.element(y))})"
        return f"torch.{call}({s.operand(lhs)}, {s.operand(rhs)})"

    return entry


def _lerp(s: Scope, op: nn.LerpOp) -> Text:
    weight = s.scalar(op.weight) or s.operand(op.weight)
    return f"torch.lerp({s.operand(op.lhs)}, {s.operand(op.rhs)}, {weight})"


def _clamp(s: Scope, op: nn.ClampOp) -> Text:
    ends = [f"{n}={_number(s, op, n)}" for n in ("min", "max") if n in op.properties]
    return f"{s.operand(op.x)}.clamp({', '.join(ends)})"


def _nan_to_num(s: Scope, op: nn.NanToNumOp) -> Text:
    given = ", ".join(f"{n}={_number(s, op, n)}" for n in ("nan", "posinf", "neginf"))
    return f"{s.operand(op.x)}.nan_to_num({given})"


def _number(s: Scope, op: Operation, name: str) -> str:
    """A number that is a property, as the result's type holds it."""
    return number_text(float_of(op, name), s.element(op.results[0]))


def _triangle(call: str) -> Callable[[Scope, nn.Triangle], Text]:
    """The diagonal of a shard is that of the whole, seen from its first row and column."""

    def entry(s: Scope, op: nn.Triangle) -> Text:
        rank = len(s.shape_of(op.x))
        text = str(int_of(op.properties, "diagonal"))
        if (row := s.start(op.x, rank - 2)) != "0":
            text += f" + {row}"
        if (column := s.start(op.x, rank - 1)) != "0":
            text += f" - {column}"
        return f"{s.operand(op.x)}.{call}({text})"

    return entry


_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _compare(s: Scope, op: nn.CompareOp) -> Text:
    return _infix(_SIGNS[op.how.data])(s, op)


def _select(s: Scope, op: nn.SelectOp) -> Text:
    """One of the two may be a plain number: its type is then that of the other. What keeps a
    parameter or state is written where that lies."""
    condition = s.operand(op.condition)
    if s.role(op.rhs) in ("parameter", "state") and s.may_update(op.rhs, op):
        old = s.operand(op.rhs)
        s.line(f"torch.where({condition}, {s.operand(op.lhs)}, {old}, out={old})")
        return op.rhs
    y = s.scalar(op.rhs)
    x = s.scalar(op.lhs) if y is None else None
    return f"torch.where({condition}, {x or s.operand(op.lhs)}, {y or s.operand(op.rhs)})"


def method(name: str) -> Callable[[Scope, Operation], Text]:
    return lambda s, op: f"{s.operand(op.operands[0])}.{name}()"


def _not(s: Scope, op: nn.NotOp) -> Text:
    return f"~{s.operand(op.x)}"


def _neg(s: Scope, op: nn.NegOp) -> Text:
    return f"-{s.operand(op.x)}"


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
    nn.RemainderOp: _infix("%"),
    nn.PowOp: _infix("**"),
    nn.LerpOp: _lerp,
    nn.MaxOp: _extreme("maximum", "min"),
    nn.MinOp: _extreme("minimum", "max"),
    nn.NegOp: _neg,
    nn.AbsOp: method("abs"),
    nn.SignOp: method("sign"),
    nn.ReciprocalOp: method("reciprocal"),
    nn.SquareOp: method("square"),
    nn.SqrtOp: method("sqrt"),
    nn.RsqrtOp: method("rsqrt"),
    nn.ExpOp: method("exp"),
    nn.Exp2Op: method("exp2"),
    nn.Expm1Op: method("expm1"),
    nn.LogOp: method("log"),
    nn.Log2Op: method("log2"),
    nn.Log1pOp: method("log1p"),
    nn.SinOp: method("sin"),
    nn.CosOp: method("cos"),
    nn.TanOp: method("tan"),
    nn.AtanOp: method("atan"),
    nn.ErfOp: method("erf"),
    nn.FloorOp: method("floor"),
    nn.CeilOp: method("ceil"),
    nn.RoundOp: method("round"),
    nn.TruncOp: method("trunc"),
    nn.IsnanOp: method("isnan"),
    nn.IsinfOp: method("isinf"),
    nn.IsfiniteOp: method("isfinite"),
    nn.ClampOp: _clamp,
    nn.NanToNumOp: _nan_to_num,
    nn.TrilOp: _triangle("tril"),
    nn.TriuOp: _triangle("triu"),
    nn.AndOp: _infix("&"),
    nn.OrOp: _infix("|"),
    nn.XorOp: _infix("^"),
    nn.NotOp: _not,
    nn.CompareOp: _compare,
    nn.SelectOp: _select,
    nn.ConvertOp: _convert,
    nn.StopGradientOp: _stop_gradient,
}
