"""simplify-communication: fewer and smaller collectives for the same values.

    %y = dist.all_reduce <sum> %x over <a>
    %z = dist.all_slice %y dim 0 over <a>     ->    %z = dist.reduce_scatter <sum> %x dim 0 over <a>

PATTERNS is the table of what is done, each with the IR before `->` after.

1. Never more bytes and never more collectives.
2. Running it twice changes nothing the second time.
3. A collective that is `async` stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.collectives import AxisState, between
from shardir.cost.seconds import size_of
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import axis_of, dims_of, int_attr
from shardir.dialects.text import word
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.rewriter import Rewriter, erase, set_type


@dataclass(frozen=True)
class SimplifyCommunication(LocalPass):
    """Merges, shrinks and removes collectives."""

    name = "simplify-communication"

    def rewrite(self, f: Function) -> None:
        while any([pattern(f.block) for pattern in PATTERNS]):
            pass


Pattern = Callable[[Block], bool]
"""Rewrites a block where it applies, and returns whether it did."""


def _at_each_op(pattern: Callable[[Operation], bool]) -> Pattern:
    def at_each(block: Block) -> bool:
        return any([op.parent is block and pattern(op) for op in list(block.ops)])

    at_each.__name__, at_each.__doc__ = pattern.__name__, pattern.__doc__
    return at_each


def unused(block: Block) -> bool:
    """%y = dist.all_gather %x, and %y has no use    ->    nothing"""
    changed = False
    op = block.last_op
    while op is not None:
        before = op.prev_op
        if isinstance(op, dist.CollectiveOp) and all(v.first_use is None for v in op.results):
            erase(op)
            changed = True
        op = before
    return changed


def equal(block: Block) -> bool:
    """%y = dist.all_gather %x; %z = dist.all_gather %x    ->    %y = dist.all_gather %x

    Not where `recompute` has made the second one on purpose.
    """
    seen: dict[tuple[object, ...], dist.CollectiveOp] = {}
    changed = False
    for op in list(block.ops):
        if (
            not isinstance(op, dist.CollectiveOp)
            or RECOMPUTE in op.attributes
            or dist.is_started(op)
        ):
            continue
        props = tuple(sorted((k, str(v)) for k, v in op.properties.items() if k != "fusion"))
        key = (type(op), tuple(op.operands), props, tuple(str(v.type) for v in op.results))
        first = seen.setdefault(key, op)
        if first is not op:
            Rewriter.replace(op, first.results)
            changed = True
    return changed


@_at_each_op
def gathered_and_sliced(op: Operation) -> bool:
    """%y = dist.all_gather %x dim d; %z = dist.all_slice %y dim d    ->    %x"""
    first = _one_before(op)
    if not isinstance(first, dist.CollectiveOp) or not isinstance(op, dist.AllSliceOp):
        return False
    starts = first.record.start, first.record.end
    if starts != (AxisState.SHARDED, AxisState.REPLICATED) or first.properties["dim"] != op.dim:
        return False
    op.results[0].replace_all_uses_with(first.values[0])
    erase(op)
    return True


@_at_each_op
def reduced_and_sliced(op: Operation) -> bool:
    """%y = dist.all_reduce %x; %z = dist.all_slice %y dim d    ->
    %z = dist.reduce_scatter %x dim d"""
    first = _one_before(op)
    if not isinstance(first, dist.AllReduceOp) or not isinstance(op, dist.AllSliceOp):
        return False
    if first.outs[0].get_user_of_unique_use() is not op:
        return False
    kind = dist.OPS[between(AxisState.PARTIAL, AxisState.SHARDED).name]
    kind = dist.OPS[between(AxisState.PARTIAL, AxisState.SHARDED).name]
    new = Rewriter().before(op).create(
        kind, first.values, [op.outs[0].type], {**first.properties, "dim": op.dim}
    )  # fmt: skip
    new.location = first.location
    Rewriter.replace(op, new.outs)
    erase(first)
    return True


def _one_before(op: Operation) -> dist.CollectiveOp | None:
    """The collective that makes the only operand of another one over the same axes, and makes
    nothing else."""
    if not isinstance(op, dist.CollectiveOp) or len(op.values) != 1:
        return None
    first = op.values[0].owner
    if not isinstance(first, dist.CollectiveOp) or len(first.values) != 1:
        return None
    return first if first.axes == op.axes else None


@_at_each_op
def sum_of_reduced(op: Operation) -> bool:
    """%p = dist.all_reduce <sum> %x; %q = dist.all_reduce <sum> %y; %z = nn.add %p, %q
    ->  %s = nn.add %x, %y; %z = dist.all_reduce <sum> %s"""
    if not isinstance(op, nn.AddOp) or not _go_together(op.lhs, op.rhs):
        return False
    a, b, after = op.lhs.owner, op.rhs.owner, op.out.type
    assert isinstance(a, dist.CollectiveOp) and isinstance(b, dist.CollectiveOp)
    if op.lhs.type != after:
        return False
    new = Rewriter().after(op).create(type(a), [op.out], [after], a.properties, names=[op.out])
    op.out.replace_uses_with_if(new.outs[0], lambda use: use.operation is not new)
    op.operands[0], op.operands[1] = a.values[0], b.values[0]
    set_type(op.out, a.values[0].type)
    erase(a)
    erase(b)
    return True


@_at_each_op
def reduced_next_to_each_other(op: Operation) -> bool:
    """(%z + %p) + %q    ->    (%p + %q) + %z, where %p and %q are reduced over the same devices"""
    if not isinstance(op, nn.AddOp):
        return False
    for sum, y in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
        inner = sum.owner
        if not isinstance(inner, nn.AddOp) or sum.get_user_of_unique_use() is not op:
            continue
        for x, z in ((inner.lhs, inner.rhs), (inner.rhs, inner.lhs)):
            if _go_together(x, y) and x.type == z.type == sum.type == op.out.type:
                Rewriter().before(op).move(inner)
                inner.operands[0], inner.operands[1] = x, y
                op.operands[0], op.operands[1] = sum, z
                return True
    return False


def _go_together(x: SSAValue, y: SSAValue) -> bool:
    """Whether both are sums over the same devices, each for one user."""
    a, b = x.owner, y.owner
    if a is b or not (_is_reduced(a) and _is_reduced(b)):
        return False
    alike = type(a) is type(b) and a.properties == b.properties
    if not alike or len(a.values) != 1 or len(b.values) != 1:
        return False
    alone = x.get_user_of_unique_use() is not None and y.get_user_of_unique_use() is not None
    return alone and a.values[0].type == b.values[0].type


def _is_reduced(op: Operation | Block) -> TypeGuard[dist.CollectiveOp]:
    """Whether a collective adds up partial sums."""
    if not isinstance(op, dist.CollectiveOp) or not op.record.reduces:
        return False
    return op.properties["reduction"] == word(dist.ReductionAttr, "sum")


@_at_each_op
def moved_after_reduced(op: Operation) -> bool:
    """%y = dist.all_reduce %x; %t = nn.transpose %y    ->    %y = nn.transpose %x;
    %t = dist.all_reduce %y

    So for all that only moves elements, where it leads to a sum or a slice that the reduction can
    then meet.
    """
    x = _mover(op)
    reduce = x.owner if x is not None else None
    if not isinstance(reduce, dist.AllReduceOp) or len(reduce.values) != 1:
        return False
    end: Operation | None = op
    while end is not None and _mover(end) is not None:
        end = end.results[0].get_user_of_unique_use()
    if not isinstance(end, nn.AddOp | dist.AllSliceOp):
        return False
    y, before = op.results[0], dist.layout_of(reduce.values[0])
    out = dist.layout_of(y)
    assert before is not None and out is not None and isinstance(y.type, TensorType)
    mesh = dist.find_mesh(op, out.mesh)
    if any(mesh.overlap(a, b) for a in before.partial for b in out.used):
        return False  # the devices that have addends hold different parts afterwards
    new = reduce.clone()
    set_type(new.results[0], y.type)
    new.results[0].name_hint = y.name_hint
    y.replace_all_uses_with(new.results[0])
    op.operands[0], new.operands[0] = reduce.values[0], y
    shape = dist.global_shape(y.type, mesh)
    partial = out.with_partial(before.partial, before.reduction)
    set_type(y, dist.local(y.type.element_type, shape, partial, mesh))
    Rewriter().after(op).insert(new)
    erase(reduce)
    return True


def _mover(op: Operation) -> SSAValue | None:
    """The operand of an op that only moves its elements, which nothing else uses, and makes no more
    of them."""
    if not isinstance(op, TensorOp) or len(op.operands) != 1 or len(op.results) != 1:
        return None
    x, layout = op.operands[0], dist.layout_of(op.results[0])
    if layout is None or op.factors(dist.find_mesh(op, layout.mesh)).linear != "any":
        return None
    alone = x.get_user_of_unique_use() is op
    return x if alone and size_of(op.results[0]) <= size_of(x) else None


@_at_each_op
def moved_before_repeated(op: Operation) -> bool:
    """%y = nn.broadcast %x; %z = dist.all_gather %y    ->    %y = dist.all_gather %x;
    %z = nn.broadcast %y

    So for all that moves shards, where that is less; nothing is communicated where the dimension is
    one along which %x is repeated.
    """
    if not _moves_shards(op) or len(op.values) != 1 or dist.is_started(op):
        return False
    maker = op.values[0].owner
    if not isinstance(maker, nn.BroadcastOp):
        return False
    x, (out,) = maker.x, op.outs
    source, target, given = (dist.layout_of(v) for v in (maker.out, out, x))
    assert source is not None and target is not None and given is not None
    assert isinstance(x.type, TensorType)
    rank = len(target.dims)
    dims = dims_of(maker.properties, "dims", rank)
    moved = {d for d in range(rank) if source.dims[d] != target.dims[d]}
    less = size_of(x) < size_of(maker.out)
    if given.partial or not less or not (moved <= {*dims} or moved.isdisjoint(dims)):
        return False
    rewriter = Rewriter().before(op)
    if moved & {*dims}:
        mesh = dist.find_mesh(op, target.mesh)
        shape = dist.global_shape(x.type, mesh)
        layout = replace(given, dims=tuple(target.dims[d] for d in dims))
        along = {n: axis_of(op.properties, n, rank) for n in ALONG if n in op.properties}
        new = rewriter.create(
            type(op), [x], [dist.local(x.type.element_type, shape, layout, mesh)],
            {**op.properties, **{n: int_attr(dims.index(d)) for n, d in along.items()}},
            op.attributes, names=[x],
        )  # fmt: skip
        x = new.outs[0]
    rewriter.location = maker.location
    repeated = rewriter.create(
        nn.BroadcastOp, [x], [out.type], maker.properties, maker.attributes, names=[out]
    )
    Rewriter.replace(op, repeated.results)
    if maker.out.first_use is None:
        erase(maker)
    return True


ALONG = ("dim", "split", "concat")
"""The properties of collectives that are dimensions."""


def _moves_shards(op: Operation) -> TypeGuard[dist.CollectiveOp]:
    """Whether a collective communicates shards of a value that is the same afterwards."""
    if not isinstance(op, dist.CollectiveOp):
        return False
    record = op.record
    return record.communicates and record.planned and record.start in (AxisState.SHARDED, None)


PATTERNS: tuple[Pattern, ...] = (
    unused, equal, gathered_and_sliced, reduced_and_sliced, sum_of_reduced,
    reduced_next_to_each_other, moved_after_reduced, moved_before_repeated,
)  # fmt: skip
