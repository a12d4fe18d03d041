"""Ring products."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import axes_text, literal
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.dist.comments import over_axes
from shardir.dialects import dist


def _gathered_product(s: EmissionScope, op: dist.GatheredProductOp) -> Text:
    return _product(s, op, "gathered_product", "with each shard as it arrives")


def _scattered_product(s: EmissionScope, op: dist.ScatteredProductOp) -> Text:
    return _product(s, op, "scattered_product", "of each shard, added to the sum that arrives")


def _product(s: EmissionScope, op: dist.RingProductOp, call: str, how: str) -> Text:
    which, dim, out = op.ring
    s.note(f"product {how}, {over_axes(s, op.axes.data)}")
    s.left(op)
    operands = ", ".join(map(s.operand, op.operands))
    ring, axes = f"({which}, {dim}, {out})", axes_text(op.axes.data)
    keep = ", keep=True" if len(op.outs) > 1 else ""
    return f"rt.{call}(mesh, {operands}, {literal(op.equation.data)}, {ring}, {axes}{keep})"


TORCH: dict[type[Operation], Entry] = {
    dist.GatheredProductOp: _gathered_product,
    dist.ScatteredProductOp: _scattered_product,
}
