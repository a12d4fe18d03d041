"""Collectives that name single devices of a group by position."""

from collections.abc import Iterator
from dataclasses import replace

from shardir.algebra import forms
from shardir.algebra.collectives.base import (
    AxisState,
    Collective,
    CollectiveStep,
    Transfer,
    check_position,
    record,
)
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh, axes_text
from shardir.diagnostics import ShardirError, coded


@record
class Broadcast(Collective):
    """Every device gets the root's value."""

    name = "broadcast"
    start, end = AxisState.ROOT, AxisState.REPLICATED
    result = "operand"
    forms = staticmethod(forms.broadcast)

    def received(self, t: Transfer) -> int:
        return t.have

    def passes(self, step: CollectiveStep, n: int) -> Iterator[tuple[int, int]]:
        return ((step.root, k) for k in range(n))


@record
class Gather(Collective):
    """The root gets the shards along `dim` of all devices, the other devices zeros: a partial
    sum."""

    name = "gather"
    start, end = AxisState.SHARDED, AxisState.PARTIAL
    transposed = "scatter"
    planned = False
    forms = staticmethod(forms.gather)

    def received(self, t: Transfer) -> int:
        return t.have * (t.n - 1)

    def size(self, t: Transfer) -> float:
        return t.have * t.n

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        check_position(step.root, mesh.extent(step.axes))
        return super().after(mesh, before, step)


@record
class Scatter(Collective):
    """Each device gets its shard along `dim` of the root's value."""

    name = "scatter"
    start, end = AxisState.ROOT, AxisState.SHARDED
    transposed = "gather"
    planned = False
    forms = staticmethod(forms.gather)

    def received(self, t: Transfer) -> int:
        return t.after

    def size(self, t: Transfer) -> float:
        return t.after * t.n


@record
class Permute(Collective):
    """Position `pairs[2 i]` of each group sends to position `pairs[2 i + 1]`; positions that
    receive nothing hold zeros."""

    name = "permute"
    transposed = "permute"
    result = "operand"
    planned = False
    keeps_value = False
    forms = staticmethod(forms.direct)

    def received(self, t: Transfer) -> int:
        return t.have

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        pairs, n = step.pairs, mesh.extent(step.axes)
        if len(pairs) % 2 or any(not 0 <= p < n for p in pairs):
            found = f"expected pairs of positions from 0 to {n - 1}, got {list(pairs)}"
            raise ShardirError(coded("C9", found))
        for side, verb in ((pairs[::2], "send"), (pairs[1::2], "receive")):
            if len(set(side)) != len(side):
                found = f"expected each position to {verb} at most once, got {list(side)}"
                raise ShardirError(coded("C10", found))
        same = [a for a in step.axes if not any(mesh.overlap(a, b) for b in before.used)]
        zeros = sorted(set(range(n)) - set(pairs[1::2]))
        if zeros and mesh.extent(tuple(same)) > 1:
            found = (
                f"expected each position to receive a value that is replicated over "
                f"{axes_text(tuple(same))}, got none for position {zeros[0]}"
            )
            raise ShardirError(coded("C3", found, use="write a pair for each position"))
        return before

    def transpose(self, step: CollectiveStep, before: Layout) -> CollectiveStep:
        pairs = tuple(p for source, target in self.passes(step, 0) for p in (target, source))
        return replace(super().transpose(step, before), pairs=pairs)

    def passes(self, step: CollectiveStep, n: int) -> Iterator[tuple[int, int]]:
        return zip(step.pairs[::2], step.pairs[1::2], strict=True)
