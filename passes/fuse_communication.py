"""fuse-communication: small collectives of a kind become one on a bucket, a flat buffer.

    %a1 = dist.all_reduce <sum> %a over <dp>
    %b1 = dist.all_reduce <sum> %b over <dp>
 -> %a1, %b1 = dist.all_reduce <sum> %a, %b over <dp>

1. Only collectives of one kind and one reduction, over the same axes, of one element type, are
   fused.
2. The fused collective is where the last of them was, and before the first use of any result.
3. Collectives with a `fusion` index are fused with those of the same index, whatever their size;
   the others fill buckets of `max_bytes` (0: none of them is fused).
4. A cast of the result of a collective moves to its own first use, so that the first use of the
   collective is later.
5. A collective that is `async` stays as it is.
6. Reductions between updates, each before its own, move before the first update, and so do
   collectives without communication (slices), since some of them lead to reductions.
"""

from dataclasses import dataclass

from xdsl.ir import Block

from shardir.dialects import dist, nn
from shardir.dialects.nn.types import size_of, unsharded_type
from shardir.dialects.train import UpdateOp
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.options import Bytes
from shardir.rewriting.rewriter import Rewriter, erase


@dataclass(frozen=True)
class FuseCommunication(LocalPass):
    """Fuses collectives of a kind into one on a flat buffer, by index and by size."""

    name = "fuse-communication"
    max_bytes: Bytes = 1 << 26
    """The maximum size of a bucket, in bytes on one device; 0 fuses by index alone."""

    def rewrite(self, f: Function) -> None:
        _sink_casts(f.block)
        _reduce_before_updates(f.block)
        _fuse(f.block, self.max_bytes)


def _sink_casts(block: Block) -> None:
    """Move casts of the results of collectives to their first uses."""
    at = {op: i for i, op in enumerate(block.ops)}
    for op in list(block.ops):
        if isinstance(op, nn.ConvertOp) and isinstance(op.x.owner, dist.FusibleOp):
            users = [u.operation for u in op.out.uses]
            if users:
                op.detach()
                block.insert_op_before(op, min(users, key=at.__getitem__))


def _reduce_before_updates(block: Block) -> None:
    """Move reductions and slices that read no result of an update before the first update."""
    ops = list(block.ops)
    first = next((i for i, op in enumerate(ops) if isinstance(op, UpdateOp)), len(ops))
    later = {v for op in ops[first:] for v in op.results}
    for op in ops[first:]:
        if not isinstance(op, dist.CollectiveOp):
            continue
        leads = op.record.reduces or not op.record.communicates
        if leads and later.isdisjoint(op.operands):
            later.difference_update(op.results)
            op.detach()
            block.insert_op_before(op, ops[first])


@dataclass
class _Bucket:
    """Collectives that are fused; the first use of a result, as an index into the block."""

    ops: list[dist.CollectiveOp]
    first_use: int
    bytes: int


def _fuse(block: Block, max_bytes: int) -> None:
    """Fill buckets in the order of the block, and fuse the collectives of each."""
    at = {op: i for i, op in enumerate(block.ops)}
    buckets: dict[tuple[object, ...], _Bucket] = {}
    done: list[_Bucket] = []
    for op, i in at.items():
        if not isinstance(op, dist.FusibleOp) or dist.is_started(op):
            continue
        size = sum(size_of(v) for v in op.values)
        if op.fusion is None and size > max_bytes:
            continue
        uses = [at[u.operation] for v in op.results for u in v.uses]
        first_use = min(uses, default=len(at))
        element = unsharded_type(op.values[0]).element_type
        props = tuple(sorted((k, str(v)) for k, v in op.properties.items()))
        key = (type(op), props, element)
        bucket = buckets.get(key)
        full = bucket is not None and op.fusion is None and bucket.bytes + size > max_bytes
        if bucket is None or bucket.first_use <= i or full:
            if bucket is not None:
                done.append(bucket)
            buckets[key] = _Bucket([op], first_use, size)
        else:
            bucket.ops.append(op)
            bucket.first_use = min(bucket.first_use, first_use)
            bucket.bytes += size
    for bucket in (*done, *buckets.values()):
        if len(bucket.ops) > 1:
            _merge(bucket.ops)


def _merge(ops: list[dist.CollectiveOp]) -> None:
    """Replace collectives by one on all of their operands, where the last of them is."""
    last = ops[-1]
    results = [v for op in ops for v in op.results]
    operands, types = [v for op in ops for v in op.values], [v.type for v in results]
    new = Rewriter().before(last).create(
        type(last), operands, types, last.properties, names=results
    )  # fmt: skip
    for old, out in zip(results, new.results, strict=True):
        old.replace_all_uses_with(out)
    for op in ops:
        erase(op)
