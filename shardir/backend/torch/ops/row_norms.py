"""Norms of rows."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import float_text
from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of


def _norm(s: EmissionScope, op: nn.LayerNormOp | nn.RmsNormOp) -> Text:
    x, *parameters = (s.operand(v) for v in op.operands)
    name, given = op.name.removeprefix("nn."), ", ".join(parameters)
    eps = float_text(float_of(op, "eps"))
    if op.statistics is not None:
        s.use("ops")
        return f"ops.{name}({x}, {given}, {eps})"
    s.use("F")
    return f"F.{name}({x}, {tuple_text(s.sizes(op.weight))}, {given}, {eps})"


def _gradient(s: EmissionScope, op: nn.LayerNormGradOp | nn.RmsNormGradOp) -> Text:
    s.use("ops")
    return f"ops.{op.name.removeprefix('nn.')}({', '.join(s.operand(v) for v in op.operands)})"


TORCH: dict[type[Operation], Entry] = {
    **dict.fromkeys((nn.LayerNormOp, nn.RmsNormOp), _norm),
    **dict.fromkeys((nn.LayerNormGradOp, nn.RmsNormGradOp), _gradient),
}
