"""Elementwise losses. Reduced losses are composites, emitted as their decompositions."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn


def _per_element(call: str) -> Callable[[EmissionScope, Operation], Text]:
    def entry(s: EmissionScope, op: Operation) -> Text:
        s.use("F")
        x, y = (s.operand(v) for v in op.operands)
        if s.shape_of(op.operands[1]) != s.shape_of(op.results[0]):  # torch needs equal shapes
            y = f"{y}.expand_as({x})"
        return f'F.{call}({x}, {y}, reduction="none")'

    return entry


TORCH: dict[type[Operation], Entry] = {
    nn.BinaryCrossEntropyOp: _per_element("binary_cross_entropy"),
    nn.BinaryCrossEntropyWithLogitsOp: _per_element("binary_cross_entropy_with_logits"),
}
