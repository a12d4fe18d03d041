"""Statistics along dimensions."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_of


def _spread(call: str) -> Callable[[EmissionScope, nn.OverDims], Text]:
    def entry(s: EmissionScope, op: nn.OverDims) -> Text:
        if not any(s.may_be_empty(op.x, d) for d in range(len(s.shape_of(op.x)))):
            return _statistic(call)(s, op)
        s.use("ops")
        dims = tuple_text(list(map(str, op.where()[0])))
        correction = int_of(op.properties, "correction")
        keep = ", keep=True" if op.keep is not None else ""
        return f"ops.spread(torch.{call}, {s.operand(op.x)}, {dims}, {correction}{keep})"

    return entry


def _statistic(call: str) -> Callable[[EmissionScope, nn.OverDims], Text]:
    def entry(s: EmissionScope, op: nn.OverDims) -> Text:
        dims, _ = op.where()
        arguments = [str(dims[0]) if len(dims) == 1 else tuple_text(list(map(str, dims)))]
        if "correction" in op.properties:
            arguments.append(f"correction={int_of(op.properties, 'correction')}")
        if op.keep is not None:
            arguments.append("keepdim=True")
        return f"{s.operand(op.x)}.{call}({', '.join(arguments)})"

    return entry


TORCH: dict[type[Operation], Entry] = {
    nn.LogsumexpOp: _statistic("logsumexp"),
    nn.VarOp: _spread("var"),
    nn.StdOp: _spread("std"),
}
