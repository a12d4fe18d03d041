"""Layouts: how a tensor is sharded over a mesh.

    #dist.layout<@m, [{dp}, {tp, ep}], partial sum {x}>
    #dist.layout<@m, [{dp}, {}], on host>

1. Each dimension has an entry: the axes that split it, major to minor; `{}` is unsharded.
2. The tensor is replicated over axes that do not occur.
3. Over partial axes each device holds a partial value; the tensor is the reduction of these values.
4. `on host` shards are in the memory of the devices' hosts, and `dist.copy` moves them.
5. A dimension of size N over axes of extent n is cut into n shards of c = ceil(N / n), the last
   ones shorter or empty: shard k is [min(k c, N), min((k + 1) c, N)). Other sizes are explicit:
   `{tp} sizes [40, 20, 4, 0]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from math import prod

from shardir.algebra.mesh import Axes, Axis, Mesh, axes_text, sizes_of
from shardir.diagnostics import ShardirError, coded

Shape = tuple[int, ...]

MOST_ELEMENTS = "2^59 elements"
"""Bounds the elements of a tensor, so that its bytes fit into an i64 with any element type."""


def is_countable(shape: Sequence[int]) -> bool:
    """Whether a tensor has at most MOST_ELEMENTS; a size of 0 counts as 1, as in strides."""
    return prod(max(n, 1) for n in shape) <= 1 << 59


Slices = tuple[slice, ...]

REDUCTIONS = ("sum", "max", "min", "mean", "any")
"""The reductions of partial values. `any`: the value varies, each device holds one of its own. Ops
compute with it device by device, and collectives reduce, broadcast or scatter it."""


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor on a mesh.

    Attributes:
        mesh: its name.
        dims: the axes that split each dimension, major to minor.
        partial: the axes over which the value is partial.
        reduction: of partial values: one of REDUCTIONS.
        host: shards are in host memory.
    """

    mesh: str
    dims: tuple[Axes, ...]
    partial: Axes = ()
    reduction: str = "sum"
    host: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.partial, self.reduction, self.host))

    def __str__(self) -> str:
        dims = ", ".join(map(axes_text, self.dims))
        partial = f", partial {self.reduction} {axes_text(self.partial)}" if self.partial else ""
        return f"@{self.mesh}, [{dims}]{partial}{', on host' if self.host else ''}"

    @cached_property
    def used(self) -> Axes:
        """All axes that split a dimension, then all partial axes."""
        return tuple(a for d in self.dims for a in d) + self.partial

    @cached_property
    def used_set(self) -> frozenset[Axis]:
        """The axes of `used`."""
        return frozenset(self.used)

    @cached_property
    def complete(self) -> "Layout":
        """The layout without partial axes."""
        return replace(self, partial=(), reduction="sum") if self.partial else self

    @cached_property
    def on_device(self) -> "Layout":
        """The layout in device memory."""
        return replace(self, host=False) if self.host else self

    @cached_property
    def on_host(self) -> "Layout":
        """The layout in host memory."""
        return self if self.host else replace(self, host=True)

    def with_partial(self, axes: Axes, reduction: str = "sum") -> "Layout":
        """Return the layout with these partial axes."""
        return Layout(self.mesh, self.dims, axes, reduction if axes else "sum", self.host)

    @property
    def varying(self) -> Axes:
        """The axes over which devices hold values of their own."""
        return self.partial if self.reduction == "any" else ()

    def with_dim(self, dim: int, axes: Axes) -> "Layout":
        """Return the layout with a dimension split over these axes."""
        dims = (*self.dims[:dim], axes, *self.dims[dim + 1 :])
        return Layout(self.mesh, dims, self.partial, self.reduction, self.host)

    def simplified(self, mesh: Mesh) -> "Layout":
        """Return the canonical form: adjacent sub-axes merged, partial axes in mesh order."""
        return _simplified(self, mesh)

    def check(self, mesh: Mesh, shape: Shape) -> None:
        """Raise ShardirError with the code of the violated invariant (reference/invariants.md)."""
        self.check_rank(shape)
        self.check_axes(mesh)
        for d, (n, axes) in enumerate(zip(shape, self.dims, strict=True)):
            check_sizes(mesh, axes, n, f"dimension {d}")

    def check_rank(self, shape: Shape) -> None:
        """Raise ShardirError unless a tensor of this shape has as many dimensions (L1)."""
        if len(self.dims) != len(shape):
            message = (
                f"expected a layout of {len(shape)} dimensions, as the tensor has, got "
                f"{len(self.dims)}"
            )
            fix = "write an entry for each, {} for an unsharded one"
            raise ShardirError(coded("L1", message, use=fix))

    def check_axes(self, mesh: Mesh) -> None:
        """Raise ShardirError if no tensor can have this layout on the mesh (L2, L3, L4)."""
        places = [(f"dimension {d}", a) for d, axes in enumerate(self.dims) for a in axes]
        places += [("partial", a) for a in self.partial]
        for where, a in places:
            try:
                mesh.check_axis(a)
            except ShardirError as e:
                raise ShardirError(coded("L2", f"{where}: {e}")) from None
        for (first, b), (second, a) in combinations(places, 2):
            if mesh.overlap(a, b):
                message = (
                    f"expected axes that do not overlap, got {b} for {first} and {a} for {second} "
                    f"in layout [{self}]"
                )
                raise ShardirError(coded("L3", message))
        if self.reduction not in REDUCTIONS:
            message = f"expected a reduction of {', '.join(REDUCTIONS)}, got {self.reduction}"
            raise ShardirError(coded("L4", message))

    def local_shape(self, mesh: Mesh, shape: Shape) -> Shape:
        """Return the shape of the largest shard."""
        return tuple(
            mesh.largest(n, axes) if axes else n for n, axes in zip(shape, self.dims, strict=True)
        )

    def global_shape(self, mesh: Mesh, local: Shape) -> Shape:
        """Return the global shape of a tensor whose shards are all `local`, or of explicit sizes.

        Raises:
            ShardirError: the layout has another rank.
        """
        self.check_rank(local)
        return tuple(
            sum(sizes_of(axes)) or n * mesh.extent(axes)
            for n, axes in zip(local, self.dims, strict=True)
        )

    def even(self, mesh: Mesh, shape: Shape) -> bool:
        """Whether all shards have equal shapes."""
        return all(mesh.even(n, axes) for n, axes in zip(shape, self.dims, strict=True))

    def slices(self, mesh: Mesh, shape: Shape, rank: int) -> Slices:
        """Return the slices of the global tensor, or of its partial value, that `rank` holds."""
        return _slices(self, mesh, shape, rank)

    def tensor_map(self, mesh: Mesh) -> str:
        """Return MindSpore's device matrix and tensor map, -1 for an unsharded dimension.

        The map counts the device matrix' dimensions from the right.
        """
        matrix, position = _device_matrix(mesh, self.used)
        maps = [[position[a] for a in axes] for axes in self.dims]
        shown = [str(m[0] if len(m) == 1 else m or -1) for m in maps]
        cuts = [f", manual_split {s} of dimension {d}" for d, a in enumerate(self.dims)
                if (s := sizes_of(a))]  # fmt: skip
        return f"device matrix {list(matrix)}, tensor map [{', '.join(shown)}]{''.join(cuts)}"


def check_sizes(mesh: Mesh, axes: Axes, size: int, what: str) -> None:
    """Raise ShardirError unless explicit sizes of shards add up to `size` (L6).

    Args:
        what: the dimension, for messages.
    """
    sizes, n = sizes_of(axes), mesh.extent(axes)
    if sizes and len(sizes) != n:
        message = f"{what}: expected {n} sizes, one for each shard, got {len(sizes)} in "
        raise ShardirError(coded("L6", message + axes_text(axes)))
    if sizes and sum(sizes) != size:
        message = (
            f"{what}: expected sizes that add up to {size}, the size of the dimension, got "
            f"{sum(sizes)} in {axes_text(axes)}"
        )
        raise ShardirError(coded("L6", message, use="correct the sizes"))


@lru_cache(maxsize=65536)
def _slices(layout: Layout, mesh: Mesh, shape: Shape, rank: int) -> Slices:
    return tuple(
        slice(*mesh.bounds(n, axes, mesh.index(rank, axes)))
        for n, axes in zip(shape, layout.dims, strict=True)
    )


@lru_cache(maxsize=65536)
def _simplified(layout: Layout, mesh: Mesh) -> Layout:
    partial = mesh.simplify(tuple(sorted(layout.partial, key=mesh.order)))
    dims = tuple(map(mesh.simplify, layout.dims))
    return Layout(layout.mesh, dims, host=layout.host).with_partial(partial, layout.reduction)


def _device_matrix(mesh: Mesh, used: Axes) -> tuple[Shape, dict[Axis, int]]:
    """Return the mesh cut at the sub-axes in use, and each sub-axis's index from the right."""
    matrix: list[int] = []
    places: dict[Axis, int] = {}
    for name, size in mesh.axes:
        sub_axes = sorted((a for a in used if a.name == name), key=lambda a: a.pre)
        at = 1
        for a in sub_axes:
            pre, end = mesh.span(a)
            if pre > at:
                matrix.append(pre // at)
            places[a] = len(matrix)
            matrix.append(end // pre)
            at = end
        if at < size or not sub_axes:
            matrix.append(size // at)
    return tuple(matrix), {a: len(matrix) - 1 - i for a, i in places.items()}


def varying_over(layouts: Sequence[Layout], mesh: Mesh) -> Axes:
    """Return the axes over which one of some values varies, in mesh order."""
    axes: Axes = ()
    for layout in layouts:
        if layout.varying:
            axes = mesh.union(axes, layout.varying)
    return axes


def replicated(mesh: str, rank: int) -> Layout:
    """Return the layout of a replicated value."""
    return _replicated(mesh, rank)


@lru_cache(maxsize=1024)
def _replicated(mesh: str, rank: int) -> Layout:
    return Layout(mesh, ((),) * rank)


@dataclass(frozen=True)
class LocalLayout:
    """The layout of a tensor of the local view.

    Attributes:
        shape: the global shape, for uneven shards; otherwise it follows from the local shape.
    """

    layout: Layout
    shape: Shape | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.shape))

    def __str__(self) -> str:
        of = f", of [{', '.join(map(str, self.shape))}]" if self.shape is not None else ""
        return f"{self.layout}{of}"

    def global_shape(self, mesh: Mesh, local: Shape) -> Shape:
        """Return the global shape of a tensor of this local shape."""
        return self.shape if self.shape is not None else self.layout.global_shape(mesh, local)

    @staticmethod
    def of(layout: Layout, mesh: Mesh, shape: Shape) -> "LocalLayout":
        """Return the local form of `layout` for a tensor of global `shape`."""
        return LocalLayout(layout, None if layout.even(mesh, shape) else shape)
