"""Where an op is computed: on the only device of the global view, or on each partition of the local
view. What differs between partitions is looked up by their number.

Partitions run one program: each has a block of the shape of the largest shard, whose end is padding
where its own shard is shorter.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.backend.stablehlo.traced import TracedArray, Untraceable
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
            whole = self.own_along(whole, d, out, d)
        return whole

    def own_along(self, whole: TracedArray, dim: int, out: SSAValue, of: int) -> TracedArray:
        """A device's shard of a value along one dimension, as dimension `of` of a result has it."""
        return whole

    def indices(self, value: SSAValue, dim: int, element: str = "i64") -> TracedArray:
        """The global indices of the elements of a shard along a dimension, of rank 1."""
        first = self.start(value, dim).to(element)
        return self.iota((self.shape(value)[dim],), 0, element) + first


class UnknownPlace(DevicePlace):
    """A partition whose values have no layouts, as in the decomposition of an op."""

    def start(self, value: SSAValue, dim: int) -> TracedArray:
        raise Untraceable("its decomposition needs the place of a shard")


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
        """The shape of the largest shard, which all partitions have."""
        return unsharded_type(value).get_shape()

    def global_shape(self, value: SSAValue) -> Shape:
        return self.ranks[0].global_shape(value)

    def splits(self, value: SSAValue, dim: int) -> bool:
        layout = dist.layout_of(value)
        return layout is not None and self.mesh.extent(layout.dims[dim]) > 1

    def splits_any(self, op: Operation) -> bool:
        """Whether an operand or a result of an op is split."""
        return any(
            self.splits(v, d)
            for v in (*op.operands, *op.results) for d in range(len(self.shape(v)))
        )  # fmt: skip

    def own_along(self, whole: TracedArray, dim: int, out: SSAValue, of: int) -> TracedArray:
        if not self.splits(out, of):
            return whole
        starts = [rank.start(out, of) for rank in self.ranks]
        return self.from_starts(whole, dim, starts, self.shape(out)[of])

    # ---- uneven shards ----

    def uneven_dims(self, value: SSAValue) -> list[int]:
        """The dimensions of which shards differ in size."""
        layout = dist.layout_of(value)
        if layout is None:
            return []
        sizes = zip(self.global_shape(value), layout.dims, strict=True)
        return [d for d, (n, axes) in enumerate(sizes) if not self.mesh.even(n, axes)]

    def masked(
        self, x: TracedArray, value: SSAValue, dims: Sequence[int], filling: Any = 0
    ) -> TracedArray:
        """A block with a number for its padding along some dimensions."""
        for d in dims:
            count = self.by_partition(lambda rank, d=d: rank.shape(value)[d])
            is_real = (self.iota((x.shape[d],), 0) < count).broadcast(x.shape, [d])
            x = is_real.select(x, x.constant(filling, x.element, x.shape))
        return x

    def from_starts(
        self, x: TracedArray, dim: int, starts: Sequence[int], length: int, filling: float = 0
    ) -> TracedArray:
        """`length` elements of a dimension from each partition's start on; the filling outside."""
        low, high = [0] * x.ndim, [0] * x.ndim
        low[dim] = max(0, -min(starts))
        high[dim] = max(0, max(starts) + length - x.shape[dim])
        x = x.pad(low, high, filling)
        return x.dynamic_part(dim, self.lookup([s + low[dim] for s in starts]), length)

    def to_starts(self, x: TracedArray, dim: int, starts: Sequence[int], size: int) -> TracedArray:
        """Zeros along a dimension of `size`, with x from each partition's start on."""
        low, high = [0] * x.ndim, [0] * x.ndim
        low[dim] = max(0, *starts)
        high[dim] = max(0, size - min(starts) - x.shape[dim])
        padded = x.pad(low, high)
        return padded.dynamic_part(dim, self.lookup([low[dim] - s for s in starts]), size)

    # ---- groups ----

    def new_channel(self) -> int:
        self.channels += 1
        return self.channels

    def groups(self, axes: Axes) -> str:
        """The text of the groups of partitions that differ along some axes."""
        groups = self.mesh.groups(axes)
        rows = ", ".join(f"[{', '.join(map(str, g))}]" for g in groups)
        return f"dense<[{rows}]> : tensor<{len(groups)}x{len(groups[0])}xi64>"
