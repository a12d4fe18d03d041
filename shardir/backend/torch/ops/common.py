"""Helpers of the emitters of several families."""

from collections.abc import Callable, Sequence

from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Text


def infix(sign: str) -> Callable[[EmissionScope, Operation], Text]:
    def entry(s: EmissionScope, op: Operation) -> Text:
        x, y = op.operands
        if (number := s.scalar(y)) is not None:
            return f"{s.operand(x)} {sign} {number}"
        if (number := s.scalar(x)) is not None:
            return f"{number} {sign} {s.operand(y)}"
        return f"{s.operand(x)} {sign} {s.operand(y)}"

    return entry


def method(name: str) -> Callable[[EmissionScope, Operation], Text]:
    return lambda s, op: f"{s.operand(op.operands[0])}.{name}()"


def ints(values: Sequence[int]) -> str:
    return tuple_text(list(map(str, values)))


def narrow(s: EmissionScope, text: str, out: SSAValue, dims: Sequence[int]) -> str:
    """Narrow a result that is unsharded along `dims` to this rank's shard."""
    for d in dims:
        if s.parts(out, d) > 1:
            text += f".narrow({d}, {s.start(out, d)}, {s.size(out, d)})"
    return text
