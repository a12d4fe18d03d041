"""Ops that move elements."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import dims_of


def _reshape(s: EmissionScope, op: nn.ReshapeOp) -> Text:
    if s.shape_of(op.x) == s.shape_of(op.out) and s.global_shape(op.x) == s.global_shape(op.out):
        return op.x
    x = s.operand(op.x)
    uneven = [d for d in range(len(s.shape_of(op.out))) if not s.is_even(op.out, d)]
    sizes = s.sizes(op.out)
    if len(uneven) == 1 and all(t.isdecimal() and t != "0" for i, t in enumerate(sizes)
                                if i != uneven[0]):  # fmt: skip
        sizes[uneven[0]] = "-1"
    return f"{x}.reshape({tuple_text(sizes)})" if sizes else f"{x}.reshape(())"


def _transpose(s: EmissionScope, op: nn.TransposeOp) -> Text:
    rank = len(s.shape_of(op.x))
    perm = dims_of(op.properties, "perm", rank)
    moved = [d for d in range(rank) if perm[d] != d]
    x = s.operand(op.x)
    if not moved:
        return op.x
    if moved == [rank - 2, rank - 1]:
        return f"{x}.mT"
    if len(moved) == 2:
        return f"{x}.transpose({moved[0]}, {moved[1]})"
    return f"{x}.permute({tuple_text(list(map(str, perm)))})"


def _broadcast(s: EmissionScope, op: nn.BroadcastOp) -> Text:
    rank = len(s.shape_of(op.out))
    dims = dims_of(op.properties, "dims", rank)
    sizes = s.sizes(op.out)
    if s.number(op.x) is not None:
        return s.full(sizes, op.x)
    if dims == tuple(range(rank)) and s.global_shape(op.x) == s.global_shape(op.out):
        return op.x
    x, order = s.operand(op.x), sorted(range(len(dims)), key=lambda i: dims[i])
    if order != list(range(len(dims))):
        x = f"{x}.permute({tuple_text(list(map(str, order)))})"
    first = rank - len(dims)
    if sorted(dims) != list(range(first, rank)):  # not numpy's rule: index with None
        where = [":" if d in dims else "None" for d in range(min(dims, default=0), rank)]
        x = f"{x}[{', '.join(where)}]" if dims else x
    return f"{x}.expand({tuple_text(sizes)})"


TORCH: dict[type[Operation], Entry] = {
    nn.ReshapeOp: _reshape,
    nn.TransposeOp: _transpose,
    nn.BroadcastOp: _broadcast,
}
