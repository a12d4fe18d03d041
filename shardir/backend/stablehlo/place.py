"""Where an op is computed: on the only device of the global view, or on each partition of the local
view. What differs between partitions is looked up by their number."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.backend.stablehlo.traced import TracedArray
from shardir.backend.stablehlo.writer import HloWriter, WrittenValue
from shardir.dialects import dist
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret.evaluator import RankView

if TYPE_CHECKING:
    from collections.abc import Callable


class DevicePlace:
    """The only device of the global view; the base of that of the local view. It is also what an
    op's definition in numpy gets as its device."""

    run = 0
    channels = 0
    """The number of channels so far."""

    def __init__(self, writer: HloWriter):
        self.writer = writer

    def constant(self, values: object, element: str, shape: Shape | None = None) -> TracedArray:
        return TracedArray(self.writer, self.writer.constant(values, element, shape))

    def iota(self, shape: Sequence[int], dim: int, element: str = "i64") -> TracedArray:
        return self.constant(0, element).iota(tuple(shape), dim, element)

    def by_partition(self, of: "Callable[[RankView], int]") -> TracedArray:
        """An i64 that may differ between partitions."""
        raise NotImplementedError

    def start(self, value: SSAValue, dim: int) -> TracedArray:
        """The global index of the first element of a device's shard along a dimension."""
        return self.constant(0, "i64")

    def shape(self, value: SSAValue) -> Shape:
        return unsharded_type(value).get_shape()

    def global_shape(self, value: SSAValue) -> Shape:
        return self.shape(value)

    def splits(self, value: SSAValue, dim: int) -> bool:
        """Whether the shards of a dimension are parts of it."""
        return self.shape(value)[dim] != self.global_shape(value)[dim]

    def own(self, whole: TracedArray, out: SSAValue, dims: Sequence[int]) -> TracedArray:
        """A device's shard of a value that is whole along `dims`."""
        for d in dims:
            if self.splits(out, d):
                whole = whole.dynamic_part(d, self.start(out, d), self.shape(out)[d])
        return whole

    def indices(self, value: SSAValue, dim: int, element: str = "i64") -> TracedArray:
        """The global indices of the elements of a shard along a dimension, of rank 1."""
        first = self.start(value, dim).to(element)
        return self.iota((self.shape(value)[dim],), 0, element) + first


class PartitionPlace(DevicePlace):
    """A partition of the local view."""

    def __init__(self, writer: HloWriter, meshes: dict[str, Mesh], mesh: Mesh):
        super().__init__(writer)
        self.mesh = mesh
        placed: dict[SSAValue, tuple[Layout | None, Shape]] = {}
        self.ranks = [RankView(meshes, r, placed) for r in range(mesh.size)]
        self._partition: WrittenValue | None = None

    @property
    def partition(self) -> TracedArray:
        """The number of a partition, i64."""
        if self._partition is None:
            out = self.writer.op("partition_id", [], (), "ui32", before="")
            self._partition = self.writer.op("convert", [out], (), "i64")
        return TracedArray(self.writer, self._partition)

    def lookup(self, numbers: Sequence[int]) -> TracedArray:
        """A number for each partition, i64."""
        if len({*numbers}) == 1:
            return self.constant(numbers[0], "i64")
        if [*numbers] == [*range(len(numbers))]:
            return self.partition
        return (
            self.constant(np.array(numbers), "i64").dynamic_part(0, self.partition, 1).reshape(())
        )

    def by_partition(self, of: "Callable[[RankView], int]") -> TracedArray:
        return self.lookup([of(rank) for rank in self.ranks])

    def position(self, axes: Axes) -> TracedArray:
        """The position of a partition along some axes, i64."""
        return self.lookup([self.mesh.index(r, axes) for r in range(self.mesh.size)])

    def start(self, value: SSAValue, dim: int) -> TracedArray:
        return self.by_partition(lambda rank: rank.start(value, dim))

    def shape(self, value: SSAValue) -> Shape:
        return self.ranks[0].shape(value)

    def global_shape(self, value: SSAValue) -> Shape:
        return self.ranks[0].global_shape(value)

    def is_even(self, value: SSAValue) -> bool:
        """Whether all partitions have shards of one shape."""
        layout = dist.layout_of(value)
        if layout is None:
            return True
        return len({rank.shape(value) for rank in self.ranks}) == 1

    # ---- groups ----

    def new_channel(self) -> int:
        self.channels += 1
        return self.channels

    def groups(self, axes: Axes) -> str:
        """The text of the groups of partitions that differ along some axes."""
        groups = self.mesh.groups(axes)
        rows = ", ".join(f"[{', '.join(map(str, g))}]" for g in groups)
        return f"dense<[{rows}]> : tensor<{len(groups)}x{len(groups[0])}xi64>"
