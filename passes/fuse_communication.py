"""fuse-communication: collectives of a kind become one, where that gains; those of a layer first.

    %a1 = dist.all_reduce <sum> %a over <dp>
    %b1 = dist.all_reduce <sum> %b over <dp>
 -> %a1, %b1 = dist.all_reduce <sum> %a, %b over <dp>

1. Only collectives of one kind and one reduction, over the same axes, of one element type, and in
   one loop or in none, are fused.
2. The fused collective is where the last of them was, and before the first use of any result.
3. Collectives with a `fusion` index are fused with those of the same index, whatever their size.
4. The others are fused where that gains: by the time model of the mesh's cluster, a bucket saves
   more in latencies than it costs to pack its values. Its operands have at most `max_bytes` (0:
   none of them is fused). No two that remain would gain. Those whose results are used only after
   the update (in a function without one: by the return) are fused first: the search counts their
   buckets.
5. A cast of the result of a collective moves to its own first use, so that the first use of the
   collective is later. Casts and collectives of its results move after a fused collective.
6. A collective that is `async` stays as it is.
7. Reductions after the first update that read no result of it or after it move before it, and so
   do the collectives whose results are only reduced, and those without communication (slices),
   since some of them lead to reductions.
8. A reduction whose result is smaller than its operand (reduce-scatter) moves to where the operand
   is available, which frees that early. Those of one layer (repeated parts of their sequence) are
   fused first, then those of several, until a bucket is full: until its latency is small beside its
   time (cost/buckets.py).
9. A gather after the first update of a value from before it (or of what is gathered, sliced or cast
   of such a value, which moves with it) may be fused with others where the first of their results
   is needed, in buckets that are full as those of rule 8 are.
10. The gathers of a layer are fused where the first of them was, if peak memory is then at most the
   larger of that before and the memory of a device of the cluster, or the budget of
   `choose-recompute`; else in buckets of at most half as many bytes, and so on. Where no memory is
   known, the peak may grow by a thousandth: a bias that is gathered with its layer is no reason for
   a collective of each parameter.
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
"""The ops that move with a gather that waits, if they are on the way from its result to another."""

MAX_GROWTH = 1 + 1e-3
"""By how much peak memory may grow for the buckets of gathers, where no memory is known."""


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
    """Move casts of the results of collectives to their first uses; return whether there are
    any."""
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
    """Move reductions, the collectives before them and slices that read no result of an update
    before the first update; return whether there are any."""
    moved = False
    first = update_position(ops)
    later = {v for op in ops[first:] for v in op.results}
    movable = [op for op in of_kind(ops[first:], dist.CollectiveOp) if not dist.is_started(op)]
    leading = set[Operation]()
    for op in reversed(movable):
        users = _users(op)
        if op.record.reduces or (users and leading.issuperset(users)):
            leading.add(op)
    for op in movable:
        leads = op in leading or not op.record.communicates
        if leads and later.isdisjoint(op.operands):
            later.difference_update(op.results)
            op.detach()
            block.insert_op_before(op, ops[first])
            moved = True
    return moved


def _shrinks(op: dist.FusibleOp) -> bool:
    """Whether it is a reduction whose results are smaller than its operands."""
    return (
        op.record.reduces and not dist.is_started(op)
        and sum(map(size_of, op.outs)) < sum(map(size_of, op.values))
    )  # fmt: skip


def _reduce_early(block: Block, ops: Sequence[Operation]) -> bool:
    """Move reductions that free memory to where their operands are available; return whether there
    are any."""
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
    """Return the gathers that may be fused with others of their layers."""
    found = of_kind(ops, dist.AllGatherOp)
    return [op for op in found if op.fusion is None and not dist.is_started(op)]


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
    """Fuse the gathers of each layer of a function in buckets of so many bytes of their results;
    return whether there were any."""
    block = f.body.block
    ops = ops_of(block)
    each = (layer for found in equal_blocks(ops) for layer in found.blocks)
    layers = {op: i for i, layer in enumerate(each) for op in layer}
    loops, at = Loops(ops), {op: i for i, op in enumerate(ops)}
    parts: list[Bucket] = []
    late = after_update(ops)
    for op in _gathers(layers):
        if late([op]):
            continue  # those that gain are fused
        makers = [v.owner for v in op.values if isinstance(v.owner, Operation)]
        start = max((at[loops.available_after(m, op)] for m in makers), default=-1)
        size, kind = sum(map(size_of, op.outs)), (_key(op, loops), layers[op])
        after, times = Span(start, at[op] - 1), collective_work(op, mesh).times
        parts.append(Bucket((at[op],), after, size, times, kind))
    merged = _Merging(block, ops, loops)
    for bucket in (buckets := fuse(parts, max_bytes)):
        merged.add(bucket, early=True)
    return bool(buckets)


def _fuse(
    block: Block, ops: Sequence[Operation], mesh: Mesh, max_bytes: int, is_early: bool
) -> bool:
    """Fuse the collectives of a block that have an index, and those that gain by it; return whether
    there were any. Without `is_early` only those whose results are used after the update."""
    late = (lambda _: True) if is_early else after_update(ops)
    loops = Loops(ops)
    at = {op: i for i, op in enumerate(ops)}
    update = update_position(ops)
    indexed: list[Bucket] = []
    others: list[Bucket] = []
    for op in of_kind(ops, dist.FusibleOp):
        if dist.is_started(op) or (op.fusion is None and not late([op])):
            continue
        size, times = sum(map(size_of, op.values)), collective_work(op, mesh).times
        waits = not is_early and _waits(op, at, update)
        start, kind = update - 1 if waits else at[op], _key(op, loops)
        after, limited = Span(start, _first_use(op, at, loops) - 1), waits or _shrinks(op)
        alone = Bucket((at[op],), after, size, times, kind, limited, _before(op, at))
        if op.fusion is not None:
            indexed.append(alone)
        else:
            others.append(alone)
    if not (found := fuse_by_kind(indexed) or fuse(others, max_bytes)):
        return False
    merged = _Merging(block, ops, loops)
    for bucket in found:
        merged.add(bucket)
    return True


def _waits(op: Operation, at: Mapping[Operation, int], update: int) -> bool:
    """Whether it is a gather after the first update of values from before it, or of what is
    gathered, sliced or cast of such ones."""
    if not isinstance(op, dist.AllGatherOp) or dist.is_started(op) or at[op] < update:
        return False
    todo = list(op.values)
    for v in todo:
        maker = v.owner
        if isinstance(maker, Operation) and at[maker] >= update:
            if not isinstance(maker, WAITING) or not _is_movable(maker):
                return False
            todo += maker.operands
    return True


def _users(op: Operation) -> list[Operation]:
    return [use.operation for v in op.results for use in v.uses]


def _is_movable(op: Operation | Block) -> TypeGuard[Operation]:
    """Whether an op on the result of a collective moves with it."""
    return isinstance(op, nn.ConvertOp) or (
        isinstance(op, dist.CollectiveOp) and not dist.is_started(op)
    )


def _first_use(op: Operation, at: Mapping[Operation, int], loops: Loops) -> int:
    """Return the position of the first use of a collective, or of casts and collectives of it,
    which may move in its loop."""
    users = [loops.needed_at(u, op) for u in _users(op)]
    each = [_first_use(u, at, loops) if _is_movable(u) else at[u] for u in users]
    return min(each, default=len(at))


def _before(op: Operation, at: Mapping[Operation, int]) -> frozenset[int]:
    """Return the positions of the collectives that move if an op moves before them."""
    found = dict.fromkeys([v.owner for v in operands_of(op) if _is_movable(v.owner)])
    todo = list(found)
    for maker in todo:
        more = [v.owner for v in maker.operands if _is_movable(v.owner) and v.owner not in found]
        found.update(dict.fromkeys(more))
        todo += more
    return frozenset(at[maker] for maker in found if isinstance(maker, dist.FusibleOp))


Key = tuple[type[Operation], frozenset[tuple[str, Attribute]], Attribute, Operation | None]


def _key(op: dist.FusibleOp, loops: Loops) -> Key:
    """Return what collectives that are fused have in common, such as the loop that they are in."""
    props = frozenset(op.properties.items())
    return type(op), props, unsharded_type(op.values[0]).element_type, loops.around(op)


class _Merging:
    """Buckets of a block, which become one collective each."""

    def __init__(self, block: Block, ops: Sequence[Operation], loops: Loops):
        self.block, self.ops, self.loops = block, ops, loops
        self.at: dict[Operation, tuple[int, ...]] = {op: (i,) for i, op in enumerate(ops)}
        """Positions: of what has moved after an op longer ones, that begin with that op's."""
        self._last: dict[Operation, tuple[Operation, int]] = {}
        """The last op that has moved after one, and how many have."""

    def add(self, bucket: Bucket, early: bool = False) -> None:
        """Replace collectives by one on all of their operands, where the last of them is that is
        before a result is needed (`early`: the first), or where the last operand is available.
        Casts and collectives of whose results it is move before it, and those of its results
        after it."""
        at, end = self.at, bucket.after.end
        ops = [op for i in sorted(bucket.members) if isinstance(op := self.ops[i], dist.FusibleOp)]
        makers, roots = self._makers(ops)
        if early:
            there = min(ops, key=at.__getitem__)
        else:
            before = [op for op in ops if at[op][0] <= end]
            there = max((*before, *roots), key=at.__getitem__)
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
        moved: set[Operation] = set()
        todo: list[Operation] = [new]
        for op in todo:
            more = {u for u in _users(op) if at[u] < at[new]} - moved
            moved |= more
            todo += more
        for op in sorted(moved, key=at.__getitem__):
            op.detach()
            self._put_after(there, op)
        for op in ops:
            erase(op)

    def _put_after(self, there: Operation, op: Operation) -> None:
        """Insert an op after one, and after those that have been."""
        last, n = self._last.get(there, (there, 0))
        self.block.insert_op_after(op, last)
        self._last[there], self.at[op] = (op, n + 1), (*self.at[there], n)

    def _makers(self, ops: Iterable[Operation]) -> tuple[set[Operation], set[Operation]]:
        """Return the casts and collectives of whose results some collectives are, and the ops after
        which the operands of all of these are available."""
        makers, roots, todo = set[Operation](), set[Operation](), list(ops)
        for op in todo:
            for maker in (v.owner for v in op.operands):
                if _is_movable(maker):
                    if maker not in makers:
                        makers.add(maker)
                        todo.append(maker)
                elif isinstance(maker, Operation):
                    roots.add(self.loops.available_after(maker, op))
        return makers, roots
