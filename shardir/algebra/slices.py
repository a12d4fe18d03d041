"""Dimensions that consist of slices, one for each element of a factor.

a table of 73 rows with four fields: slices <40, 24, 7, 2>
the fields over {d} of 4 devices, so the rows over {d} sizes [40, 24, 7, 2]
"""

from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, Mesh, SizedAxes, sizes_of


class SlicedDim(tuple[str, ...]):
    """A dimension that consists of one slice for each element of its factor, or for each equal part
    of the factor, as the rows of a table consist of fields.

    Attributes:
        slices: their sizes.
    """

    slices: Shape

    def __new__(cls, factor: str, slices: Shape) -> "SlicedDim":
        new = super().__new__(cls, (factor,))
        new.slices = slices
        return new

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SlicedDim)
            and tuple.__eq__(self, other)
            and self.slices == other.slices
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.slices))

    def axes(self, axes: Axes, mesh: Mesh) -> Axes | None:
        """Return the axes of the dimension from the axes of its factor; None unless each shard has
        an equal number of slices."""
        n = mesh.extent(axes)
        if n == 1:
            return ()
        if sizes_of(axes) or len(self.slices) % n:
            return None
        count = len(self.slices) // n
        sizes = tuple(sum(self.slices[k * count : (k + 1) * count]) for k in range(n))
        return mesh.simplify(SizedAxes(axes, sizes))
