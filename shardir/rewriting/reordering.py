"""Patterns that move a collective past an op, for passes that simplify communication.

move_after_reduction     %t = transpose (all_reduce %x)      ->    all_reduce (transpose %x)
move_before_broadcast    %z = all_gather (broadcast %x)      ->    broadcast (all_gather %x)
move_after_accumulation  %t = accumulate (all_reduce %x)     ->    all_reduce (accumulate %x)
"""

from dataclasses import replace
from typing import TypeGuard

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.collectives import AxisState
from shardir.compat.xdsl import operands_of, set_type
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import axis_of, dims_of, int_attr
from shardir.dialects.nn.types import size_of
from shardir.dialects.text import word
from shardir.dialects.train import AccumulateOp
from shardir.rewriting.patterns import at_each
from shardir.rewriting.rewriter import Rewriter, erase


@at_each(TensorOp)
def move_after_reduction(op: TensorOp) -> bool:
    """%y = dist.all_reduce %x; %t = nn.transpose %y    ->    %y = nn.transpose %x;
    %t = dist.all_reduce %y

    Applies to every op that only moves elements, if the reduction then precedes a sum or a slice
    with which another pattern merges it.
    """
    reduce = operands_of(op)[0].owner if len(operands_of(op)) == 1 else None
    if (
        not isinstance(reduce, dist.AllReduceOp)
        or len(reduce.values) != 1
        or not _moved_operand(op)
    ):
        return False
    following: Operation | None = op
    while following is not None and _moved_operand(following) is not None:
        following = following.results[0].get_user_of_unique_use()
    if not isinstance(following, nn.AddOp | dist.AllSliceOp):
        return False
    y = op.results[0]
    before, after, out = (dist.layout_of(v) for v in (reduce.values[0], reduce.outs[0], y))
    assert before is not None and after is not None and out is not None
    assert isinstance(y.type, TensorType)
    if out.partial != after.partial:
        return False  # the op itself makes a partial value, such as a slice of a split dimension
    mesh = dist.find_mesh(op, out.mesh)
    if any(mesh.overlap(a, b) for a in before.partial for b in out.used):
        return False  # the devices with partial values hold different shards afterwards
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


def _moved_operand(op: Operation) -> SSAValue | None:
    """Return the operand of an op that only moves elements, if the operand has no other use and the
    result has no more elements; otherwise None."""
    if not isinstance(op, TensorOp) or len(op.operands) != 1 or len(op.results) != 1:
        return None
    x, layout = op.operands[0], dist.layout_of(op.results[0])
    if layout is None or op.factors(dist.find_mesh(op, layout.mesh)).linear != "any":
        return None
    is_only_use = x.get_user_of_unique_use() is op
    return x if is_only_use and size_of(op.results[0]) <= size_of(x) else None


@at_each(AccumulateOp)
def move_after_accumulation(op: AccumulateOp) -> bool:
    """%y = dist.all_reduce <sum> %x; %t = train.accumulate %y    ->    %t = train.accumulate %x,
    and after the loop %z = dist.all_reduce <sum> %t

    Applies to a reduce-scatter too, if %y has no other use.
    """
    reduce = op.x.owner
    if not reduces_sum(reduce) or len(reduce.values) != 1 or dist.is_started(reduce):
        return False
    if op.x.get_user_of_unique_use() is not op:
        return False
    rewriter = Rewriter().after(op)
    rewriter.location = reduce.location
    new = rewriter.create(
        type(reduce), [op.out], [op.out.type], reduce.properties, reduce.attributes, [op.out]
    )
    op.out.replace_uses_with_if(new.outs[0], lambda use: use.operation is not new)
    op.operands[0] = reduce.values[0]
    set_type(op.out, reduce.values[0].type)
    erase(reduce)
    return True


def reduces_sum(op: Operation | Block) -> TypeGuard[dist.CollectiveOp]:
    """Whether an op is a collective that adds partial sums."""
    if not isinstance(op, dist.CollectiveOp) or not op.record.reduces:
        return False
    return op.properties["reduction"] == word(dist.ReductionAttr, "sum")


@at_each(dist.CollectiveOp)
def move_before_broadcast(op: dist.CollectiveOp) -> bool:
    """%y = nn.broadcast %x; %z = dist.all_gather %y    ->    %y = dist.all_gather %x;
    %z = nn.broadcast %y

    Applies to every collective that only moves shards, if %x is smaller. Nothing is communicated if
    %x is repeated along the moved dimension: %x lacks the dimension, or has size 1 there.
    """
    if not _only_moves_shards(op) or len(op.values) != 1 or dist.is_started(op):
        return False
    maker = op.values[0].owner
    if not isinstance(maker, nn.BroadcastOp):
        return False
    x, (out,) = maker.x, op.outs
    source, target, layout = (dist.layout_of(v) for v in (maker.out, out, x))
    assert source is not None and target is not None and layout is not None
    assert isinstance(x.type, TensorType)
    rank = len(target.dims)
    mesh = dist.find_mesh(op, target.mesh)
    dims, shape = dims_of(maker.properties, "dims", rank), dist.global_shape(x.type, mesh)
    sizes = dist.global_shape(maker.out.type, mesh)
    shared = {d for d, n in zip(dims, shape, strict=True) if n == sizes[d]}
    moved = {d for d in range(rank) if source.dims[d] != target.dims[d]}
    smaller = size_of(x) < size_of(maker.out)
    if layout.partial or not smaller or not (moved <= shared or moved.isdisjoint(shared)):
        return False
    rewriter = Rewriter().before(op)
    if moved & shared:
        shards = [target.dims[d] if d in moved else layout.dims[i] for i, d in enumerate(dims)]
        new_layout = replace(layout, dims=tuple(shards))
        along = {n: axis_of(op.properties, n, rank) for n in ALONG if n in op.properties}
        new = rewriter.create(
            type(op), [x], [dist.local(x.type.element_type, shape, new_layout, mesh)],
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


def _only_moves_shards(op: Operation) -> TypeGuard[dist.CollectiveOp]:
    """Whether an op is a collective that communicates shards and keeps the global value."""
    if not isinstance(op, dist.CollectiveOp):
        return False
    record = op.record
    return record.communicates and record.planned and record.start in (AxisState.SHARDED, None)
