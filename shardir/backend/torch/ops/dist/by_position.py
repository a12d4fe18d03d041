"""Collectives from or to one position of a group, and transfers between two positions."""

from xdsl.ir import Operation, SSAValue

from shardir.analysis.causes import producer, readers
from shardir.backend.torch.emit.names import axes_text, listed_names, tuple_text
from shardir.backend.torch.emit.origins import origin
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.dist.comments import (
    explain,
    names_of,
    needed_by,
    over_axes,
    reader_text,
)
from shardir.backend.torch.ops.dist.shards import check_nesting, gathered_size
from shardir.backend.torch.ops.dist.text import call, is_trivial, write_each
from shardir.diagnostics import size_text
from shardir.dialects import dist
from shardir.dialects.nn.types import size_of


def _broadcast(s: EmissionScope, op: dist.BroadcastFromRootOp) -> Text:
    if is_trivial(s, op):
        return None
    root = op.root.value.data
    explain(s, op, f"broadcast from position {root}", f"{needed_by(s, op)} {names_of(op)}")
    write_each(s, op, lambda v, _: call(s, "broadcast", v, f"{root}, {axes_text(op.axes.data)}"))
    return None


def _gather(s: EmissionScope, op: dist.GatherToRootOp) -> Text:
    if is_trivial(s, op):
        return None
    dim, root = op.dim.value.data, op.root.value.data
    explain(s, op, f"gather to position {root}", f"{needed_by(s, op)} all of dimension {dim} there")

    def text(v: SSAValue, out: SSAValue) -> str:
        total = gathered_size(s, op, v, out, dim)
        tail = f", total={total}" if total else ""
        return call(s, "gather", v, f"{dim}, {root}, {axes_text(op.axes.data)}{tail}")

    write_each(s, op, text)
    return None


def _scatter(s: EmissionScope, op: dist.ScatterFromRootOp) -> Text:
    if is_trivial(s, op):
        return None
    dim, root = op.dim.value.data, op.root.value.data
    for out in op.outs:
        check_nesting(s, op, out, dim, len(op.axes.data))
    explain(
        s, op, f"scatter from position {root}", f"{needed_by(s, op)} a shard of dimension {dim}"
    )
    write_each(
        s, op, lambda v, _: call(s, "scatter", v, f"{dim}, {root}, {axes_text(op.axes.data)}")
    )
    return None


def _permute(s: EmissionScope, op: dist.PermuteOp) -> Text:
    ends = zip(op.pairs.data[::2], op.pairs.data[1::2], strict=True)
    pairs = tuple_text([f"({a}, {b})" for a, b in ends])
    explain(s, op, "permute", f"{needed_by(s, op)} the value of another rank")

    def text(v: SSAValue, out: SSAValue) -> str:
        tail = f"{pairs}, {axes_text(op.axes.data)}"
        even = all(s.is_even(v, d) for d in range(len(s.shape_of(v))))
        return call(s, "permute", v, tail if even else f"{tail}, {tuple_text(s.sizes(out))}")

    write_each(s, op, text)
    return None


def _ends(s: EmissionScope, op: dist.SendOp | dist.RecvOp) -> str:
    return f"{op.source.value.data}, {op.target.value.data}, {axes_text(op.axes.data)}"


def _send(s: EmissionScope, op: dist.SendOp) -> Text:
    number = size_text(size_of(op.value))
    ends = f"from position {op.source.value.data} to {op.target.value.data}"
    cause = origin(producer(op.value))
    s.note(f"send {ends} {over_axes(s, op.axes.data)}, {number}: {cause} is used there")
    s.line(f"rt.send(mesh, {s.operand(op.value)}, {_ends(s, op)})")
    s.source_line = None
    return None


def _recv(s: EmissionScope, op: dist.RecvOp) -> Text:
    number = size_text(size_of(op.out))
    users = listed_names(list(dict.fromkeys(map(reader_text, readers(op.out)))) or ["no op"], 2)
    s.note(f"receive at position {op.target.value.data} from {op.source.value.data} "
           f"{over_axes(s, op.axes.data)}, {number}: for {users}")  # fmt: skip
    s.source_line = None
    return f"rt.recv(mesh, {tuple_text(s.sizes(op.out))}, {s.dtype(op.out)}, {_ends(s, op)})"


TORCH: dict[type[Operation], Entry] = {
    dist.BroadcastFromRootOp: _broadcast,
    dist.GatherToRootOp: _gather,
    dist.ScatterFromRootOp: _scatter,
    dist.PermuteOp: _permute,
    dist.SendOp: _send,
    dist.RecvOp: _recv,
}
