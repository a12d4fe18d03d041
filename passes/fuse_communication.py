"""fuse-communication: collectives of a kind become one on a flat buffer, where that gains.

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
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf
from operator import add

from xdsl.ir import Attribute, Block, Operation

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.analysis.storages import Span
from shardir.analysis.updates import after_update
from shardir.cost.buckets import Bucket, fused, runs
from shardir.cost.seconds import collective_work
from shardir.dialects import dist, nn
from shardir.dialects.nn.types import size_of, unsharded_type
from shardir.dialects.train import UpdateOp
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.options import Bytes
from shardir.rewriting.rewriter import Rewriter, erase

MOVABLE = (nn.ConvertOp, dist.AllSliceOp)
"""Ops on the result of a collective that move with it."""


@dataclass(frozen=True)
class FuseCommunication(LocalPass):
    """Fuses collectives of a kind into one on a flat buffer, by index and where that gains."""

    name = "fuse-communication"
    max_bytes: Bytes = 1 << 26
    """The maximum size of a bucket, in bytes on one device; 0 fuses by index alone."""

    def rewrite(self, f: Function) -> None:
        _sink_casts(f.block)
        _reduce_before_updates(f.block)
        if f.mesh is not None:
            for is_early in (False, True):
                while _fuse(f.block, f.mesh, self.max_bytes, is_early):
                    pass  # the first uses of their operands are later now


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


def _fuse(block: Block, mesh: Mesh, max_bytes: int, is_early: bool) -> bool:
    """Fuse the collectives of a block that have an index, and those that gain by it; return whether
    there were any. Without `is_early` only those whose results are used after the update."""
    ops, late = list(block.ops), (lambda _: True) if is_early else after_update(block)
    loops = Loops(ops)
    at = {op: i for i, op in enumerate(ops)}
    indexed, others = defaultdict[Key, list[Bucket]](list), defaultdict[Key, list[Bucket]](list)
    for op, i in at.items():
        if not isinstance(op, dist.FusibleOp) or dist.is_started(op):
            continue
        size = sum(size_of(v) for v in op.values)
        after = Span(i, _first_use(op, at, loops) - 1)
        alone = Bucket((i,), after, size, collective_work(op, mesh).together)
        if op.fusion is not None:
            indexed[_key(op, loops)].append(alone)
        elif late([op]):
            others[_key(op, loops)].append(alone)
    found = [reduce(add, run) for parts in indexed.values() for run in runs(parts, inf)]
    for parts in others.values():
        found += fused(parts, max_bytes)
    buckets = [[ops[i] for i in sorted(bucket.members)] for bucket in found]
    buckets = [bucket for bucket in buckets if len(bucket) > 1]
    for bucket in buckets:
        _merge([op for op in bucket if isinstance(op, dist.FusibleOp)], block, at)
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


def _merge(ops: Sequence[dist.FusibleOp], block: Block, at: Mapping[Operation, int]) -> None:
    """Replace collectives by one on all of their operands, where the last of them is; casts and
    slices of results that are before it move after it."""
    last = ops[-1]
    results = [v for op in ops for v in op.results]
    operands, types = [v for op in ops for v in op.values], [v.type for v in results]
    new = Rewriter().before(last).create(
        type(last), operands, types, last.properties, names=results
    )  # fmt: skip
    for old, out in zip(results, new.results, strict=True):
        old.replace_all_uses_with(out)
    moved: list[Operation] = [new]
    for op in moved:
        for user in _users(op):
            if at.get(user, inf) < at[last]:
                user.detach()
                block.insert_op_after(user, moved[-1])
                moved.append(user)
    for op in ops:
        erase(op)
