"""A layout that a propagation may still add to.

    #dist.sharding<@m, [{dp}, {?}p1], replicated {tp}>

The rows are split over dp, and no further. The columns may be split, when priority 1 has its turn,
but not over tp.
"""

from dataclasses import dataclass

from shardir.algebra.errors import ShardirError
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text


@dataclass(frozen=True)
class Sharding:
    """A layout, and what a propagation may add to it."""

    layout: Layout
    open: frozenset[int] = frozenset()
    """Dimensions that may be split further; the others are to stay as they are."""
    priorities: tuple[int, ...] = ()
    """When each dimension takes part in the propagation, 0 first; empty: all of them at 0."""
    replicated: Axes = ()
    """Axes that are to split no open dimension."""

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
        """The one spelling: the layout's, axes in mesh order, only priorities with an effect."""
        layout = self.layout.simplified(mesh)
        priorities = tuple(
            self.priority(i) if axes or i in self.open else 0 for i, axes in enumerate(layout.dims)
        )
        replicated = mesh.simplify(tuple(sorted(self.replicated, key=mesh.order)))
        return Sharding(layout, self.open, priorities if any(priorities) else (), replicated)

    def check(self, mesh: Mesh) -> None:
        """Raises ShardirError; a layout's faults name the invariant of docs/language.md."""
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
