"""Layer norm."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import float_text
from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of


def _layer_norm(s: EmissionScope, op: nn.LayerNormOp) -> Text:
    x, weight, bias = (s.operand(v) for v in op.operands)
    eps = float_text(float_of(op, "eps"))
    if op.statistics is not None:
        s.use("ops")
        return f"ops.layer_norm({x}, {weight}, {bias}, {eps})"
    s.use("F")
    return f"F.layer_norm({x}, {tuple_text(s.sizes(op.weight))}, {weight}, {bias}, {eps})"


def _layer_norm_grad(s: EmissionScope, op: nn.LayerNormGradOp) -> Text:
    s.use("ops")
    return f"ops.layer_norm_grad({', '.join(s.operand(v) for v in op.operands)})"


TORCH: dict[type[Operation], Entry] = {
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
}
