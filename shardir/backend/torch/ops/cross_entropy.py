"""Cross entropy."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn


def _cross_entropy(s: EmissionScope, op: nn.CrossEntropyOp) -> Text:
    s.use("ops")
    logits, labels = s.operand(op.logits), s.operand(op.labels)
    ignore, share = op.options()
    if op.log_softmax is not None:
        total = s.global_shape(op.logits)[-1]
        return f"ops.cross_entropy({logits}, {labels}, {total}{_options(op)})"
    s.use("F")
    rank = len(s.shape_of(op.logits))
    allowed = f", {ignore}" if ignore is not None else ""
    checked = f"ops.in_range({labels}, {s.global_shape(op.logits)[-1]}{allowed})"
    options = f", ignore_index={ignore}" if ignore is not None else ""
    options += f", label_smoothing={share!r}" if share else ""
    options += ', reduction="none"'
    if rank <= 2:
        return f"F.cross_entropy({logits}, {checked}{options})"
    flat = f"{logits}.flatten(0, {rank - 2}), {checked}.flatten()"
    return f"F.cross_entropy({flat}{options}).view({labels}.shape)"


def _cross_entropy_grad(s: EmissionScope, op: nn.CrossEntropyGradOp) -> Text:
    s.use("ops")
    operands = ", ".join(s.operand(v) for v in op.operands)
    return f"ops.cross_entropy_grad({operands}{_options(op)})"


def _options(op: nn.CrossEntropyOp | nn.CrossEntropyGradOp) -> str:
    """The arguments for the ignored label and smoothing."""
    ignore, share = op.options()
    text = f", ignore={ignore}" if ignore is not None else ""
    return text + (f", smoothing={share!r}" if share else "")


TORCH: dict[type[Operation], Entry] = {
    nn.CrossEntropyOp: _cross_entropy,
    nn.CrossEntropyGradOp: _cross_entropy_grad,
}
