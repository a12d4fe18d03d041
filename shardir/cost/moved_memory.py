"""The memory of a function after collectives are moved, started or cut into parts.

The other ops keep their order, so most storages stay live between the same two ops. They are
counted once. For each new order only the storages that a moved op reads or makes are counted again:

    %b = nn.relu %a                 the storage of %b is counted once
    %s = dist.all_reduce %x         moved: the storages of %x and %s, and its buffers, every time
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
from shardir.analysis.roles import donated_arguments
from shardir.compat.xdsl import operands_of
from shardir.cost.memory import LiveStorages, live_bytes, live_changes
from shardir.dialects import dist
from shardir.dialects.blocks import of_kind


class MovedMemory:
    """The bytes that are live at each op of a function, for several orders of its ops.

    Attributes:
        given: the bytes at each live op, in the order of the constructor.

    Args:
        ops: the live ops in their present order. In other orders collectives and copies may stand
            elsewhere, be `async`, or be cut into parts.
    """

    def __init__(self, f: FuncOp, ops: Sequence[Operation], mesh: Mesh):
        self._f, self._mesh = f, mesh
        live = LiveStorages(f, mesh, ops)
        self.given = dict(zip(ops, live.needed, strict=True))
        self._fixed, self._apart = set[Operation](), set[Operation]()
        """_fixed: ops whose results are live between the same two ops in any order. _apart: fixed
        ops whose operands are too. Both are empty for a function with loops."""
        if not Loops(ops):
            moving = _moving(f, live)
            self._fixed = {op for op in ops if moving.isdisjoint(op.results)}
            self._apart = {op for op in self._fixed if moving.isdisjoint(operands_of(op))}
        results = [v for v in live.spans if isinstance(v, OpResult) and v.op in self._fixed]
        storages = ((live.sizes[v], live.spans[v]) for v in results)
        buffers = (piece for op, piece in live.buffers.items() if op in self._apart)
        born, died = live_changes(chain(storages, buffers), len(ops))
        self._changes = _by_op(ops, born), _by_op(ops, died)
        """`live_changes` of the results of _fixed and of the buffers of _apart, by op."""

    def at_ops(self, ops: Sequence[Operation]) -> dict[Operation, int]:
        """Return the bytes that are live at each of the live ops, in the function's new order."""
        concerned = [op for op in ops if op not in self._apart]
        live = LiveStorages(self._f, self._mesh, concerned, fixed=self._fixed)
        moving = _by_op(concerned, live.born), _by_op(concerned, live.died)
        born, died = (
            [*map(add, map(fixed.get, ops, repeat(0)), map(moved.get, ops, repeat(0)))]
            for fixed, moved in zip(self._changes, moving, strict=True)
        )  # fmt: skip
        return dict(zip(ops, live_bytes([*born, live.born[-1]], died), strict=True))


def _by_op(ops: Sequence[Operation], changes: Sequence[int]) -> dict[Operation, int]:
    """Return the nonzero changes by op."""
    return {op: n for op, n in zip(ops, changes, strict=False) if n}


def _moving(f: FuncOp, live: LiveStorages) -> set[SSAValue]:
    """Return the values that may share a storage with an operand or result of a collective or
    copy."""
    near: dict[SSAValue, list[SSAValue]] = {}
    pairs = [pair for sharing in live.sharing.values() for pair in sharing.pairs.items()]
    pairs += ((v, op.out) for v, op in added_in_place(live.ops).items())
    for v, other in pairs:
        near.setdefault(v, []).append(other)
        near.setdefault(other, []).append(v)
    moved = of_kind(live.ops, dist.AsyncOp)
    todo = [v for op in moved for v in (*op.operands, *op.results)]
    if any(isinstance(op, dist.CopyOp) for op in moved):
        todo += donated_arguments(f)  # a part of the copy may be their new value
    values, makers = set[SSAValue](), set[Operation]()
    while todo:
        v = todo.pop()
        if v not in values:
            values.add(v)
            todo += near.get(v, ())
            if isinstance(v, OpResult) and v.op not in makers:
                makers.add(v.op)
                todo += v.op.results
    return values
