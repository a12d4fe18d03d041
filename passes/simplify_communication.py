"""simplify-communication: fewer and smaller collectives for the same values.

    %y = dist.all_reduce <sum> %x over <a>
    %z = dist.all_slice %y dim 0 over <a>     ->    %z = dist.reduce_scatter <sum> %x dim 0 over <a>

PATTERNS is the table of the rewrites, each with the IR before `->` after;
shardir/rewriting/reordering.py has three of them.

1. Never more bytes and never more collectives.
2. Running it twice changes nothing the second time.
3. A collective that is `async` does not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from xdsl.ir import Operation, SSAValue

from shardir.algebra.collectives import AxisState, between
from shardir.algebra.estimates import IMPROVEMENT
from shardir.compat.xdsl import operands_of, set_type, type_of
from shardir.cost.seconds import cost_of
from shardir.dialects import dist, nn
from shardir.dialects.blocks import of_kind
from shardir.dialects.symbols import fixed_symbols
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.patterns import Pattern, apply_patterns, at_each
from shardir.rewriting.reordering import (
    move_after_accumulation,
    move_after_reduction,
    move_before_broadcast,
    reduces_sum,
)
from shardir.rewriting.rewriter import Rewriter, erase


@dataclass(frozen=True)
class SimplifyCommunication(LocalPass):
    """Merges, shrinks and removes collectives."""

    name = "simplify-communication"

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        with fixed_symbols():
            super().rewrite_all(functions)

    def rewrite(self, f: Function) -> None:
        apply_patterns(PATTERNS, f.block)


def erase_unused(ops: Sequence[Operation]) -> bool:
    """%y = dist.all_gather %x, and %y has no use    ->    nothing"""
    changed = False
    for op in reversed(of_kind(ops, dist.CollectiveOp)):
        if all(v.first_use is None for v in op.results):
            erase(op)
            changed = True
    return changed


def merge_equal(ops: Sequence[Operation]) -> bool:
    """%y = dist.all_gather %x; %z = dist.all_gather %x -> %y = dist.all_gather %x

    Collectives with the mark `recompute` stay: they repeat a collective so that memory is freed.
    """
    seen: dict[tuple[object, ...], dist.CollectiveOp] = {}
    changed = False
    for op in of_kind(ops, dist.CollectiveOp):
        if RECOMPUTE in op.attributes or dist.is_started(op):
            continue
        props = frozenset((k, v) for k, v in op.properties.items() if k != "fusion")
        key = (type(op), operands_of(op), props, tuple([type_of(v) for v in op.results]))
        first = seen.setdefault(key, op)
        if first is not op:
            Rewriter.replace(op, first.results)
            changed = True
    return changed


@at_each(dist.AllSliceOp)
def cancel_gather_and_slice(op: dist.AllSliceOp) -> bool:
    """%y = dist.all_gather %x dim d; %z = dist.all_slice %y dim d    ->    %x"""
    first = _producer_over_same_axes(op)
    if first is None:
        return False
    starts = first.record.start, first.record.end
    if starts != (AxisState.SHARDED, AxisState.REPLICATED) or first.properties["dim"] != op.dim:
        return False
    op.results[0].replace_all_uses_with(first.values[0])
    erase(op)
    return True


@at_each(dist.AllGatherOp)
def cancel_slice_and_gather(op: dist.AllGatherOp) -> bool:
    """%y = dist.all_slice %x dim d; %z = dist.all_gather %y dim d    ->    %x"""
    first = _producer_over_same_axes(op)
    if not isinstance(first, dist.AllSliceOp):
        return False
    if first.dim != op.dim or dist.is_started(op) or first.values[0].type != op.outs[0].type:
        return False
    op.outs[0].replace_all_uses_with(first.values[0])
    erase(op)
    return True


@at_each(dist.AllSliceOp)
def scatter_reduced_slice(op: dist.AllSliceOp) -> bool:
    """%y = dist.all_reduce %x; %z = dist.all_slice %y dim d    ->
    %z = dist.reduce_scatter %x dim d

    Unless a cluster's reduce-scatters are so slow that this takes longer.
    """
    first = _producer_over_same_axes(op)
    if not isinstance(first, dist.AllReduceOp):
        return False
    if first.outs[0].get_user_of_unique_use() is not op:
        return False
    kind = dist.OPS[between(AxisState.PARTIAL, AxisState.SHARDED).name]
    new = Rewriter().before(op).create(
        kind, first.values, [op.outs[0].type], {**first.properties, "dim": op.dim},
        first.attributes,
    )  # fmt: skip
    new.location = first.location
    if _seconds(first) < _seconds(new) * IMPROVEMENT:
        erase(new)
        return False
    Rewriter.replace(op, new.outs)
    erase(first)
    return True


def _seconds(op: dist.CollectiveOp) -> float:
    """Return the estimated time of a collective."""
    layout = dist.layout_of(op.outs[0])
    assert layout is not None
    cost = cost_of(op, dist.find_mesh(op, layout.mesh))
    return cost.seconds if cost is not None else 0.0


def _producer_over_same_axes(op: dist.CollectiveOp) -> dist.CollectiveOp | None:
    """Return the collective over the same axes whose only result is the only operand of `op`."""
    if len(op.values) != 1:
        return None
    first = op.values[0].owner
    if not isinstance(first, dist.CollectiveOp) or len(first.values) != 1:
        return None
    return first if first.axes == op.axes else None


@at_each(nn.AddOp)
def reduce_sum_once(op: nn.AddOp) -> bool:
    """%p = dist.all_reduce <sum> %x; %q = dist.all_reduce <sum> %y; %z = nn.add %p, %q
    ->  %s = nn.add %x, %y; %z = dist.all_reduce <sum> %s"""
    if not _are_equal_sums(op.lhs, op.rhs):
        return False
    a, b, after = op.lhs.owner, op.rhs.owner, op.out.type
    assert isinstance(a, dist.CollectiveOp) and isinstance(b, dist.CollectiveOp)
    if op.lhs.type != after:
        return False
    rewriter = Rewriter().after(op)
    new = rewriter.create(type(a), [op.out], [after], a.properties, op.attributes, names=[op.out])
    op.out.replace_uses_with_if(new.outs[0], lambda use: use.operation is not new)
    op.operands[0], op.operands[1] = a.values[0], b.values[0]
    set_type(op.out, a.values[0].type)
    erase(a)
    erase(b)
    return True


@at_each(nn.AddOp)
def group_reduced_addends(op: nn.AddOp) -> bool:
    """((%z + %p) + %y) + %q -> (%p + %q) + (%z + %y)

    %p and %q are reduced over the same axes, and the sums between them are used once.
    """
    left, right = ([x for x in _addends(v) if reduces_sum(x.owner)] for v in (op.lhs, op.rhs))
    type, beside = op.out.type, (op.lhs, op.rhs)
    pairs = (p for p in product(left, right) if p[0].type == type and _are_equal_sums(*p))
    if (pair := next(pairs, beside)) == beside:
        return False
    rewriter, free = Rewriter().before(op), list[nn.AddOp]()
    for v in pair:
        user = v.get_user_of_unique_use()
        if user is not op and isinstance(user, nn.AddOp):
            user.out.replace_all_uses_with(user.rhs if user.lhs is v else user.lhs)
            free.append(user)
    remaining = [v for v in op.operands if v not in pair]
    for sum, operands in zip(free, (pair, remaining), strict=False):
        rewriter.move(sum)
        sum.operands[0], sum.operands[1] = operands
    op.operands[0], op.operands[1] = free[0].out, free[1].out if len(free) > 1 else remaining[0]
    return True


def _addends(v: SSAValue) -> list[SSAValue]:
    """Return a value and, recursively, the addends of sums of its type that are used once."""
    addends = [v]
    for x in addends:
        op = x.owner
        is_sum = isinstance(op, nn.AddOp) and x.type == op.lhs.type == op.rhs.type
        if is_sum and x.get_user_of_unique_use() is not None:
            addends += op.operands
    return addends


def _are_equal_sums(x: SSAValue, y: SSAValue) -> bool:
    """Whether both values are the results of equal reductions of sums, and each is used once."""
    a, b = x.owner, y.owner
    if a is b or not (reduces_sum(a) and reduces_sum(b)):
        return False
    if type(a) is not type(b) or a.properties != b.properties:
        return False
    if len(a.values) != 1 or len(b.values) != 1 or a.values[0].type != b.values[0].type:
        return False
    return x.get_user_of_unique_use() is not None and y.get_user_of_unique_use() is not None


PATTERNS: tuple[Pattern, ...] = (
    erase_unused, merge_equal, cancel_gather_and_slice, cancel_slice_and_gather,
    scatter_reduced_slice, reduce_sum_once, group_reduced_addends, move_after_reduction,
    move_before_broadcast, move_after_accumulation,
)  # fmt: skip
