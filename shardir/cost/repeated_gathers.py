"""Repeated gathers that free no memory where a function needs most of it."""

from collections.abc import Iterator

import numpy as np
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.cost.memory import LiveStorages
from shardir.dialects import dist, nn
from shardir.dialects.blocks import of_kind, ops_of
from shardir.rewriting.marks import RECOMPUTE


def needless_gathers(f: FuncOp, mesh: Mesh) -> list[tuple[dist.AllGatherOp, list[SSAValue]]]:
    """Return the gathers of a function in the local view that repeat others (`recompute`) and free
    no memory at the peak, each with the values of the first ones. The first repetitions count
    first: their values are retained for the shortest time."""
    gathers = of_kind(ops_of(f.body.block), dist.AllGatherOp)
    if not any(RECOMPUTE in op.attributes for op in gathers):
        return []
    live = LiveStorages(f, mesh)
    at, needed, loops = live.at, np.array(live.needed), Loops(live.ops)
    peak = needed.max()
    first: dict[object, SSAValue] = {}
    found: list[tuple[dist.AllGatherOp, list[SSAValue]]] = []
    for op in gathers:
        if dist.is_started(op) or op not in at:
            continue
        keys = [(loops.around(op), key) for key in _keys(op)]
        if RECOMPUTE not in op.attributes:
            first |= zip(keys, op.outs, strict=True)
        elif all(key in first for key in keys):
            values = [first[key] for key in keys]
            more = np.zeros_like(needed)
            for root in live.spans.keys() & map(live.root, values):
                more[live.spans[root].end + 1 : at[op]] += live.sizes[root]
            if (needed + more).max() <= peak:
                needed += more
                found.append((op, values))
    return found


def _keys(op: dist.AllGatherOp) -> Iterator[object]:
    """Yield what tells each result of a gather from others."""
    properties = frozenset((k, v) for k, v in op.properties.items() if k != "fusion")
    for v, out in zip(op.values, op.outs, strict=True):
        yield properties, out.type, _source(v)


def _source(v: SSAValue) -> object:
    """Return what tells a value from others, but for casts of one value to one type."""
    return (v.type, _source(v.owner.x)) if isinstance(v.owner, nn.ConvertOp) else v
