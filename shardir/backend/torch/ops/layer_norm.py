"""Layer norm."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import float_text
from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of


def _layer_norm(s: EmissionScope, op: nn.LayerNormOp) -> Text:
    s.use("F")
    shape = tuple_text(s.sizes(op.weight))
    x, weight, bias = (s.operand(v) for v in op.operands)
    return f"F.layer_norm({x}, {shape}, {weight}, {bias}, {float_text(float_of(op, 'eps'))})"


def _layer_norm_grad(s: EmissionScope, op: nn.LayerNormGradOp) -> Text:
    s.use("ops")
    given = ", ".join(s.operand(v) for v in op.operands)
    return f"ops.layer_norm_grad({given}, {float_text(float_of(op, 'eps'))})"


TORCH: dict[type[Operation], Entry] = {
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
}
