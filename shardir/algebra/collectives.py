"""The collectives: one record each, which planner, cost, dialect, interpreter and emitter read.

    all_gather dim 0 over <dp>       [{tp, dp}, {}]  ->  [{tp}, {}]

Most of them change how a value is placed along their axes, from one state to another: replicated,
sharded along a dimension, partial, or held by a root. The record says from which state to which,
and from that follow the layout after it and what it refuses. What an op of the dialect is, numpy
and torch are registered by the record's name: `dist.<name>` (dialects/dist/), interpret/ and the
backend. docs/how-to-add-a-collective.md adds one.
"""

from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.algebra.transitions import (
    check_dim,
    check_no_sizes,
    gathered_along,
    more_partial,
    of_root,
    split_along,
    without_partial,
)
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError


class State(Enum):
    """What the devices along some axes hold of a value."""

    REPLICATED = "the same"
    SHARDED = "a shard each"
    PARTIAL = "addends, or what else a reduction makes the value of"
    ROOT = "one of them the value, whatever the others hold"


@dataclass(frozen=True)
class Step:
    """What a collective does to one value. `layout` is that of the value after it; `dim` the
    dimension that is gathered, scattered or sliced. An all-to-all splits `dim` and concatenates
    `concat`. `root` and `pairs` are positions in a group, row-major over `axes`."""

    kind: str
    axes: Axes
    layout: Layout
    dim: int = -1
    concat: int = -1
    reduction: str = "sum"
    root: int = 0
    pairs: tuple[int, ...] = ()
    windows: Windows | None = None

    def __str__(self) -> str:
        along = f" dim {self.dim}" if self.dim >= 0 else ""
        concat = f" concat {self.concat}" if self.concat >= 0 else ""
        return f"{self.kind}{along}{concat} over {axes_text(self.axes)} -> [{self.layout}]"

    @property
    def record(self) -> "Collective":
        return COLLECTIVES[self.kind]

    def communicates(self, mesh: Mesh) -> bool:
        return self.record.communicates and mesh.extent(self.axes) > 1


class Collective(ABC):
    """The record of a collective."""

    name: ClassVar[str]
    start: ClassVar[State | None] = None
    end: ClassVar[State | None] = None
    """What devices along its axes hold before and after it; None of one that has a transition of
    its own."""
    transposed: ClassVar[str] = ""
    """The collective that computes the transposed linear map, of what all devices hold before it to
    what all hold after it; empty where that is several."""
    communicates: ClassVar[bool] = True
    planned: ClassVar[bool] = True
    """Whether redistributions are planned with it."""
    keeps_value: ClassVar[bool] = True
    """Whether the global value is the same after it."""

    def after(self, mesh: Mesh, before: Layout, step: Step) -> Layout:
        """The layout of the result, from that of the operand.

        Raises:
            ShardirError: the collective cannot be applied to such a value (it names the invariant).
        """
        assert self.start is not None and self.end is not None
        axes, rest = step.axes, before
        if self.start is State.ROOT:
            check_position(step.root, mesh.extent(axes))
            rest = of_root(rest, axes, mesh)
        elif self.start is State.PARTIAL:
            rest = without_partial(rest, axes, step.reduction, mesh)
        elif self.start is State.SHARDED:
            dim = step.dim if self.end is not State.SHARDED else step.concat
            rest = gathered_along(rest, dim, axes, mesh)
        if self.end is State.SHARDED:
            return split_along(rest, step.dim, axes, mesh)
        if self.end is State.PARTIAL:
            kind = step.reduction if self.start is State.REPLICATED else "sum"  # zeros elsewhere
            return more_partial(rest, axes, kind, mesh)
        return rest

    def check(self, mesh: Mesh, before: Layout, step: Step) -> None:
        """Raises ShardirError when the step's layout does not follow from that before it."""
        expected = self.after(mesh, before, step)
        if step.layout.simplified(mesh) != expected.simplified(mesh):
            raise ShardirError(f"[C3] the result's layout is [{expected}], not [{step.layout}]")

    def passes(self, step: Step, n: int) -> Iterator[tuple[int, int]]:
        """Which positions of a group of n pass their shard on as it is to which others."""
        return iter(())

    @property
    def reduces(self) -> bool:
        """Whether partial values become the value."""
        return self.start is State.PARTIAL


COLLECTIVES: dict[str, Collective] = {}
"""The record of each collective, by name."""


def record(kind: type[Collective]) -> type[Collective]:
    """Adds a class's record to COLLECTIVES."""
    COLLECTIVES[kind.name] = kind()
    return kind


def between(start: State, end: State) -> Collective:
    """The record of the collective with which redistributions go from one state to another."""
    return _BETWEEN[start, end]


def move(
    start: State, end: State, mesh: Mesh, before: Layout, axes: Axes, dim: int = -1,
    concat: int = -1, reduction: str = "",
) -> Step:  # fmt: skip
    """The step from a layout with which axes go from one state to another.

    Args:
        reduction: of what becomes partial, if not that of the value.

    Raises:
        ShardirError: the axes are not in that state, or cannot come to the other.
    """
    record, reduction = _BETWEEN[start, end], reduction or before.reduction
    planned = Step(record.name, axes, before, dim, concat, reduction)
    layout = record.after(mesh, before, planned)
    return Step(record.name, axes, layout, dim, concat, reduction)


def check_position(position: int, n: int) -> None:
    """Raises ShardirError when a group of n devices has no such position."""
    if not 0 <= position < n:
        raise ShardirError(f"[C9] no position {position} in a group of {n} devices")


# ---- all devices of a group do the same ----


@record
class AllReduce(Collective):
    """Partial values become the value, on every device."""

    name = "all_reduce"
    start, end = State.PARTIAL, State.REPLICATED
    transposed = "all_reduce"


@record
class ReduceScatter(Collective):
    """Partial values become the value, each device getting its shard along `dim`."""

    name = "reduce_scatter"
    start, end = State.PARTIAL, State.SHARDED
    transposed = "all_gather"


@record
class AllGather(Collective):
    """Every device gets the shards along `dim` of all devices."""

    name = "all_gather"
    start, end = State.SHARDED, State.REPLICATED
    transposed = "reduce_scatter"


@record
class AllSlice(Collective):
    """Each device keeps its shard along `dim` of a replicated value."""

    name = "all_slice"
    start, end = State.REPLICATED, State.SHARDED
    transposed = "sharded_to_partial"
    communicates = False


@record
class AllToAll(Collective):
    """The split moves from `concat` to `dim`."""

    name = "all_to_all"
    start, end = State.SHARDED, State.SHARDED
    transposed = "all_to_all"

    def after(self, mesh: Mesh, before: Layout, step: Step) -> Layout:
        if step.dim == step.concat:
            raise ShardirError("[C6] an all-to-all moves the split to another dimension")
        return super().after(mesh, before, step)


@record
class ReplicatedToPartial(Collective):
    """A replicated value becomes partial: the first device of each group keeps it, the others
    hold zeros (sum) or the same (max, min, mean)."""

    name = "replicated_to_partial"
    start, end = State.REPLICATED, State.PARTIAL
    transposed = "replicated_to_partial"
    communicates = False


@record
class ShardedToPartial(Collective):
    """Each device places its shard along `dim` among zeros: a partial sum."""

    name = "sharded_to_partial"
    start, end = State.SHARDED, State.PARTIAL
    transposed = "all_slice"
    communicates = False


@record
class Exchange(Collective):
    """From any split to any other: each device fetches exactly what it lacks."""

    name = "exchange"

    def after(self, mesh: Mesh, before: Layout, step: Step) -> Layout:
        return step.layout.with_partial(before.partial, before.reduction)

    def check(self, mesh: Mesh, before: Layout, step: Step) -> None:
        have, want = before.simplified(mesh), step.layout.simplified(mesh)
        if (have.partial, have.reduction) != (want.partial, want.reduction):
            raise ShardirError(
                f"[C3] the result's layout is partial as [{before}] is, not [{step.layout}]"
            )
        axes = exchange_axes(have, want)
        if mesh.without(axes, step.axes) != ():
            raise ShardirError(
                f"[C12] this exchange goes over {axes_text(axes)}, which split what changes, "
                f"not over {axes_text(step.axes)}"
            )


# ---- from one, to one ----


@record
class Broadcast(Collective):
    """Every device gets the root's value."""

    name = "broadcast"
    start, end = State.ROOT, State.REPLICATED

    def passes(self, step: Step, n: int) -> Iterator[tuple[int, int]]:
        return ((step.root, k) for k in range(n))


@record
class Gather(Collective):
    """The root gets the shards along `dim` of all devices, the others zeros: a partial sum."""

    name = "gather"
    start, end = State.SHARDED, State.PARTIAL
    transposed = "scatter"
    planned = False

    def after(self, mesh: Mesh, before: Layout, step: Step) -> Layout:
        check_position(step.root, mesh.extent(step.axes))
        return super().after(mesh, before, step)


@record
class Scatter(Collective):
    """Each device gets its shard along `dim` of the root's value."""

    name = "scatter"
    start, end = State.ROOT, State.SHARDED
    transposed = "gather"
    planned = False


@record
class Permute(Collective):
    """Position `pairs[2 i]` of each group sends to position `pairs[2 i + 1]`; those that receive
    nothing hold zeros."""

    name = "permute"
    transposed = "permute"
    planned = False
    keeps_value = False

    def after(self, mesh: Mesh, before: Layout, step: Step) -> Layout:
        pairs, n = step.pairs, mesh.extent(step.axes)
        if len(pairs) % 2 or any(not 0 <= p < n for p in pairs):
            raise ShardirError(f"[C9] pairs of positions from 0 to {n - 1} are wanted")
        for side, verb in ((pairs[::2], "sends"), (pairs[1::2], "receives")):
            if len(set(side)) != len(side):
                raise ShardirError(f"[C10] a position {verb} twice")
        same = [a for a in step.axes if not any(mesh.overlap(a, b) for b in before.used)]
        zeros = sorted(set(range(n)) - set(pairs[1::2]))
        if zeros and mesh.extent(tuple(same)) > 1:
            raise ShardirError(
                f"[C3] the value is the same over {axes_text(tuple(same))}, afterwards it is not: "
                f"position {zeros[0]} receives nothing and has zeros; let each receive something"
            )
        return before

    def passes(self, step: Step, n: int) -> Iterator[tuple[int, int]]:
        return zip(step.pairs[::2], step.pairs[1::2], strict=True)


# ---- windows of a split dimension ----


class Halo(Collective):
    """Rows of a dimension on one side; on the other `dim`, the windows, and `dim` + 1, the rows of
    each. Rows and windows are split over the same axes."""

    planned = False
    keeps_value = False

    def after(self, mesh: Mesh, before: Layout, step: Step) -> Layout:
        check_dim(before, step.dim)
        check_no_sizes(before, step.dim)
        if mesh.simplify(before.dims[step.dim]) != mesh.simplify(step.axes):
            raise ShardirError(
                f"[C12] this exchange goes over {axes_text(before.dims[step.dim])}, which split "
                f"dimension {step.dim}, not over {axes_text(step.axes)}"
            )
        return before


@record
class HaloUnfold(Halo):
    """The windows of a split dimension: each device fetches the rows of its windows that it
    lacks."""

    name = "halo_unfold"
    transposed = "halo_fold"

    def after(self, mesh: Mesh, before: Layout, step: Step) -> Layout:
        super().after(mesh, before, step)
        d = step.dim
        dims = (*before.dims[: d + 1], (), *before.dims[d + 1 :])
        return Layout(before.mesh, dims, before.partial, before.reduction)


@record
class HaloFold(Halo):
    """Windows, added where their rows are: each device sends the rows of its windows that others
    hold."""

    name = "halo_fold"
    transposed = "halo_unfold"

    def after(self, mesh: Mesh, before: Layout, step: Step) -> Layout:
        super().after(mesh, before, step)
        d = step.dim
        check_dim(before, d + 1)
        if before.dims[d + 1]:
            raise ShardirError(f"[C3] dimension {d + 1}, the rows of a window, must be whole")
        if before.partial and before.reduction != "sum":
            raise ShardirError("[C5] a fold adds: a partial sum or a complete value is wanted")
        dims = (*before.dims[: d + 1], *before.dims[d + 2 :])
        return Layout(before.mesh, dims, before.partial, before.reduction)


_BETWEEN = {(c.start, c.end): c for c in COLLECTIVES.values() if c.start and c.planned}
