"""When values die, and which of them share memory: what decides on `del`, in-place updates, and
collectives that may write into their operand.

A storage is a piece of memory with all values that are views of it, or of parts of it. Two values
that may share memory count as sharing it.
"""

from itertools import product

from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects.nn.custom import CustomOp
from shardir.dialects.views import views, waits


class Storages:
    """The storages of one function, by the index of its (live) ops."""

    def __init__(self, ops: list[Operation], mesh: Mesh | None):
        self.at = {op: i for i, op in enumerate(ops)}
        self._root: dict[SSAValue, SSAValue] = {}
        self._members: dict[SSAValue, list[SSAValue]] = {}
        self._last: dict[SSAValue, int] = {}
        self._pinned: set[SSAValue] = set()
        self._sent: dict[SSAValue, list[tuple[int, int]]] = {}  # from when to when it is under way
        self.last: dict[SSAValue, int] = {}
        ends = waits(ops)
        for i, op in enumerate(ops):
            for v in op.operands:
                self.last[v] = i
                if op in ends:
                    self._sent.setdefault(self.root(v), []).append((i, ends[op]))
            for result, operand in views(op, mesh):
                self._add(result, self.root(operand))
            if isinstance(op, CustomOp):  # nobody knows whether it gives a view, nor of what
                for result, operand in product(op.results, op.operands):
                    self.join(result, operand)
        for v, i in self.last.items():
            root = self.root(v)
            self._last[root] = max(i, self._last.get(root, -1))

    def root(self, v: SSAValue) -> SSAValue:
        """The value that stands for a value's storage."""
        return self._root.get(v, v)

    def _add(self, v: SSAValue, root: SSAValue) -> None:
        self._root[v] = root
        self._members.setdefault(root, []).append(v)

    def join(self, v: SSAValue, operand: SSAValue) -> None:
        """`v` was made in the memory of `operand`: no op before this one needs to know."""
        mine, other = self.root(v), self.root(operand)
        if mine is other:
            return
        if isinstance(mine, BlockArgument):  # what may be the caller's is not ours
            mine, other = other, mine
        for value in (mine, *self._members.pop(mine, [])):
            self._add(value, other)
        self._last[other] = max(self._last.get(other, -1), self._last.pop(mine, -1))
        if mine in self._sent:
            self._sent.setdefault(other, []).extend(self._sent.pop(mine))

    def pin(self, v: SSAValue) -> None:
        """The memory of `v` outlives the function's call: nobody writes into it."""
        self._pinned.add(self.root(v))

    def is_last(self, v: SSAValue, op: Operation) -> bool:
        """Whether nothing reads the memory of `v` after `op`, nor a collective that was started
        before."""
        root, at = self.root(v), self.at[op]
        under_way = any(start < at < end for start, end in self._sent.get(root, ()))
        return self._last.get(root, -1) <= at and not under_way

    def is_ours(self, v: SSAValue) -> bool:
        """Whether the memory of `v` was made by the function."""
        root = self.root(v)
        return not isinstance(root, BlockArgument) and root not in self._pinned

    def shared(self, v: SSAValue, op: Operation) -> bool:
        """Whether another operand of `op` lies in the memory of `v`."""
        return sum(self.root(x) is self.root(v) for x in op.operands) > 1
