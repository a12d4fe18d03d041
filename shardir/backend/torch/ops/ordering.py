"""Running sums, sort, the k largest elements."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn


def _cumsum(s: EmissionScope, op: nn.CumsumOp) -> Text:
    axis = op.at()
    typed = "" if s.is_float(op.x) else f", dtype={s.dtype(op.x)}"
    if op.reverse is None:
        return f"{s.operand(op.x)}.cumsum({axis}{typed})"
    return f"{s.operand(op.x)}.flip({axis}).cumsum({axis}{typed}).flip({axis})"


def _sort(call: str) -> Callable[[EmissionScope, nn.SortOp | nn.ArgsortOp], Text]:
    def entry(s: EmissionScope, op: nn.SortOp | nn.ArgsortOp) -> Text:
        descending = ", descending=True" if op.descending is not None else ""
        return f"{s.operand(op.x)}.{call}(dim={op.at()}{descending}, stable=True)"

    return entry


def _topk(s: EmissionScope, op: nn.TopkOp) -> Text:
    s.use("ops")
    largest = ", largest=False" if op.smallest is not None else ""
    return f"ops.topk({s.operand(op.x)}, {op.k.value.data}, {op.at()}{largest})"


TORCH: dict[type[Operation], Entry] = {
    nn.CumsumOp: _cumsum,
    nn.SortOp: _sort("sort"),
    nn.ArgsortOp: _sort("argsort"),
    nn.TopkOp: _topk,
}
