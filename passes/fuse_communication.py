"""fuse-communication: fuse collectives of one kind where that saves time; layer by layer first.

    %a1 = dist.all_reduce <sum> %a over <dp>
    %b1 = dist.all_reduce <sum> %b over <dp>
 -> %a1, %b1 = dist.all_reduce <sum> %a, %b over <dp>

1. Fused collectives have one kind, one reduction, one element type and equal axes, and are in one
   loop or all outside of loops.
2. The fused collective stands where its last member was, and before the first use of any result.
3. Collectives with equal `fusion` indices are fused, whatever their size.
4. Collectives without an index are fused where a bucket saves more in latencies than packing its
   values costs, by the time model of the mesh's cluster. Its operands have at most `max_bytes` (0:
   fuse by index alone). Fusing any two remaining collectives would gain nothing. Collectives whose
   results are used only after the update (in a function without update: by the return) are fused
   first: the search counts their buckets.
5. A cast of a collective's result moves to its own first use, so that the first use of the
   collective is later. Casts and collectives that read a fused collective's results move after it.
6. A collective that is `async` does not change.
7. A reduction after the first update moves before it if it reads no value made from there on. So do
   collectives whose results are only reduced, and slices, since some lead to reductions.
8. A reduction whose result is smaller than its operand (reduce-scatter) moves to where the operand
   is available, which frees the operand early. Reductions of one layer (a repeated part of their
   sequence) are fused first, then reductions of several layers, until a bucket is full: until its
   latency is small beside its time (cost/buckets.py).
9. A gather after the first update may wait if it reads a value from before the update, directly or
   through gathers, slices and casts, which move with it. Waiting gathers are fused where the first
   of their results is needed, in buckets that are full as in rule 8.
10. The gathers of a layer are fused where the first of them was, if the peak memory then stays
    within the larger of the peak before and the memory of a device of the cluster, or the budget of
    `choose-recompute`; otherwise in buckets of at most half as many bytes, and so on. Where no
    memory is known, the peak may grow by a thousandth, so that a bias can be gathered with its
    layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.analysis.repeats import MIN_BLOCKS, equal_blocks
from shardir.analysis.storages import Span
from shardir.analysis.updates import after_update, update_position
from shardir.compat.xdsl import operands_of
from shardir.cost.buckets import MAX_BUCKET_BYTES, Bucket, fuse, fuse_by_kind
from shardir.cost.collective_work import collective_work
from shardir.cost.memory import memory_of
from shardir.dialects import dist, nn
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.nn.types import size_of, unsharded_type
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.copying import copied
from shardir.rewriting.marks import allowed_memory
from shardir.rewriting.options import Bytes
from shardir.rewriting.rewriter import Rewriter, erase

WAITING = (dist.AllGatherOp, nn.ConvertOp, *dist.LOCAL)
"""Ops that move with a waiting gather, on the way from a value of before the update to its
operand."""

MAX_GROWTH = 1 + 1e-3
"""Bounds the growth of peak memory by buckets of gathers where no memory is known: room for the
biases of a layer, not for another weight."""


@dataclass(frozen=True)
class FuseCommunication(LocalPass):
    """Fuses collectives of a kind into one, by index and where that gains."""

    name = "fuse-communication"
    max_bytes: Bytes = MAX_BUCKET_BYTES
    """The maximum size of a bucket, in bytes on one device; 0 fuses by index alone."""

    def rewrite(self, f: Function) -> None:
        ops = f.ops
        for move in (_sink_casts, _reduce_before_updates, _reduce_early):
            if move(f.block, ops):
                ops = ops_of(f.block)
        if f.mesh is not None:
            for is_early in (False, True):
                while _fuse(f.block, ops, f.mesh, self.max_bytes, is_early):
                    ops = ops_of(f.block)  # the first uses of their operands are later now
            _gather_layers(f.op, ops, f.mesh, self.max_bytes)


def _sink_casts(block: Block, ops: Sequence[Operation]) -> bool:
    """Move casts of the results of collectives to their first uses; return whether there are such
    casts."""
    casts = [op for op in of_kind(ops, nn.ConvertOp) if isinstance(op.x.owner, dist.FusibleOp)]
    if not casts:
        return False
    at, loops = {op: i for i, op in enumerate(ops)}, Loops(ops)
    for op in casts:
        users = [loops.needed_at(u.operation, op) for u in op.out.uses]
        if users:
            op.detach()
            block.insert_op_before(op, min(users, key=at.__getitem__))
    return True


def _reduce_before_updates(block: Block, ops: Sequence[Operation]) -> bool:
    """Move reductions, the collectives before them, and slices before the first update, unless they
    read its results; return whether an op moved."""
    moved = False
    first = update_position(ops)
    updated = {v for op in ops[first:] for v in op.results}
    movable = [op for op in of_kind(ops[first:], dist.CollectiveOp) if not dist.is_started(op)]
    leading = set[Operation]()
    for op in reversed(movable):
        users = _users(op)
        if op.record.reduces or (users and leading.issuperset(users)):
            leading.add(op)
    for op in movable:
        leads = op in leading or not op.record.communicates
        if leads and updated.isdisjoint(op.operands):
            updated.difference_update(op.results)
            op.detach()
            block.insert_op_before(op, ops[first])
            moved = True
    return moved


def _shrinks(op: dist.FusibleOp) -> bool:
    """Whether a collective is a reduction whose results are smaller than its operands."""
    return (
        op.record.reduces and not dist.is_started(op)
        and sum(map(size_of, op.outs)) < sum(map(size_of, op.values))
    )  # fmt: skip


def _reduce_early(block: Block, ops: Sequence[Operation]) -> bool:
    """Move reductions that free memory to where their operands are available; return whether there
    are such reductions."""
    if not (shrinking := list(filter(_shrinks, of_kind(ops, dist.FusibleOp)))):
        return False
    at, loops = {op: i for i, op in enumerate(ops)}, Loops(ops)
    for op in shrinking:
        makers = [v.owner for v in op.values if isinstance(v.owner, Operation)]
        if len(makers) == len(op.values) and all(v.has_one_use() for v in op.values):
            there = max((loops.available_after(m, op) for m in makers), key=at.__getitem__)
            if loops.around(there) is loops.around(op) or there in loops.ends.values():
                op.detach()
                block.insert_op_after(op, there)
    return True


def _gathers(ops: Iterable[Operation]) -> list[dist.AllGatherOp]:
    """Return the gathers that may be fused with gathers of their layers."""
    gathers = of_kind(ops, dist.AllGatherOp)
    return [op for op in gathers if op.fusion is None and not dist.is_started(op)]


def _gather_layers(f: FuncOp, ops: Sequence[Operation], mesh: Mesh, max_bytes: int) -> None:
    """Fuse the gathers of each layer, within memory."""
    if len(_gathers(ops)) < MIN_BLOCKS:
        return
    limit = None
    while _merge_gathers(trial := copied(f), mesh, max_bytes):
        if limit is None:
            peak, allowed = memory_of(f, mesh).peak, allowed_memory(f, mesh)
            limit = max(peak, allowed) if allowed else peak * MAX_GROWTH
        if memory_of(trial, mesh).peak <= limit:
            _merge_gathers(f, mesh, max_bytes)
            break
        max_bytes //= 2


def _merge_gathers(f: FuncOp, mesh: Mesh, max_bytes: int) -> bool:
    """Fuse the gathers of each layer of a function, in buckets of at most `max_bytes` of results;
    return whether a bucket was made."""
    block = f.body.block
    ops = ops_of(block)
    numbered = (layer for repeats in equal_blocks(ops) for layer in repeats.blocks)
    layers = {op: i for i, layer in enumerate(numbered) for op in layer}
    loops, at = Loops(ops), {op: i for i, op in enumerate(ops)}
    gathers: list[Bucket] = []
    late = after_update(ops)
    for op in _gathers(layers):
        if late([op]):
            continue  # `_fuse` has fused the gathers that gain
        makers = [v.owner for v in op.values if isinstance(v.owner, Operation)]
        start = max((at[loops.available_after(m, op)] for m in makers), default=-1)
        size, kind = sum(map(size_of, op.outs)), (_fusion_key(op, loops), layers[op])
        after, times = Span(start, at[op] - 1), collective_work(op, mesh).times
        gathers.append(Bucket((at[op],), after, size, times, kind))
    merging = _Merging(block, ops, loops)
    for bucket in (buckets := fuse(gathers, max_bytes)):
        merging.add(bucket, early=True)
    return bool(buckets)


def _fuse(
    block: Block, ops: Sequence[Operation], mesh: Mesh, max_bytes: int, is_early: bool
) -> bool:
    """Fuse the collectives of a block that have an index, and the collectives that gain by it;
    return whether a bucket was made. Unless `is_early`, only collectives whose results are used
    after the update."""
    late = (lambda _: True) if is_early else after_update(ops)
    loops = Loops(ops)
    at = {op: i for i, op in enumerate(ops)}
    update = update_position(ops)
    indexed: list[Bucket] = []
    unindexed: list[Bucket] = []
    for op in of_kind(ops, dist.FusibleOp):
        if dist.is_started(op) or (op.fusion is None and not late([op])):
            continue
        size, times = sum(map(size_of, op.values)), collective_work(op, mesh).times
        waits = not is_early and _waits(op, at, update)
        start, kind = update - 1 if waits else at[op], _fusion_key(op, loops)
        after, limited = Span(start, _first_use(op, at, loops) - 1), waits or _shrinks(op)
        single = Bucket((at[op],), after, size, times, kind, limited, _leading_collectives(op, at))
        if op.fusion is not None:
            indexed.append(single)
        else:
            unindexed.append(single)
    if not (buckets := fuse_by_kind(indexed) or fuse(unindexed, max_bytes)):
        return False
    merging = _Merging(block, ops, loops)
    for bucket in buckets:
        merging.add(bucket)
    return True


def _waits(op: Operation, at: Mapping[Operation, int], update: int) -> bool:
    """Whether an op is a gather after the first update whose value exists before the update, but
    for gathers, slices and casts on its way."""
    if not isinstance(op, dist.AllGatherOp) or dist.is_started(op) or at[op] < update:
        return False
    pending = list(op.values)
    for v in pending:
        maker = v.owner
        if isinstance(maker, Operation) and at[maker] >= update:
            if not isinstance(maker, WAITING) or not _is_movable(maker):
                return False
            pending += maker.operands
    return True


def _users(op: Operation) -> list[Operation]:
    return [use.operation for v in op.results for use in v.uses]


def _is_movable(op: Operation | Block) -> TypeGuard[Operation]:
    """Whether an op on the result of a collective moves with the collective."""
    return isinstance(op, nn.ConvertOp) or (
        isinstance(op, dist.CollectiveOp) and not dist.is_started(op)
    )


def _first_use(op: Operation, at: Mapping[Operation, int], loops: Loops) -> int:
    """Return the position of the first use of a collective. Casts and collectives of its results,
    which may move in its loop, do not count: their first uses do."""
    users = [loops.needed_at(u, op) for u in _users(op)]
    positions = [_first_use(u, at, loops) if _is_movable(u) else at[u] for u in users]
    return min(positions, default=len(at))


def _leading_collectives(op: Operation, at: Mapping[Operation, int]) -> frozenset[int]:
    """Return the positions of the collectives that move along when an op moves up."""
    makers = dict.fromkeys([v.owner for v in operands_of(op) if _is_movable(v.owner)])
    pending = list(makers)
    for maker in pending:
        added = [v.owner for v in maker.operands if _is_movable(v.owner) and v.owner not in makers]
        makers.update(dict.fromkeys(added))
        pending += added
    return frozenset(at[maker] for maker in makers if isinstance(maker, dist.FusibleOp))


Key = tuple[type[Operation], frozenset[tuple[str, Attribute]], Attribute, Operation | None]


def _fusion_key(op: dist.FusibleOp, loops: Loops) -> Key:
    """Return the properties that fused collectives share, and their loop."""
    props = frozenset(op.properties.items())
    return type(op), props, unsharded_type(op.values[0]).element_type, loops.around(op)


class _Merging:
    """Replaces buckets of a block by one collective each."""

    def __init__(self, block: Block, ops: Sequence[Operation], loops: Loops):
        self.block, self.ops, self.loops = block, ops, loops
        self.at: dict[Operation, tuple[int, ...]] = {op: (i,) for i, op in enumerate(ops)}
        """Position as a tuple; an op moved behind another op extends that op's tuple."""
        self._last: dict[Operation, tuple[Operation, int]] = {}
        """The op moved last behind each op, and the number of ops moved behind it."""

    def add(self, bucket: Bucket, early: bool = False) -> None:
        """Replace the collectives of a bucket by one on all of their operands.

        It stands where the last member before the first needed result was (`early`: where the first
        member was), or where the last operand is available. Casts and collectives that make its
        operands move before it; casts and collectives of its results move after it.
        """
        at, end = self.at, bucket.after.end
        ops = [op for i in sorted(bucket.members) if isinstance(op := self.ops[i], dist.FusibleOp)]
        makers, roots = self._makers(ops)
        if early:
            there = min(ops, key=at.__getitem__)
        else:
            members = [op for op in ops if at[op][0] <= end]
            there = max((*members, *roots), key=at.__getitem__)
        for op in sorted((op for op in makers if at[op] > at[there]), key=at.__getitem__):
            op.detach()
            self._put_after(there, op)
        results = [v for op in ops for v in op.results]
        operands, types = [v for op in ops for v in op.values], [v.type for v in results]
        first = ops[0]
        new = (
            Rewriter()
            .before(first)
            .create(type(first), operands, types, first.properties, first.attributes, results)
        )
        for old, out in zip(results, new.results, strict=True):
            old.replace_all_uses_with(out)
        new.detach()
        self._put_after(there, new)
        users: set[Operation] = set()
        moving: list[Operation] = [new]
        for op in moving:
            more = {u for u in _users(op) if at[u] < at[new]} - users
            users |= more
            moving += more
        for op in sorted(users, key=at.__getitem__):
            op.detach()
            self._put_after(there, op)
        for op in ops:
            erase(op)

    def _put_after(self, there: Operation, op: Operation) -> None:
        """Insert an op behind `there`, and behind the ops that were inserted there before."""
        last, n = self._last.get(there, (there, 0))
        self.block.insert_op_after(op, last)
        self._last[there], self.at[op] = (op, n + 1), (*self.at[there], n)

    def _makers(self, ops: Iterable[Operation]) -> tuple[set[Operation], set[Operation]]:
        """Return the casts and collectives that make the operands of collectives, and the ops after
        which the operands of all of these are available."""
        makers, roots, pending = set[Operation](), set[Operation](), list(ops)
        for op in pending:
            for maker in (v.owner for v in op.operands):
                if _is_movable(maker):
                    if maker not in makers:
                        makers.add(maker)
                        pending.append(maker)
                elif isinstance(maker, Operation):
                    roots.add(self.loops.available_after(maker, op))
        return makers, roots
