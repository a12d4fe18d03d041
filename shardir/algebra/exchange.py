"""An exchange between any two layouts: each device fetches exactly the elements that it lacks.

A device fetches each piece of its new shard from the device that holds the piece and has equal
coordinates along all other axes. So the load is even over replicas; the group is over the axes that
split, before the exchange, a dimension that changes; and no device receives more than it lacks,
which is the lower bound of any redistribution.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from shardir.algebra.layout import Layout, Shape, Slices
from shardir.algebra.mesh import Axes, Mesh


@dataclass(frozen=True)
class Piece:
    """A region of the global value, and the rank that holds it, which may be the device's own."""

    holder: int
    region: Slices

    @property
    def elements(self) -> int:
        n = 1
        for s in self.region:
            n *= s.stop - s.start
        return n


def exchange_axes(source: Layout, target: Layout) -> Axes:
    """Return the axes of the group of an exchange: the axes that split, before it, each dimension
    that changes."""
    return tuple(a for s, t in zip(source.dims, target.dims, strict=True) if s != t for a in s)


@lru_cache(maxsize=4096)
def pieces(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, rank: int
) -> tuple[Piece, ...]:
    """Return the pieces of the new shard of `rank`."""
    wanted = target.slices(mesh, shape, rank)
    cells: list[list[tuple[int, slice]]] = []
    for n, axes, want in zip(shape, source.dims, wanted, strict=True):
        cells.append([])
        for k in range(mesh.extent(axes)):
            start, stop = mesh.bounds(n, axes, k)
            low, high = max(start, want.start), min(stop, want.stop)
            if low < high:
                cells[-1].append((k, slice(low, high)))
    fetched = []
    for cell in product(*cells):
        holder = rank
        for axes, (k, _) in zip(source.dims, cell, strict=True):
            holder = mesh.moved(holder, axes, k)
        fetched.append(Piece(holder, tuple(region for _, region in cell)))
    return tuple(fetched)


def within(region: Slices, part: Slices) -> Slices:
    """Return a global region relative to the part of the value that contains it."""
    return tuple(
        slice(r.start - p.start, r.stop - p.start) for r, p in zip(region, part, strict=True)
    )
