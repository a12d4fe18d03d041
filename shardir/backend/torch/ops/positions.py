"""Position embeddings."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import float_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of


def _rotary(s: EmissionScope, op: nn.RotaryOp) -> Text:
    s.use("ops_positions")
    arguments = [s.operand(op.x), s.operand(op.positions), float_text(float_of(op, "base"))]
    arguments += ["interleaved=True"] if op.pairing.data == "interleaved" else []
    arguments += ["reverse=True"] if op.reverse is not None else []
    return f"ops_positions.rotary({', '.join(arguments)})"


def _sinusoid(s: EmissionScope, op: nn.SinusoidOp) -> Text:
    s.use("ops_positions")
    last = len(s.shape_of(op.out)) - 1
    arguments = [s.operand(op.positions), s.start(op.out, last), s.size(op.out, last)]
    arguments += [
        str(s.global_shape(op.out)[last]),
        float_text(float_of(op, "base")),
        s.dtype(op.out),
    ]
    arguments += ["interleaved=True"] if op.pairing.data == "interleaved" else []
    return f"ops_positions.sinusoid({', '.join(arguments)})"


TORCH: dict[type[Operation], Entry] = {
    nn.RotaryOp: _rotary,
    nn.SinusoidOp: _sinusoid,
}
