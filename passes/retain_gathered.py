"""retain-gathered: gather a value once if gathering it again frees no memory at the peak.

    %w1 = dist.all_gather %w dim 0 over <dp>
    %y = nn.matmul %x, %w1
    train.backward
    %w2 = dist.all_gather %w dim 0 over <dp> {recompute}
    %d_x = nn.matmul %d_y, %w2
 -> %w1 = dist.all_gather %w dim 0 over <dp>
    %y = nn.matmul %x, %w1
    train.backward
    %d_x = nn.matmul %d_y, %w1

Repeating a gather frees the gathered value in between. For the last layer this time is short, and
over before the peak, where gradients and the buffers of their reductions are live too.

1. Peak memory does not grow, whatever the memory of a device: the mark `recompute` asks for that.
2. A gather repeats an equal gather of equal values in one run of a loop; casts of one value to one
   type are equal. A fused gather (of `fuse-communication`) is removed with all of its values.
3. The first repetitions are removed first: their values are retained for the shortest time.
4. A collective that is `async` does not change.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.cost.memory import LiveStorages
from shardir.dialects import dist, nn
from shardir.dialects.blocks import of_kind, ops_of
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.rewriter import Rewriter, erase


@dataclass(frozen=True)
class RetainGathered(LocalPass):
    """Removes repeated gathers that free no memory at the peak."""

    name = "retain-gathered"

    def rewrite(self, f: Function) -> None:
        if f.mesh is None:
            return
        for op, values in needless_gathers(f.op, f.mesh):
            makers = [v.owner for v in op.values]
            Rewriter.replace(op, values)
            for maker in makers:
                if isinstance(maker, nn.ConvertOp) and maker.out.first_use is None:
                    erase(maker)


def needless_gathers(f: FuncOp, mesh: Mesh) -> list[tuple[dist.AllGatherOp, list[SSAValue]]]:
    """Return the repeated gathers (`recompute`) of a function in the local view that can be
    replaced by the results of the first gathers without a higher peak, each with these results.

    Repetitions are decided in program order: the earliest retain values for the shortest time.
    """
    gathers = of_kind(ops_of(f.body.block), dist.AllGatherOp)
    if not any(RECOMPUTE in op.attributes for op in gathers):
        return []
    live = LiveStorages(f, mesh)
    at, needed, loops = live.at, list(live.needed), Loops(live.ops)
    peak = max(needed)
    first: dict[object, SSAValue] = {}
    needless: list[tuple[dist.AllGatherOp, list[SSAValue]]] = []
    for op in gathers:
        if dist.is_started(op) or op not in at:
            continue
        keys = [(loops.around(op), key) for key in _keys(op)]
        if RECOMPUTE not in op.attributes:
            first |= zip(keys, op.outs, strict=True)
        elif all(key in first for key in keys):
            values = [first[key] for key in keys]
            roots = live.spans.keys() & map(live.root, values)
            lives = [(live.spans[root].end + 1, live.sizes[root]) for root in roots]
            start = min((begin for begin, _ in lives), default=at[op])
            grown = [
                needed[i] + sum(size for begin, size in lives if begin <= i)
                for i in range(start, at[op])
            ]
            if max(grown, default=0) <= peak:
                needed[start : at[op]] = grown
                needless.append((op, values))
    return needless


def _keys(op: dist.AllGatherOp) -> Iterator[object]:
    """Yield a key for each result of a gather; results of equal keys have equal elements."""
    properties = frozenset((k, v) for k, v in op.properties.items() if k != "fusion")
    for v, out in zip(op.values, op.outs, strict=True):
        yield properties, out.type, _source(v)


def _source(v: SSAValue) -> object:
    """Return a key of a value, equal for casts of one value to one type."""
    return (v.type, _source(v.owner.x)) if isinstance(v.owner, nn.ConvertOp) else v
