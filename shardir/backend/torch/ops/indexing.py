"""Ops that read by index."""

from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of


def rows(s: EmissionScope, v: SSAValue, dim: int) -> str:
    """This rank's first row of a dimension, and the number of all rows."""
    return f"{s.start(v, dim)}, {s.global_shape(v)[dim]}"


def _gather(s: EmissionScope, op: nn.GatherOp) -> Text:
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.table)))
    table, ids = s.operand(op.table), s.operand(op.ids)
    if op.slices is not None:
        s.use("ops")
        shape = s.global_shape(op.ids)
        dim = axis_of(op.properties, "field", len(shape))
        starts = tuple_text([s.start(op.ids, d) for d in range(len(shape))])
        slices = tuple_text([*map(str, op.slices.data)])
        ids = f"ops.in_slices({ids}, {dim}, {slices}, {shape[dim]}, {starts})"
    total = s.global_shape(op.table)[axis]
    if axis == 0 and len(s.shape_of(op.table)) == 2 and s.parts(op.table, 0) == 1 and total:
        s.use("F")
        return f"F.embedding({ids}, {table})"
    s.use("ops")
    return f"ops.take({table}, {ids}, {axis}, {rows(s, op.table, axis)})"


def _gather_grad(s: EmissionScope, op: nn.GatherGradOp) -> Text:
    s.use("ops")
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.out)))
    shape = tuple_text(s.sizes(op.out))
    call = (
        f"ops.take_grad({s.operand(op.ids)}, {s.operand(op.dy)}, {shape}, {axis}, "
        f"{rows(s, op.out, axis)})"
    )
    total = s.sums.get(op.out)
    return call if total is None else s.add_by(total, call)


def _pick(s: EmissionScope, op: nn.PickOp) -> Text:
    s.use("ops")
    last = len(s.shape_of(op.x)) - 1
    return f"ops.pick({s.operand(op.x)}, {s.operand(op.ids)}, {rows(s, op.x, last)})"


def _pick_grad(s: EmissionScope, op: nn.PickGradOp) -> Text:
    s.use("ops")
    last = len(s.shape_of(op.out)) - 1
    where = f"{s.size(op.out, last)}, {rows(s, op.out, last)}"
    return f"ops.pick_grad({s.operand(op.ids)}, {s.operand(op.dy)}, {where})"


def _one_hot(s: EmissionScope, op: nn.OneHotOp) -> Text:
    s.use("ops")
    last = len(s.shape_of(op.out)) - 1
    where = f"{s.size(op.out, last)}, {rows(s, op.out, last)}"
    return f"ops.one_hot({s.operand(op.ids)}, {where}, {s.dtype(op.out)})"


TORCH: dict[type[Operation], Entry] = {
    nn.GatherOp: _gather,
    nn.GatherGradOp: _gather_grad,
    nn.PickOp: _pick,
    nn.PickGradOp: _pick_grad,
    nn.OneHotOp: _one_hot,
}
