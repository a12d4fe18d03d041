"""Ops that select or replace elements."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import number_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of, int_of


def _clamp(s: EmissionScope, op: nn.ClampOp) -> Text:
    ends = [f"{n}={_number(s, op, n)}" for n in ("min", "max") if n in op.properties]
    return f"{s.operand(op.x)}.clamp({', '.join(ends)})"


def _nan_to_num(s: EmissionScope, op: nn.NanToNumOp) -> Text:
    numbers = ", ".join(f"{n}={_number(s, op, n)}" for n in ("nan", "posinf", "neginf"))
    return f"{s.operand(op.x)}.nan_to_num({numbers})"


def _number(s: EmissionScope, op: Operation, name: str) -> str:
    """The number of a property, rounded to the result's type."""
    return number_text(float_of(op, name), s.element(op.results[0]))


def _triangle(call: str) -> Callable[[EmissionScope, nn.Triangle], Text]:
    """The emitter of tril or triu; the diagonal is relative to the shard's first row and column."""

    def entry(s: EmissionScope, op: nn.Triangle) -> Text:
        rank = len(s.shape_of(op.x))
        text = str(int_of(op.properties, "diagonal"))
        if (row := s.start(op.x, rank - 2)) != "0":
            text += f" + {row}"
        if (column := s.start(op.x, rank - 1)) != "0":
            text += f" - {column}"
        return f"{s.operand(op.x)}.{call}({text})"

    return entry


def _select(s: EmissionScope, op: nn.SelectOp) -> Text:
    """One of the two values may be a literal, which takes the type of the other. A selection that
    may keep an old parameter or state is written into its memory."""
    condition = s.operand(op.condition)
    if op.rhs in s.lent and s.may_update(op.rhs, op):
        old = s.operand(op.rhs)
        s.line(f"torch.where({condition}, {s.operand(op.lhs)}, {old}, out={old})")
        return op.rhs
    y = s.scalar(op.rhs)
    x = s.scalar(op.lhs) if y is None else None
    return f"torch.where({condition}, {x or s.operand(op.lhs)}, {y or s.operand(op.rhs)})"


def _convert(s: EmissionScope, op: nn.ConvertOp) -> Text:
    if s.dtype(op.x) == s.dtype(op.out):
        return op.x
    return f"{s.operand(op.x)}.to({s.dtype(op.out)})"


def _bitcast(s: EmissionScope, op: nn.BitcastOp) -> Text:
    """16 bits are the lower half of 32."""
    x = s.operand(op.x)
    if s.element(op.x) in ("f16", "bf16"):
        return f"{x}.view(torch.int16).to(torch.int32) & 0xFFFF"
    if s.element(op.out) in ("f16", "bf16"):
        return f"{x}.to(torch.int16).view({s.dtype(op.out)})"
    return f"{x}.view({s.dtype(op.out)})"


def _same(s: EmissionScope, op: nn.StopGradientOp | nn.StraightThroughOp) -> Text:
    return op.x


TORCH: dict[type[Operation], Entry] = {
    nn.ClampOp: _clamp,
    nn.NanToNumOp: _nan_to_num,
    nn.TrilOp: _triangle("tril"),
    nn.TriuOp: _triangle("triu"),
    nn.SelectOp: _select,
    nn.ConvertOp: _convert,
    nn.BitcastOp: _bitcast,
    nn.StopGradientOp: _same,
    nn.StraightThroughOp: _same,
}
