"""Collectives in which all devices of a group have the same part."""

from dataclasses import replace
from typing import ClassVar

from shardir.algebra import forms
from shardir.algebra.collectives.base import (
    AxisState,
    Cases,
    Collective,
    CollectiveStep,
    GroupForms,
    Transfer,
    record,
)
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh, axes_text
from shardir.algebra.traffic import fetched, sent, within
from shardir.diagnostics import ShardirError, coded

MAX_PACKED = 1 << 16
"""Bounds the elements, over all devices of a group, of a value that the runtime packs with other
gathered or scattered values; a larger contiguous value has messages of its own. `shardir_runtime`
has the same number, which a test compares."""


@record
class AllReduce(Collective):
    """Partial values become the value, on every device."""

    name = "all_reduce"
    fusible = True
    start, end = AxisState.PARTIAL, AxisState.REPLICATED
    transposed = "all_reduce"
    forms: ClassVar[GroupForms] = staticmethod(forms.all_reduce)
    rounds = 2

    def received(self, t: Transfer) -> int:
        return -(-2 * t.have * (t.n - 1) // t.n)

    def packing_ops(self, n: int) -> int:
        return 3  # a view of the value, two of the sums


@record
class ReduceScatter(Collective):
    """Partial values become the value, of which each device gets its shard along `dim`."""

    name = "reduce_scatter"
    fusible = True
    start, end = AxisState.PARTIAL, AxisState.SHARDED
    transposed = "all_gather"
    forms: ClassVar[GroupForms] = staticmethod(forms.all_gather)

    def received(self, t: Transfer) -> int:
        return t.after * (t.n - 1)  # uneven shards are padded to the largest

    def size(self, t: Transfer) -> float:
        return t.after * t.n

    def is_direct(self, t: Transfer) -> bool:
        even = t.local[t.step.dim] % t.n == 0
        large = t.typical or t.alone or t.have > MAX_PACKED
        return even and large and t.is_packed(t.step.dim, t.local)

    def packing_ops(self, n: int) -> int:
        return 8  # four views and a copy; three views of the sums

    def packed(self, t: Transfer) -> int:
        return 0 if t.n == 1 or self.is_direct(t) else t.n * t.after

    def memory(self, t: Transfer, held: int) -> tuple[int, int]:
        return held + self.packed(t) + self.received(t) + t.after, t.after

    def summed(self, t: Transfer) -> int:
        is_sum = t.before.reduction in ("sum", "mean")
        return t.after if t.n > 1 and is_sum and self.is_direct(t) else 0


@record
class AllGather(Collective):
    """Each device gets the shards along `dim` of all devices."""

    name = "all_gather"
    fusible = True
    start, end = AxisState.SHARDED, AxisState.REPLICATED
    transposed = "reduce_scatter"
    forms: ClassVar[GroupForms] = staticmethod(forms.all_gather)

    def received(self, t: Transfer) -> int:
        return t.have * (t.n - 1)  # uneven shards are padded to the largest

    def size(self, t: Transfer) -> float:
        return t.have * t.n

    def is_direct(self, t: Transfer) -> bool:
        large = t.typical or t.alone or t.n * t.have > MAX_PACKED
        return large and t.is_packed(t.step.dim, t.local)

    def packing_ops(self, n: int) -> int:
        return 10  # three views of its place and a copy; four views, a result and a copy

    def memory(self, t: Transfer, held: int) -> tuple[int, int]:
        blocks, views = t.n * t.have, self.is_direct(t)  # the operand is packed into its block
        return held + blocks + (0 if views else t.after), blocks if views else t.after


@record
class AllSlice(Collective):
    """Each device keeps its shard along `dim` of a replicated value."""

    name = "all_slice"
    start, end = AxisState.REPLICATED, AxisState.SHARDED
    transposed = "sharded_to_partial"
    result = "view"

    def memory(self, t: Transfer, held: int) -> tuple[int, int]:
        return held, held


class Pairwise(Collective):
    """A collective in which each device fetches the elements that it lacks, over the links between
    it and their holder."""

    forms: ClassVar[GroupForms] = staticmethod(forms.pairwise)

    def received_by_level(self, t: Transfer) -> Cases:
        return fetched(t.mesh, t.shape, t.before.complete, t.step.layout.complete)

    def size(self, t: Transfer) -> float:
        """Return the seconds for one byte of each element: its form is in time, not in bytes."""
        levels = t.mesh.cluster_or_default.levels
        return max(
            sum(n / l.bandwidth for n, l in zip(case, levels, strict=True) if n)
            for case in self.received_by_level(t)
        )


@record
class AllToAll(Pairwise):
    """The split moves from `concat` to `dim`."""

    name = "all_to_all"
    fusible = True
    start, end = AxisState.SHARDED, AxisState.SHARDED
    transposed = "all_to_all"

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        if step.dim == step.concat:
            found = f"expected two dimensions in an all-to-all, got {step.dim} twice"
            raise ShardirError(coded("C6", found))
        return super().after(mesh, before, step)

    def transpose(self, step: CollectiveStep, before: Layout) -> CollectiveStep:
        back = super().transpose(step, before)
        return replace(back, dim=step.concat, concat=step.dim)

    def received_by_level(self, t: Transfer) -> Cases:
        if not (t.before.even(t.mesh, t.shape) and t.step.layout.even(t.mesh, t.shape)):
            return super().received_by_level(t)
        part = t.after // t.n  # from each device
        sub_axes = t.mesh.cut(t.step.axes, t.mesh.level_sub_axes)
        received, devices = [], 1
        for level in range(len(t.mesh.cluster_or_default.levels)):
            near = t.mesh.extent(tuple(within(t.mesh, level, sub_axes)))
            received.append((near - devices) * part)
            devices = near
        return (tuple(received),)

    def packing_ops(self, n: int) -> int:
        return 6 * n + 2  # of each block five views and a copy; a result, and its copy

    def memory(self, t: Transfer, held: int) -> tuple[int, int]:
        split, concat = t.step.dim, t.step.concat
        even = t.local[split] % t.n == 0 and t.local_after[concat] % t.n == 0
        flat = 0 if t.alone and even and t.is_packed(split, t.local) else t.have
        joined = 0 if t.alone and t.is_packed(concat, t.local_after) else t.after
        return held + max(2 * flat, flat + t.after + joined), t.after


@record
class ReplicatedToPartial(Collective):
    """A replicated value becomes partial: the first device of each group keeps it; the other
    devices hold zeros for a sum, and the value for max, min and mean."""

    name = "replicated_to_partial"
    start, end = AxisState.REPLICATED, AxisState.PARTIAL
    transposed = "replicated_to_partial"
    result = "operand"

    def memory(self, t: Transfer, held: int) -> tuple[int, int]:
        return super().memory(t, held) if t.step.layout.reduction == "sum" else (held, held)


@record
class ShardedToPartial(Collective):
    """Each device places its shard along `dim` among zeros: a partial sum."""

    name = "sharded_to_partial"
    start, end = AxisState.SHARDED, AxisState.PARTIAL
    transposed = "all_slice"


@record
class Reinterpret(Collective):
    """The data of each device, unchanged, as that of another value: one that varies over axes
    (`partial any`), or that is split, partial or replicated over them."""

    name = "reinterpret"
    transposed = "reinterpret"
    planned = False
    keeps_value = False
    result = "operand"

    def moves(self, n: int) -> bool:
        return False

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        return step.layout

    def memory(self, t: Transfer, held: int) -> tuple[int, int]:
        return held, held


@record
class Exchange(Pairwise):
    """From any split to any other split: each device fetches exactly the elements that it lacks."""

    name = "exchange"

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        return step.layout.with_partial(before.partial, before.reduction)

    def check(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> None:
        have, want = before.simplified(mesh), step.layout.simplified(mesh)
        if (have.partial, have.reduction) != (want.partial, want.reduction):
            found = f"expected a result that is partial as [{before}], got [{step.layout}]"
            raise ShardirError(coded("C3", found))
        axes = exchange_axes(have, want)
        if mesh.without(axes, step.axes) != ():
            found = (
                f"expected {axes_text(axes)}, the axes that split the dimensions which change, got "
                f"{axes_text(step.axes)}"
            )
            raise ShardirError(coded("C12", found))

    def memory(self, t: Transfer, held: int) -> tuple[int, int]:
        out = sent(t.mesh, t.shape, t.before.complete, t.step.layout.complete)
        got = max(map(sum, self.received_by_level(t)))
        return held + t.after + 2 * out + got, t.after
