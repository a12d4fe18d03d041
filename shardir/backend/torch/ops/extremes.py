"""The index of a maximum or minimum."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of


def _arg(call: str) -> Callable[[EmissionScope, Operation], Text]:
    def entry(s: EmissionScope, op: Operation) -> Text:
        (x,) = op.operands
        axis = axis_of(op.properties, "axis", len(s.shape_of(x)))
        keep = ", keepdim=True" if "keep" in op.properties else ""
        return f"{s.operand(x)}.{call}({axis}{keep})"

    return entry


TORCH: dict[type[Operation], Entry] = {
    nn.ArgmaxOp: _arg("argmax"),
    nn.ArgminOp: _arg("argmin"),
}
