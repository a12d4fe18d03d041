"""The record of a collective, and a step: a collective with its parameters, for one value."""

from abc import ABC
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import ClassVar

from shardir.algebra.forms import NO_COMMUNICATION, Forms, Levels, forms_of
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.algebra.transitions import (
    gathered_along,
    more_partial,
    of_root,
    split_along,
    without_partial,
)
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError, coded


class AxisState(Enum):
    """The state of a value along some axes: the data of the devices of a group."""

    REPLICATED = "equal data"
    SHARDED = "a shard each"
    PARTIAL = "a partial value each"
    ROOT = "the value on one of them, anything on the others"


GroupForms = Callable[[Levels], Forms] | None
"""The forms of a collective for a group that spans some levels; None if it does not communicate."""


@dataclass(frozen=True)
class CollectiveStep:
    """The effect of a collective on one value.

    Attributes:
        kind: the name of its record.
        layout: after the step.
        dim: the dimension that is gathered, scattered or sliced; that an all-to-all splits.
        concat: the dimension that an all-to-all concatenates.
        reduction: of partial values.
        root: a position in a group, row-major over `axes`.
        pairs: positions of sender and receiver of a permute, alternating.
        windows: of a halo exchange.
    """

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
        """The record of the collective."""
        return COLLECTIVES[self.kind]

    def communicates(self, mesh: Mesh) -> bool:
        """Whether devices communicate in the step."""
        return self.record.communicates and mesh.extent(self.axes) > 1

    def takes_time(self, mesh: Mesh) -> bool:
        """Whether data crosses a link, of the network or of a device and its host."""
        return self.record.forms is not None and self.record.moves(mesh.extent(self.axes))

    def forms(self, mesh: Mesh) -> Forms:
        """The forms of the collective over its axes."""
        return self.record.forms_on(mesh, self.axes)


@dataclass(frozen=True)
class Transfer:
    """A step of a tensor of global `shape` and layout `before`, with the numbers of its cost.

    Attributes:
        alone: the collective moves no other value.
        typical: count as for a large tensor, whose shards have several elements in each dimension.
    """

    mesh: Mesh
    shape: Shape
    before: Layout
    step: CollectiveStep
    alone: bool = True
    typical: bool = False

    @cached_property
    def n(self) -> int:
        """The number of devices in a group."""
        return self.mesh.extent(self.step.axes)

    @cached_property
    def local(self) -> Shape:
        """The shape of the largest shard before the step."""
        return self.before.local_shape(self.mesh, self.shape)

    @cached_property
    def local_after(self) -> Shape:
        """The shape of the largest shard after the step."""
        return self.step.layout.local_shape(self.mesh, self.shape)

    @cached_property
    def have(self) -> int:
        """The number of elements of the largest shard before the step."""
        return prod(self.local)

    @cached_property
    def after(self) -> int:
        """The number of elements of the largest shard after the step."""
        return prod(self.local_after)

    def is_packed(self, dim: int, of: Shape) -> bool:
        """Whether the blocks along a dimension of a shard are contiguous, in the group's order."""
        axes = self.step.axes
        in_order = list(axes) == sorted(axes, key=self.mesh.order)
        major = dim == 0 if self.typical else prod(of[:dim]) == 1
        return in_order and major


Cases = tuple[tuple[int, ...], ...]
"""The elements that a device receives from each level, innermost first, for each distinct case."""


class Collective(ABC):
    """The record of a collective: its transition of layouts, then its cost."""

    name: ClassVar[str]
    start: ClassVar[AxisState | None] = None
    end: ClassVar[AxisState | None] = None
    """The states along its axes before and after it; None if the class defines `after`."""
    transposed: ClassVar[str] = ""
    """The collective of the transposed linear map, from the data of all devices after it to the
    data before it; empty if that takes several collectives."""
    planned: ClassVar[bool] = True
    """Whether redistributions are planned with it."""
    fusible: ClassVar[bool] = False
    """Whether one op may move several values."""
    keeps_value: ClassVar[bool] = True
    """Whether it keeps the global value."""

    result: ClassVar[str] = "new"
    """The memory of its result: `new`, a `view` of the operand, or the `operand` itself if the data
    does not change."""
    forms: ClassVar[GroupForms] = None
    rounds: ClassVar[int] = 1
    """The minimum latency of its forms, in units of log2 n consecutive messages."""

    @property
    def communicates(self) -> bool:
        """Whether devices communicate."""
        return self.forms is not None

    def moves(self, n: int) -> bool:
        """Whether it moves data in groups of n devices."""
        return n > 1

    def forms_on(self, mesh: Mesh, axes: Axes) -> Forms:
        """Return its forms for groups over `axes`."""
        return (
            NO_COMMUNICATION if self.forms is None else forms_of(self.name, self.forms, mesh, axes)
        )

    @property
    def reduces(self) -> bool:
        """Whether it reduces partial values."""
        return self.start is AxisState.PARTIAL

    # ---- layouts ----

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        """Return the layout of the result from the layout of the operand.

        Raises:
            ShardirError: the collective cannot be applied to a value with this layout.
        """
        assert self.start is not None and self.end is not None
        axes, rest = step.axes, before
        if self.start is AxisState.ROOT:
            check_position(step.root, mesh.extent(axes))
            rest = of_root(rest, axes, mesh)
        elif self.start is AxisState.PARTIAL:
            rest = without_partial(rest, axes, step.reduction, mesh)
        elif self.start is AxisState.SHARDED:
            dim = step.dim if self.end is not AxisState.SHARDED else step.concat
            rest = gathered_along(rest, dim, axes, mesh)
        if self.end is AxisState.SHARDED:
            return split_along(rest, step.dim, axes, mesh)
        if self.end is AxisState.PARTIAL:
            is_replicated = self.start is AxisState.REPLICATED  # otherwise zeros elsewhere: a sum
            return more_partial(rest, axes, step.reduction if is_replicated else "sum", mesh)
        return rest

    def check(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> None:
        """Raise ShardirError unless the step's layout follows from the layout before it (C3)."""
        expected = self.after(mesh, before, step)
        if step.layout.simplified(mesh) != expected.simplified(mesh):
            found = f"expected a result with layout [{expected}], got [{step.layout}]"
            raise ShardirError(coded("C3", found))

    def transpose(self, step: CollectiveStep, before: Layout) -> CollectiveStep:
        """Return the transpose of a step, from the cotangent of its result to the cotangent of its
        operand, which has the layout `before`."""
        return replace(step, kind=self.transposed, layout=before)

    def passes(self, step: CollectiveStep, n: int) -> Iterator[tuple[int, int]]:
        """Yield pairs of positions in a group of n: the second gets the shard of the first."""
        return iter(())

    # ---- cost ----

    def received(self, t: Transfer) -> int:
        """Return the elements that a device receives, all over the outermost level that its group
        spans, as at the edge of a unit in a ring."""
        return 0

    def received_by_level(self, t: Transfer) -> Cases:
        """Return the elements that a device receives from each level."""
        levels, outermost = len(t.mesh.cluster_or_default.levels), t.mesh.level(t.step.axes)
        received = self.received(t)
        return (tuple(received if i == outermost else 0 for i in range(levels)),)

    def size(self, t: Transfer) -> float:
        """Return the number of elements whose bytes its forms price."""
        return t.have

    def memory(self, t: Transfer, held: int) -> tuple[int, int]:
        """Return the peak of the elements that live on a device during the step, and the elements
        that the result keeps alive, for the runtime on CPUs.

        Args:
            held: elements that the operand keeps alive.
        """
        return held + t.after, t.after

    def is_direct(self, t: Transfer) -> bool:
        """Whether the value moves without a buffer shared with other values."""
        return t.alone

    def buffers(self, t: Transfer) -> int:
        """Return the elements of the step's buffers besides operand and result, for packing and
        unpacking."""
        if t.n == 1:
            return 0
        peak, _ = self.memory(t, t.have)
        return max(0, peak - t.have - t.after)

    def packing_ops(self, n: int) -> int:
        """Return the number of ops (views, copies, new tensors) that the runtime needs to move one
        of several values into their buffer and out of it, in groups of n devices. Ops for all
        values together do not count."""
        return 0

    def packed(self, t: Transfer) -> int:
        """Return the elements of its buffers that the runtime frees before it sums."""
        return 0

    def summed(self, t: Transfer) -> int:
        """Return the elements that the runtime sums, f16 and bf16 in f32, without a buffer that was
        freed before."""
        return 0


COLLECTIVES: dict[str, Collective] = {}
"""The record of each collective, by name."""


def record(kind: type[Collective]) -> type[Collective]:
    """Add the record of a class to COLLECTIVES."""
    COLLECTIVES[kind.name] = kind()
    return kind


def check_position(position: int, n: int) -> None:
    """Raise ShardirError unless a group of n devices has this position (C9)."""
    if not 0 <= position < n:
        found = f"expected a position in a group of {n} devices, got {position}"
        raise ShardirError(coded("C9", found, use=f"use 0 to {n - 1}"))
