"""The memory of a function of which some ops are moved, started or cut into parts.

All other ops keep their order, so most storages are live between the same ops as before. They are
counted once; in each new order only those are counted that the values of such ops are in, or may
be in:

    %b = nn.relu %a                 the storage of %b: between the same ops in any order
    %s = dist.all_reduce %x         moved: those of %x and %s, and its buffers, are counted again
    %y = nn.add %b, %s
"""

from collections.abc import Sequence
from itertools import chain, repeat
from operator import add

from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.accumulation import added_in_place
from shardir.analysis.loops import Loops
from shardir.analysis.roles import lent_arguments
from shardir.compat.xdsl import operands_of
from shardir.cost.memory import LiveStorages, changes, running
from shardir.dialects import dist
from shardir.dialects.blocks import of_kind


class MovedMemory:
    """The bytes that each live op of a function needs, in orders of its ops.

    Args:
        ops: the live ones in the order in which the function is now, `given`. Other orders have
            its collectives and copies elsewhere, `async`, or in parts.
    """

    def __init__(self, f: FuncOp, ops: Sequence[Operation], mesh: Mesh):
        self._f, self._mesh = f, mesh
        live = LiveStorages(f, mesh, ops)
        self.given = dict(zip(ops, live.needed, strict=True))
        self._fixed, self._apart = set[Operation](), set[Operation]()
        """Ops whose results are in the same storages, between the same ops, in any order; and those
        of them that read no other storages. In a loop none is known."""
        if not Loops(ops):
            moving = _moving(f, live)
            self._fixed = {op for op in ops if moving.isdisjoint(op.results)}
            self._apart = {op for op in self._fixed if moving.isdisjoint(operands_of(op))}
        made = [v for v in live.spans if isinstance(v, OpResult) and v.op in self._fixed]
        storages = ((live.sizes[v], live.spans[v]) for v in made)
        buffers = (found for op, found in live.buffers.items() if op in self._apart)
        born, died = changes(chain(storages, buffers), len(ops))
        self._changes = _by_op(ops, born), _by_op(ops, died)
        """The bytes that are live from each op on, and those until it, in the storages of `fixed`
        ops, and in the buffers of those apart."""

    def at_ops(self, ops: Sequence[Operation]) -> dict[Operation, int]:
        """Return the bytes that are live at each of the live ops, in the order in which the
        function is now."""
        concerned = [op for op in ops if op not in self._apart]
        live = LiveStorages(self._f, self._mesh, concerned, fixed=self._fixed)
        moving = _by_op(concerned, live.born), _by_op(concerned, live.died)
        born, died = (
            [*map(add, map(fixed.get, ops, repeat(0)), map(moved.get, ops, repeat(0)))]
            for fixed, moved in zip(self._changes, moving, strict=True)
        )  # fmt: skip
        return dict(zip(ops, running([*born, live.born[-1]], died), strict=True))


def _by_op(ops: Sequence[Operation], changes: Sequence[int]) -> dict[Operation, int]:
    """Return the bytes by op, where there are any."""
    return {op: n for op, n in zip(ops, changes, strict=False) if n}


def _moving(f: FuncOp, live: LiveStorages) -> set[SSAValue]:
    """Return the values that may share a storage with one of a collective or copy."""
    near: dict[SSAValue, list[SSAValue]] = {}
    pairs = [pair for sharing in live.sharing.values() for pair in sharing.pairs.items()]
    pairs += ((v, op.out) for v, op in added_in_place(live.ops).items())
    for v, other in pairs:
        near.setdefault(v, []).append(other)
        near.setdefault(other, []).append(v)
    moved = of_kind(live.ops, dist.AsyncOp)
    todo = [v for op in moved for v in (*op.operands, *op.results)]
    if any(isinstance(op, dist.CopyOp) for op in moved):
        todo += lent_arguments(f)  # of which a part of it may be the new value
    found, makers = set[SSAValue](), set[Operation]()
    while todo:
        v = todo.pop()
        if v not in found:
            found.add(v)
            todo += near.get(v, ())
            if isinstance(v, OpResult) and v.op not in makers:
                makers.add(v.op)
                todo += v.op.results
    return found
