"""Collectives in which all devices of a group have equal roles, and the wait for a collective in
flight."""

from xdsl.ir import Operation, SSAValue

from shardir.analysis.causes import partial_values
from shardir.backend.torch.emit.names import axes_text, join_items, literal, tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.dist.comments import (
    explain,
    made_by,
    names_of,
    needed_by,
    over_axes,
)
from shardir.backend.torch.ops.dist.shards import check_nesting, gathered_size, gathered_sizes
from shardir.backend.torch.ops.dist.text import call, is_trivial, write_each, write_fused
from shardir.dialects import dist


def _all_reduce(s: EmissionScope, op: dist.AllReduceOp) -> Text:
    if is_trivial(s, op):
        return None
    kind = op.reduction.data
    explain(s, op, f"all-reduce {kind}", f"{made_by(op)} {partial_values(kind)}")
    tail = f"{literal(kind)}, {axes_text(op.axes.data)}"
    (first, *more) = op.values
    s.operand(first)
    if not more and s.storages.is_free(first, op):
        s.storages.join(op.outs[0], first)
        tail += ", donate=True"
    write_fused(s, op, "all_reduce", tail)
    return None


def _reduce_scatter(s: EmissionScope, op: dist.ReduceScatterOp) -> Text:
    if is_trivial(s, op):
        return None
    kind, dim = op.reduction.data, op.dim.value.data
    for out in op.outs:
        check_nesting(s, op, out, dim, len(op.axes.data))
    reason = f"{made_by(op)} {partial_values(kind)}, {needed_by(s, op)} a shard of dimension {dim}"
    explain(s, op, f"reduce-scatter {kind}", reason)
    write_fused(s, op, "reduce_scatter", f"{literal(kind)}, {dim}, {axes_text(op.axes.data)}")
    return None


def _all_gather(s: EmissionScope, op: dist.AllGatherOp) -> Text:
    if is_trivial(s, op):
        return None
    dim = op.dim.value.data
    explain(s, op, "all-gather", f"{needed_by(s, op)} all of dimension {dim} of {names_of(op)}")
    tail = f"{dim}, {axes_text(op.axes.data)}{gathered_sizes(s, op, dim)}"
    write_fused(s, op, "all_gather", tail)
    return None


def _all_slice(s: EmissionScope, op: dist.AllSliceOp) -> Text:
    if is_trivial(s, op):
        return None
    dim = op.dim.value.data
    for out in op.outs:
        check_nesting(s, op, out, dim, len(op.axes.data))
    s.note(f"own shard of dimension {dim} {over_axes(s, op.axes.data)}, no communication: "
           f"{needed_by(s, op)} no more")  # fmt: skip
    s.left(op)
    write_each(s, op, lambda v, _: call(s, "all_slice", v, f"{dim}, {axes_text(op.axes.data)}"))
    return None


def _all_to_all(s: EmissionScope, op: dist.AllToAllOp) -> Text:
    if is_trivial(s, op):
        return None
    split, concat = op.split.value.data, op.concat.value.data
    for out in op.outs:
        check_nesting(s, op, out, split, len(op.axes.data))
    explain(s, op, "all-to-all", f"{needed_by(s, op)} {names_of(op)} split in dimension {split}, "
         f"not {concat}")  # fmt: skip
    tail = f"{split}, {concat}, {axes_text(op.axes.data)}{gathered_sizes(s, op, concat)}"
    write_fused(s, op, "all_to_all", tail)
    return None


def _exchange(s: EmissionScope, op: dist.ExchangeOp) -> Text:
    assert s.mesh is not None
    s.use("moves")
    explain(s, op, "exchange", f"{needed_by(s, op)} {names_of(op)} split otherwise")

    def text(v: SSAValue, out: SSAValue) -> str:
        shape = tuple_text(list(map(str, s.global_shape(v))))
        ends = [
            tuple_text([axes_text(s.axes(x, d)) for d in range(len(s.global_shape(x)))])
            for x in (v, out)
        ]
        return f"moves.exchange(mesh, {s.operand(v)}, {shape}, {', '.join(ends)})"

    write_each(s, op, text)
    return None


def _replicated_to_partial(s: EmissionScope, op: dist.ReplicatedToPartialOp) -> Text:
    if is_trivial(s, op):
        return None
    if op.reduction.data != "sum":
        for v, out in zip(op.values, op.outs, strict=True):
            s.operand(v)
            s.same(out, v)
        return None
    s.use("ops")
    s.note(
        f"a partial sum {over_axes(s, op.axes.data)}, no communication: zeros but on the first rank"
    )
    s.left(op)
    write_each(
        s, op, lambda v, _: f"ops.on_first_rank(mesh, {s.operand(v)}, {axes_text(op.axes.data)})"
    )
    return None


def _reinterpret(s: EmissionScope, op: dist.ReinterpretOp) -> Text:
    for v, out in zip(op.values, op.outs, strict=True):
        s.operand(v)
        s.same(out, v)
    return None


def _sharded_to_partial(s: EmissionScope, op: dist.ShardedToPartialOp) -> Text:
    if is_trivial(s, op):
        return None
    dim = op.dim.value.data
    s.use("ops")
    s.note(f"a partial sum {over_axes(s, op.axes.data)}, no communication: zeros but in the rank's "
           f"own shard of dimension {dim}")  # fmt: skip
    s.left(op)

    def text(v: SSAValue, out: SSAValue) -> str:
        total = gathered_size(s, op, v, out, dim)
        tail = f", total={total}" if total else ""
        return f"ops.pad(mesh, {s.operand(v)}, {dim}, {axes_text(op.axes.data)}{tail})"

    write_each(s, op, text)
    return None


def _wait(s: EmissionScope, op: dist.WaitOp) -> Text:
    assert s.mesh is not None
    if not op.started.moves(s.mesh):
        for v, out in zip(op.values, op.outs, strict=True):
            s.same(out, v)
        return None
    right = f"{s.once(op.values[0])}.wait()"
    if s.in_lists(op.outs):
        results = s.names.new("results")
        s.line(f"{results} = {right}")
        s.bind(op.outs, results, op)
        return None
    targets = [s.result(o, op).name if s.is_read(o) else "_" for o in op.outs]
    line = f"{', '.join(targets)} = {right}"
    if len(line) < 96:
        s.line(line)
    else:
        s.lines += join_items("(", targets, f") = {right}", s.indent)
    return None


TORCH: dict[type[Operation], Entry] = {
    dist.AllReduceOp: _all_reduce,
    dist.ReduceScatterOp: _reduce_scatter,
    dist.AllGatherOp: _all_gather,
    dist.AllSliceOp: _all_slice,
    dist.AllToAllOp: _all_to_all,
    dist.ExchangeOp: _exchange,
    dist.ReplicatedToPartialOp: _replicated_to_partial,
    dist.ShardedToPartialOp: _sharded_to_partial,
    dist.ReinterpretOp: _reinterpret,
    dist.WaitOp: _wait,
}
