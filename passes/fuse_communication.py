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
   the update are fused first: the search counts their buckets.
5. A cast of the result of a collective moves to its own first use, so that the first use of the
   collective is later. Casts and slices of its results move after a fused collective.
6. A collective that is `async` stays as it is.
7. Reductions after the first update that read no result of it or after it move before it, and so
   do collectives without communication (slices), since some of them lead to reductions.
8. A reduction whose result is smaller than its operand (reduce-scatter) moves to where the operand
   is available, which frees that early. Those of one layer (of equal blocks of ops) are fused
   first, then those of several, until a bucket is full: until its latency is small beside its time
   (cost/buckets.py).
9. The gathers of a layer are fused where the first of them was, if peak memory is then at most the
   larger of that before and the memory of a device of the cluster, or the budget of
   `choose-recompute`; else in buckets of at most half as many bytes, and so on.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf
from operator import add
from typing import TypeGuard

from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.analysis.repeats import MIN_BLOCKS, equal_blocks
from shardir.analysis.storages import Span
from shardir.analysis.updates import after_update
from shardir.cost.buckets import Bucket, fused, runs
from shardir.cost.collective_work import collective_work
from shardir.cost.memory import memory_of
from shardir.dialects import dist, nn
from shardir.dialects.nn.types import size_of, unsharded_type
from shardir.dialects.train import UpdateOp
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.copying import copied
from shardir.rewriting.marks import allowed_memory
from shardir.rewriting.options import Bytes
from shardir.rewriting.rewriter import Rewriter, erase

MOVABLE = (nn.ConvertOp, dist.AllSliceOp)
"""Ops on the result of a collective that move with it."""


@dataclass(frozen=True)
class FuseCommunication(LocalPass):
    """Fuses collectives of a kind into one, by index and where that gains."""

    name = "fuse-communication"
    max_bytes: Bytes = 1 << 26
    """The maximum size of a bucket, in bytes on one device; 0 fuses by index alone."""

    def rewrite(self, f: Function) -> None:
        _sink_casts(f.block)
        _reduce_before_updates(f.block)
        _reduce_early(f.block)
        if f.mesh is not None:
            layers = _layers(f.block) if any(map(_shrinks, f.block.ops)) else {}
            for is_early in (False, True):
                for within in (layers, {}) if layers else ({},):
                    while _fuse(f.block, f.mesh, self.max_bytes, is_early, within):
                        pass  # the first uses of their operands are later now
            _gather_layers(f.op, f.mesh, self.max_bytes)


def _sink_casts(block: Block) -> None:
    """Move casts of the results of collectives to their first uses."""
    at, loops = {op: i for i, op in enumerate(block.ops)}, Loops(block.ops)
    for op in list(block.ops):
        if isinstance(op, nn.ConvertOp) and isinstance(op.x.owner, dist.FusibleOp):
            users = [loops.needed_at(u.operation, op) for u in op.out.uses]
            if users:
                op.detach()
                block.insert_op_before(op, min(users, key=at.__getitem__))


def _reduce_before_updates(block: Block) -> None:
    """Move reductions and slices that read no result of an update before the first update."""
    ops = list(block.ops)
    first = next((i for i, op in enumerate(ops) if isinstance(op, UpdateOp)), len(ops))
    later = {v for op in ops[first:] for v in op.results}
    for op in ops[first:]:
        if not isinstance(op, dist.CollectiveOp) or dist.is_started(op):
            continue
        leads = op.record.reduces or not op.record.communicates
        if leads and later.isdisjoint(op.operands):
            later.difference_update(op.results)
            op.detach()
            block.insert_op_before(op, ops[first])


def _shrinks(op: Operation) -> TypeGuard[dist.FusibleOp]:
    """Whether it is a reduction whose results are smaller than its operands."""
    return (
        isinstance(op, dist.FusibleOp) and op.record.reduces and not dist.is_started(op)
        and sum(map(size_of, op.outs)) < sum(map(size_of, op.values))
    )  # fmt: skip


def _reduce_early(block: Block) -> None:
    """Move reductions that free memory to where their operands are available."""
    at, loops = {op: i for i, op in enumerate(block.ops)}, Loops(block.ops)
    for op in filter(_shrinks, list(block.ops)):
        makers = [v.owner for v in op.values if isinstance(v.owner, Operation)]
        if len(makers) == len(op.values) and all(v.has_one_use() for v in op.values):
            there = max((loops.available_after(m, op) for m in makers), key=at.__getitem__)
            if loops.around(there) is loops.around(op) or there in loops.ends.values():
                op.detach()
                block.insert_op_after(op, there)


Layers = Mapping[Operation, int]
"""The number of the layer that an op is in, for those that are in one."""


def _layers(block: Block) -> Layers:
    """Return the layers of a block: equal blocks of ops."""
    every = (layer for found in equal_blocks(list(block.ops)) for layer in found.blocks)
    return {op: i for i, layer in enumerate(every) for op in layer}


def _is_gather(op: Operation) -> TypeGuard[dist.AllGatherOp]:
    """Whether it is a gather that may be fused with others of its layer."""
    return isinstance(op, dist.AllGatherOp) and op.fusion is None and not dist.is_started(op)


def _gather_layers(f: FuncOp, mesh: Mesh, max_bytes: int) -> None:
    """Fuse the gathers of each layer, within memory."""
    if sum(map(_is_gather, f.body.block.ops)) < MIN_BLOCKS:
        return
    limit = None
    while _merge_gathers(trial := copied(f), mesh, max_bytes):
        if limit is None:
            limit = max(memory_of(f, mesh).peak, allowed_memory(f, mesh))
        if memory_of(trial, mesh).peak <= limit:
            _merge_gathers(f, mesh, max_bytes)
            break
        max_bytes //= 2


def _merge_gathers(f: FuncOp, mesh: Mesh, max_bytes: int) -> bool:
    """Fuse the gathers of each layer of a function in buckets of so many bytes of their results;
    return whether there were any."""
    block = f.body.block
    ops, layers = list(block.ops), _layers(block)
    loops, at = Loops(ops), {op: i for i, op in enumerate(ops)}
    found = defaultdict[tuple[Key, int], list[Bucket]](list)
    for op in layers:
        if _is_gather(op):
            makers = [v.owner for v in op.values if isinstance(v.owner, Operation)]
            start = max((at[loops.available_after(m, op)] for m in makers), default=-1)
            size = sum(map(size_of, op.outs))
            alone = Bucket(
                (at[op],), Span(start, at[op] - 1), size, collective_work(op, mesh).together
            )
            found[_key(op, loops), layers[op]].append(alone)
    buckets = [b for parts in found.values() for b in fused(parts, max_bytes)]
    for bucket in buckets:
        _merge([ops[i] for i in sorted(bucket.members)], block, at, early=True)
    return bool(buckets)


def _fuse(block: Block, mesh: Mesh, max_bytes: int, is_early: bool, within: Layers) -> bool:
    """Fuse the collectives of a block that have an index, and those that gain by it; return whether
    there were any. Without `is_early` only those whose results are used after the update; with
    `within` reductions that free memory alone, each with those of its layer."""
    ops, late = list(block.ops), (lambda _: True) if is_early else after_update(block)
    loops = Loops(ops)
    at = {op: i for i, op in enumerate(ops)}
    indexed = defaultdict[Key, list[Bucket]](list)
    others = defaultdict[tuple[Key, int | None], list[Bucket]](list)
    for op, i in at.items():
        if not isinstance(op, dist.FusibleOp) or dist.is_started(op):
            continue
        if within and not (op in within and _shrinks(op)):
            continue
        size, together = sum(size_of(v) for v in op.values), collective_work(op, mesh).together
        after = Span(i, _first_use(op, at, loops) - 1)
        alone = Bucket((i,), after, size, together, not within and _shrinks(op))
        if op.fusion is not None:
            indexed[_key(op, loops)].append(alone)
        elif late([op]):
            others[_key(op, loops), within.get(op)].append(alone)
    found = [reduce(add, run) for parts in indexed.values() for run in runs(parts, inf)]
    for parts in others.values():
        found += fused(parts, max_bytes)
    buckets = [[ops[i] for i in sorted(bucket.members)] for bucket in found]
    buckets = [bucket for bucket in buckets if len(bucket) > 1]
    for bucket in buckets:
        _merge(bucket, block, at)
    return bool(buckets)


def _users(op: Operation) -> list[Operation]:
    return [use.operation for v in op.results for use in v.uses]


def _first_use(op: Operation, at: Mapping[Operation, int], loops: Loops) -> int:
    """Return the position of the first use of a collective, or of casts and slices of it, which
    may move in its loop."""
    users = [loops.needed_at(u, op) for u in _users(op)]
    each = [_first_use(u, at, loops) if isinstance(u, MOVABLE) else at[u] for u in users]
    return min(each, default=len(at))


Key = tuple[type[Operation], frozenset[tuple[str, Attribute]], Attribute, Operation | None]


def _key(op: dist.FusibleOp, loops: Loops) -> Key:
    """Return what collectives that are fused have in common, such as the loop that they are in."""
    props = frozenset(op.properties.items())
    return type(op), props, unsharded_type(op.values[0]).element_type, loops.around(op)


def _merge(
    bucket: Sequence[Operation], block: Block, at: Mapping[Operation, int], early: bool = False
) -> None:
    """Replace collectives by one on all of their operands, where the last of them is (`early`: the
    first); casts and slices of results that are before it move after it."""
    ops = [op for op in bucket if isinstance(op, dist.FusibleOp)]
    there = ops[0] if early else ops[-1]
    results = [v for op in ops for v in op.results]
    operands, types = [v for op in ops for v in op.values], [v.type for v in results]
    new = (
        Rewriter()
        .before(there)
        .create(type(there), operands, types, there.properties, there.attributes, results)
    )
    for old, out in zip(results, new.results, strict=True):
        old.replace_all_uses_with(out)
    moved: list[Operation] = [new]
    for op in moved:
        for user in _users(op):
            if at.get(user, inf) < at[there]:
                user.detach()
                block.insert_op_after(user, moved[-1])
                moved.append(user)
    for op in ops:
        erase(op)
