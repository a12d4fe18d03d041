"""fuse-communication: collectives of a kind become one on a flat buffer, where that gains.

    %a1 = dist.all_reduce <sum> %a over <dp>
    %b1 = dist.all_reduce <sum> %b over <dp>
 -> %a1, %b1 = dist.all_reduce <sum> %a, %b over <dp>

1. Only collectives of one kind and one reduction, over the same axes, of one element type, are
   fused.
2. The fused collective is where the last of them was, and before the first use of any result.
3. Collectives with a `fusion` index are fused with those of the same index, whatever their size.
4. The others are fused where that gains: by the time model of the mesh's cluster, a bucket saves
   more in latencies than it costs to pack its values. Its operands have at most `max_bytes` (0:
   none of them is fused). No two that remain would gain.
5. A cast of the result of a collective moves to its own first use, so that the first use of the
   collective is later.
6. A collective that is `async` stays as it is.
7. Reductions after the first update that read no result of it or after it move before it, and so
   do collectives without communication (slices), since some of them lead to reductions.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from math import inf
from operator import add

from xdsl.ir import Attribute, Block, Operation

from shardir.algebra.mesh import Mesh
from shardir.cost.buckets import best_buckets, gains, may_gain
from shardir.cost.seconds import Together, together
from shardir.dialects import dist, nn
from shardir.dialects.nn.types import size_of, unsharded_type
from shardir.dialects.train import UpdateOp
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.options import Bytes
from shardir.rewriting.rewriter import Rewriter, erase


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
            while _fuse(f.block, f.mesh, self.max_bytes):
                pass  # the first uses of their operands are later now


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
        if not isinstance(op, dist.CollectiveOp) or dist.is_started(op):
            continue
        leads = op.record.reduces or not op.record.communicates
        if leads and later.isdisjoint(op.operands):
            later.difference_update(op.results)
            op.detach()
            block.insert_op_before(op, ops[first])


@dataclass(frozen=True)
class _Bucket:
    """Collectives that are one, or may be: the position of the last of them and of the first use of
    a result, as indices into the block."""

    ops: tuple[dist.FusibleOp, ...]
    last: int
    first_use: int
    bytes: int
    values: Together

    def __add__(self, other: "_Bucket") -> "_Bucket":
        return _Bucket(
            self.ops + other.ops, max(self.last, other.last), min(self.first_use, other.first_use),
            self.bytes + other.bytes, self.values + other.values,
        )  # fmt: skip

    def fits(self, other: "_Bucket", max_bytes: float) -> bool:
        """Whether both can be one: no result is used before the last operand is available."""
        both = max(self.last, other.last) < min(self.first_use, other.first_use)
        return both and self.bytes + other.bytes <= max_bytes


def _fuse(block: Block, mesh: Mesh, max_bytes: int) -> bool:
    """Fuse the collectives of a block that have an index, and those that gain by it; return whether
    there were any."""
    at = {op: i for i, op in enumerate(block.ops)}
    indexed, others = defaultdict[Key, list[_Bucket]](list), defaultdict[Key, list[_Bucket]](list)
    for op, i in at.items():
        if not isinstance(op, dist.FusibleOp) or dist.is_started(op):
            continue
        first_use = min((at[u.operation] for v in op.results for u in v.uses), default=len(at))
        size = sum(size_of(v) for v in op.values)
        alone = _Bucket((op,), i, first_use, size, together(op, mesh))
        if op.fusion is not None:
            indexed[_key(op)].append(alone)
        elif size <= max_bytes and may_gain(alone.values):
            others[_key(op)].append(alone)
    found = [reduce(add, run) for parts in indexed.values() for run in _runs(parts, inf)]
    for parts in others.values():
        found += _gainful(parts, max_bytes)
    fused = [bucket for bucket in found if len(bucket.ops) > 1]
    for bucket in fused:
        _merge(sorted(bucket.ops, key=at.__getitem__))
    return bool(fused)


Key = tuple[type[Operation], tuple[tuple[str, str], ...], Attribute]


def _key(op: dist.FusibleOp) -> Key:
    """Return what collectives that are fused have in common."""
    props = tuple(sorted((k, str(v)) for k, v in op.properties.items()))
    return type(op), props, unsharded_type(op.values[0]).element_type


def _runs(parts: Sequence[_Bucket], max_bytes: float) -> Iterator[list[_Bucket]]:
    """Yield the parts, in order, in runs that fit into one bucket."""
    run, bucket = list[_Bucket](), None
    for part in parts:
        fits = bucket is not None and bucket.fits(part, max_bytes)
        if run and not fits:
            yield run
            run = []
        bucket = bucket + part if bucket is not None and fits else part
        run.append(part)
    if run:
        yield run


def _gainful(parts: Sequence[_Bucket], max_bytes: int) -> list[_Bucket]:
    """Return the parts, in buckets that take less time: the best ones of each run; then any two of
    all, as long as that gains."""
    found: list[_Bucket] = []
    for run in _runs(parts, max_bytes):
        buckets = best_buckets([part.values for part in run])
        inside = {i for bucket in buckets for i in bucket}
        found += [reduce(add, [run[i] for i in bucket]) for bucket in buckets]
        found += [part for i, part in enumerate(run) if i not in inside]
    while (pair := _pair(found, max_bytes)) is not None:
        a, b = pair
        found = [c for c in found if c is not a and c is not b] + [a + b]
    return found


def _pair(buckets: list[_Bucket], max_bytes: int) -> tuple[_Bucket, _Bucket] | None:
    """Return two buckets that gain by being one; None if there are none."""
    buckets.sort(key=lambda bucket: bucket.last)
    for i, a in enumerate(buckets):
        for b in islice(buckets, i + 1, None):
            if b.last >= a.first_use:
                break
            if a.fits(b, max_bytes) and gains(a.values, b.values):
                return a, b
    return None


def _merge(ops: Sequence[dist.FusibleOp]) -> None:
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
