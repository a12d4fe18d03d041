"""Random numbers."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import literal, tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.creation import part_text
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of, int_of


def _stream(s: EmissionScope, op: nn.Drawn) -> str:
    stream = str(int_of(op.properties, "stream"))
    if op.stride is None or not s.loops:
        return stream
    return f"{stream} + {op.stride.value.data} * {s.loops[-1].index}"


def _random(s: EmissionScope, op: nn.RandomOp) -> Text:
    s.use("ops_random")
    how = op.distribution
    params = ", ".join(f"{literal(n)}: {x!r}" for n, x in how.values.items())
    shape = tuple_text(list(map(str, s.global_shape(op.out))))
    return (
        f"ops_random.draw({literal(how.kind)}, {{{params}}}, {shape}, {part_text(s, op.out)}, "
        f"{s.operand(op.key)}, {_stream(s, op)}, {s.dtype(op.out)})"
    )


def _dropout(s: EmissionScope, op: nn.DropoutOp) -> Text:
    p = float_of(op, "p")
    if p == 0:
        return op.x
    s.use("ops_random")
    shape = tuple_text(list(map(str, s.global_shape(op.x))))
    return (
        f"ops_random.dropout({s.operand(op.x)}, {p!r}, {shape}, {part_text(s, op.x)}, "
        f"{s.operand(op.key)}, {_stream(s, op)})"
    )


TORCH: dict[type[Operation], Entry] = {
    nn.RandomOp: _random,
    nn.DropoutOp: _dropout,
}
