"""Annotations: layouts that propagation may refine.

    #dist.sharding<@m, [{dp}, {?}p1], replicated {tp}>

Dimension 0 is split over dp, and closed. Dimension 1 is open: from priority 1 on propagation may
split it, but not over tp.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text, sizes_of
from shardir.diagnostics import ShardirError, coded

DimAxes = tuple[Axes, ...]
"""The axes that split each dimension of a value."""


@dataclass(frozen=True)
class Sharding:
    """A layout, and how propagation may refine it.

    Attributes:
        open: the dimensions that may be split further; other dimensions are closed.
        priorities: the priority from which on each dimension takes part in propagation; 0 for all
            if empty.
        replicated: the axes that may not split an open dimension.
    """

    layout: Layout
    open: frozenset[int] = frozenset()
    priorities: tuple[int, ...] = ()
    replicated: Axes = ()

    def __str__(self) -> str:
        dims = []
        for i, axes in enumerate(self.layout.dims):
            entries = ", ".join([*map(str, axes), *(["?"] if i in self.open else [])])
            dims.append(f"{{{entries}}}" + (f"p{self.priority(i)}" if self.priority(i) else ""))
        parts = [f"@{self.layout.mesh}, [{', '.join(dims)}]"]
        if self.replicated:
            parts.append(f"replicated {axes_text(self.replicated)}")
        if self.layout.host:
            parts.append("on host")
        return ", ".join(parts)

    def priority(self, dim: int) -> int:
        """Return the priority of a dimension."""
        return self.priorities[dim] if self.priorities else 0

    def simplified(self, mesh: Mesh) -> "Sharding":
        """Return the normal form, which has only priorities with an effect."""
        layout = self.layout.simplified(mesh)
        priorities = tuple(
            self.priority(i) if axes or i in self.open else 0 for i, axes in enumerate(layout.dims)
        )
        replicated = mesh.simplify(tuple(sorted(self.replicated, key=mesh.order)))
        return Sharding(layout, self.open, priorities if any(priorities) else (), replicated)

    def nearest(self, layout: Layout, mesh: Mesh) -> Layout:
        """Return the annotated layout, with the axes of `layout` that open dimensions may have."""
        own, layout = self.simplified(mesh), layout.simplified(mesh)
        dims = refine(own.layout.dims, layout.dims, own.open, own.replicated, mesh)
        return replace(own.layout, dims=dims)

    def allows(self, layout: Layout, mesh: Mesh) -> bool:
        """Whether a value with this annotation may have `layout`."""
        return self.nearest(layout, mesh) == layout.simplified(mesh)

    def meet(self, other: "Sharding", mesh: Mesh) -> "Sharding | None":
        """Return the annotation that satisfies both; None if they contradict each other.

        A dimension is open if it is open in both, at the later of the two priorities.
        """
        dims = []
        for d, (a, b) in enumerate(zip(self.layout.dims, other.layout.dims, strict=True)):
            if a == b or (d in other.open and refines(a, b, mesh)):
                dims.append(a)
            elif d in self.open and refines(b, a, mesh):
                dims.append(b)
            else:
                return None
        priorities = tuple(max(self.priority(d), other.priority(d)) for d in range(len(dims)))
        one, two = self.replicated, other.replicated
        replicated = tuple(dict.fromkeys((*mesh.cut(one, two), *mesh.cut(two, one))))
        host = self.layout.host and other.layout.host
        layout = Layout(mesh.name, tuple(dims), host=host)
        both = Sharding(layout, self.open & other.open, priorities, replicated).simplified(mesh)
        return both if mesh.clash((*both.layout.used, *both.replicated)) is None else None

    def check(self, mesh: Mesh) -> None:
        """Raise ShardirError for the first violated invariant, with its code."""
        rank = len(self.layout.dims)
        self.layout.check_axes(mesh)
        for a in self.replicated:
            try:
                mesh.check_axis(a)
            except ShardirError as e:
                raise ShardirError(coded("L2", str(e))) from None
        if (clash := mesh.clash((*self.layout.used, *self.replicated))) is not None:
            message = (
                f"expected an axis that no dimension uses as replicated, got {clash[1]}, and "
                f"{clash[0]} is in use"
            )
            raise ShardirError(coded("L7", message))
        if self.priorities and len(self.priorities) != rank:
            raise ShardirError(
                f"expected {rank} priorities, one for each dimension, or none, got "
                f"{len(self.priorities)}"
            )
        for i, axes in enumerate(self.layout.dims):
            if self.priority(i) and not axes and i not in self.open:
                message = (
                    f"dimension {i}: expected no priority of an unsharded closed dimension, got "
                    f"p{self.priority(i)}"
                )
                raise ShardirError(coded("L8", message))
        if outside := sorted(i for i in self.open if not 0 <= i < rank):
            raise ShardirError(f"expected open dimensions from 0 to {rank - 1}, got {outside[0]}")


def refines(axes: Axes, coarser: Axes, mesh: Mesh) -> bool:
    """Whether `axes` split a dimension further than `coarser`, or equally."""
    if not coarser:
        return True
    if sizes_of(axes) or sizes_of(coarser):
        return False
    start = mesh.cut(coarser, axes)
    return mesh.cut(axes, coarser)[: len(start)] == start


def refine(
    dims: DimAxes, proposed: DimAxes, open: Collection[int], excluded: Axes, mesh: Mesh
) -> DimAxes:
    """Return `dims`, refined by each proposal that splits an open dimension further.

    A proposal is ignored if its axes are `excluded`, or split another dimension. The result is the
    object `dims` if nothing changes.
    """
    new = list(dims)
    for d, axes in enumerate(proposed):
        if d not in open or not axes or axes == new[d]:
            continue
        others = tuple(a for e, other in enumerate(new) if e != d for a in other)
        if mesh.clash((*others, *excluded, *axes)) is None and refines(axes, new[d], mesh):
            new[d] = axes
    return dims if tuple(new) == dims else tuple(new)
