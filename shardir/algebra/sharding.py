"""Annotations: layouts that propagation may still refine.

    #dist.sharding<@m, [{dp}, {?}p1], replicated {tp}>

Dimension 0 is split over dp, and is closed. Dimension 1 is open: once propagation is at priority 1
it may be split, but not over tp.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text, sizes_of
from shardir.diagnostics import ShardirError

DimAxes = tuple[Axes, ...]
"""The axes that split each dimension of a value."""


@dataclass(frozen=True)
class Sharding:
    """A layout, and how propagation may refine it."""

    layout: Layout
    open: frozenset[int] = frozenset()
    """The dimensions that may be split further; the others are closed."""
    priorities: tuple[int, ...] = ()
    """The priority at which each dimension takes part in propagation, 0 first; empty: 0 for all."""
    replicated: Axes = ()
    """The axes that may split no open dimension."""

    def __str__(self) -> str:
        dims = []
        for i, axes in enumerate(self.layout.dims):
            entries = ", ".join([*map(str, axes), *(["?"] if i in self.open else [])])
            dims.append(f"{{{entries}}}" + (f"p{self.priority(i)}" if self.priority(i) else ""))
        parts = [f"@{self.layout.mesh}, [{', '.join(dims)}]"]
        if self.replicated:
            parts.append(f"replicated {axes_text(self.replicated)}")
        return ", ".join(parts)

    def priority(self, dim: int) -> int:
        return self.priorities[dim] if self.priorities else 0

    def simplified(self, mesh: Mesh) -> "Sharding":
        """The canonical form: the layout's, axes in mesh order, only priorities with an effect."""
        layout = self.layout.simplified(mesh)
        priorities = tuple(
            self.priority(i) if axes or i in self.open else 0 for i, axes in enumerate(layout.dims)
        )
        replicated = mesh.simplify(tuple(sorted(self.replicated, key=mesh.order)))
        return Sharding(layout, self.open, priorities if any(priorities) else (), replicated)

    def allows(self, layout: Layout, mesh: Mesh) -> bool:
        """Whether a value with this annotation may have `layout`."""
        mine, layout = self.simplified(mesh), layout.simplified(mesh)
        dims = refine(mine.layout.dims, layout.dims, mine.open, mine.replicated, mesh)
        return replace(mine.layout, dims=dims) == layout

    def meet(self, other: "Sharding", mesh: Mesh) -> "Sharding | None":
        """The annotation of a value that has both: a dimension is open where both have it open,
        at the later of their priorities. None where they contradict each other."""
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
        layout = Layout(mesh.name, tuple(dims))
        both = Sharding(layout, self.open & other.open, priorities, replicated).simplified(mesh)
        return both if mesh.clash((*both.layout.used, *both.replicated)) is None else None

    def check(self, mesh: Mesh) -> None:
        """Raise ShardirError for the first error, with the number of its invariant."""
        rank = len(self.layout.dims)
        self.layout.check_axes(mesh)
        for a in self.replicated:
            try:
                mesh.check_axis(a)
            except ShardirError as e:
                raise ShardirError(f"[L2] {e}") from None
        if (clash := mesh.clash((*self.layout.used, *self.replicated))) is not None:
            raise ShardirError(
                f"[L7] axis {clash[1]} is to stay replicated, and {clash[0]} is in use; an axis "
                "splits, is unreduced or replicates: leave it out in all places but one"
            )
        if self.priorities and len(self.priorities) != rank:
            raise ShardirError(
                f"{len(self.priorities)} priorities for {rank} dimensions; one for each, or none"
            )
        for i, axes in enumerate(self.layout.dims):
            if self.priority(i) and not axes and i not in self.open:
                raise ShardirError(
                    f"[L8] dimension {i} is unsplit and closed, so that its priority "
                    f"p{self.priority(i)} has no effect; leave it out, or open the dimension: {{?}}"
                )
        if outside := sorted(i for i in self.open if not 0 <= i < rank):
            raise ShardirError(f"dimension {outside[0]} is open, and there are {rank}")


def refines(axes: Axes, coarser: Axes, mesh: Mesh) -> bool:
    """Whether a dimension over `coarser` is split further by being split over `axes`."""
    if not coarser:
        return True
    if sizes_of(axes) or sizes_of(coarser):
        return False
    start = mesh.cut(coarser, axes)
    return mesh.cut(axes, coarser)[: len(start)] == start


def refine(
    dims: DimAxes, proposed: DimAxes, open: Collection[int], excluded: Axes, mesh: Mesh
) -> DimAxes:
    """`dims` with each proposal that splits an open dimension further, over axes that are neither
    in use nor `excluded`; the same object where nothing changes."""
    new = list(dims)
    for d, axes in enumerate(proposed):
        if d not in open or not axes or axes == new[d]:
            continue
        others = tuple(a for e, other in enumerate(new) if e != d for a in other)
        if mesh.clash((*others, *excluded, *axes)) is None and refines(axes, new[d], mesh):
            new[d] = axes
    return dims if tuple(new) == dims else tuple(new)
