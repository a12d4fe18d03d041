"""Layouts: where the parts of a tensor lie on a mesh.

    #dist.layout<@m, [{dp}, {tp, ep}], partial sum {x}>

One entry per dimension: the axes that split it, major to minor; `{}` is unsplit. An axis that
stands nowhere replicates. Over partial axes every device holds a contribution, and the value is
their reduction.

A dimension of size N over axes of total extent n is cut into n shards of ceil(N / n), the last
ones shorter or empty: shard k holds rows [min(k c, N), min((k + 1) c, N)) with c = ceil(N / n).
Other sizes are stated: `{tp} sizes [40, 20, 4, 0]`.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations

from shardir.algebra.errors import ShardirError
from shardir.algebra.mesh import Axes, Axis, Mesh, axes_text, sizes_of

Shape = tuple[int, ...]
Slices = tuple[slice, ...]

REDUCTIONS = ("sum", "max", "min", "mean", "any")
"""How contributions become the value. `any`: the devices hold different values of which no
reduction makes one; only a collective that picks (broadcast, scatter) does."""


@dataclass(frozen=True)
class Layout:
    """Which axes split each dimension, and over which axes the value is partial."""

    mesh: str
    dims: tuple[Axes, ...]
    partial: Axes = ()
    reduction: str = "sum"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.partial, self.reduction))

    def __str__(self) -> str:
        dims = ", ".join(map(axes_text, self.dims))
        partial = f", partial {self.reduction} {axes_text(self.partial)}" if self.partial else ""
        return f"@{self.mesh}, [{dims}]{partial}"

    @cached_property
    def used(self) -> Axes:
        """Every axis that splits, then every axis that is partial."""
        return tuple(a for d in self.dims for a in d) + self.partial

    @cached_property
    def complete(self) -> "Layout":
        """The same split, nothing partial."""
        return replace(self, partial=(), reduction="sum") if self.partial else self

    def with_partial(self, axes: Axes, reduction: str = "sum") -> "Layout":
        return Layout(self.mesh, self.dims, axes, reduction if axes else "sum")

    def with_dim(self, dim: int, axes: Axes) -> "Layout":
        dims = (*self.dims[:dim], axes, *self.dims[dim + 1 :])
        return Layout(self.mesh, dims, self.partial, self.reduction)

    def simplified(self, mesh: Mesh) -> "Layout":
        """The one spelling of a layout: adjoining sub-axes joined, partial axes in mesh order."""
        return _simplified(self, mesh)

    def check(self, mesh: Mesh, shape: Shape) -> None:
        """Raises ShardirError, which names the invariant of docs/language.md that is broken."""
        if len(self.dims) != len(shape):
            raise ShardirError(
                f"[L1] the layout has {len(self.dims)} dimensions, the tensor has {len(shape)}; "
                "write an entry for each, {} where it is whole"
            )
        self.check_axes(mesh)
        for d, (n, axes) in enumerate(zip(shape, self.dims, strict=True)):
            check_sizes(mesh, axes, n, f"dimension {d}")

    def check_axes(self, mesh: Mesh) -> None:
        """Raises ShardirError where no tensor whatever could have this layout on the mesh."""
        places = [(f"dimension {d}", a) for d, axes in enumerate(self.dims) for a in axes]
        places += [("partial", a) for a in self.partial]
        for where, a in places:
            try:
                mesh.check_axis(a)
            except ShardirError as e:
                raise ShardirError(f"[L2] {where}: {e}") from None
        for (first, b), (second, a) in combinations(places, 2):
            if mesh.overlap(a, b):
                twice = f"axis {a} is" if a == b else f"axes {b} and {a} overlap:"
                raise ShardirError(
                    f"[L3] {twice} used twice in the layout [{self}], for {first} and for {second};"
                    " a device can hold one part only: leave one out"
                )
        if self.reduction not in REDUCTIONS:
            raise ShardirError(
                f"[L4] no reduction {self.reduction}; there are {', '.join(REDUCTIONS)}"
            )

    def local_shape(self, mesh: Mesh, shape: Shape) -> Shape:
        """The shape of the largest shard."""
        return tuple(
            mesh.largest(n, axes) if axes else n for n, axes in zip(shape, self.dims, strict=True)
        )

    def global_shape(self, mesh: Mesh, local: Shape) -> Shape:
        """The whole shape, where all shards are `local` or of stated sizes."""
        return tuple(
            sum(sizes_of(axes)) or n * mesh.extent(axes)
            for n, axes in zip(local, self.dims, strict=True)
        )

    def even(self, mesh: Mesh, shape: Shape) -> bool:
        """Whether all shards have one shape."""
        return all(mesh.even(n, axes) for n, axes in zip(shape, self.dims, strict=True))

    def slices(self, mesh: Mesh, shape: Shape, rank: int) -> Slices:
        """The part of the global value that `rank` holds (or contributes to)."""
        return tuple(
            slice(*mesh.bounds(n, axes, mesh.index(rank, axes)))
            for n, axes in zip(shape, self.dims, strict=True)
        )

    def tensor_map(self, mesh: Mesh) -> str:
        """The documents' terms: device matrix and tensor map, -1 for a dimension unsplit.

        The map counts the device matrix' dimensions from the right, as MindSpore does.
        """
        matrix, place = _device_matrix(mesh, self.used)
        maps = [[place[a] for a in axes] for axes in self.dims]
        shown = [str(m[0] if len(m) == 1 else m or -1) for m in maps]
        cuts = [f", manual_split {s} of dimension {d}" for d, a in enumerate(self.dims)
                if (s := sizes_of(a))]  # fmt: skip
        return f"device matrix {list(matrix)}, tensor map [{', '.join(shown)}]{''.join(cuts)}"


def check_sizes(mesh: Mesh, axes: Axes, size: int, what: str) -> None:
    """Raises ShardirError where stated sizes of shards do not make up a dimension of `size`."""
    sizes, n = sizes_of(axes), mesh.extent(axes)
    if sizes and len(sizes) != n:
        raise ShardirError(
            f"[L6] {what} is split into {n} shards, but {len(sizes)} sizes are stated in "
            f"{axes_text(axes)}; state one for each"
        )
    if sizes and sum(sizes) != size:
        raise ShardirError(
            f"[L6] {what} has {size} rows, but the sizes in {axes_text(axes)} add up to "
            f"{sum(sizes)}; make it {size}"
        )


@lru_cache(maxsize=65536)
def _simplified(layout: Layout, mesh: Mesh) -> Layout:
    partial = mesh.simplify(tuple(sorted(layout.partial, key=mesh.order)))
    dims = tuple(map(mesh.simplify, layout.dims))
    return Layout(layout.mesh, dims).with_partial(partial, layout.reduction)


def _device_matrix(mesh: Mesh, used: Axes) -> tuple[Shape, dict[Axis, int]]:
    """The mesh cut at the sub-axes in use, and each sub-axis's place from the right."""
    matrix: list[int] = []
    found: dict[Axis, int] = {}
    for name, size in mesh.axes:
        sub_axes = sorted((a for a in used if a.name == name), key=lambda a: a.pre)
        at = 1
        for a in sub_axes:
            pre, end = mesh.span(a)
            if pre > at:
                matrix.append(pre // at)
            found[a] = len(matrix)
            matrix.append(end // pre)
            at = end
        if at < size or not sub_axes:
            matrix.append(size // at)
    return tuple(matrix), {a: len(matrix) - 1 - i for a, i in found.items()}


def replicated(mesh: str, rank: int) -> Layout:
    """The layout of a value that every device holds whole."""
    return _replicated(mesh, rank)


@lru_cache(maxsize=1024)
def _replicated(mesh: str, rank: int) -> Layout:
    return Layout(mesh, ((),) * rank)


@dataclass(frozen=True)
class LocalLayout:
    """A layout seen from one device: the split, and the global shape where it is not the
    local shape times the extents (uneven shards)."""

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
        return self.shape if self.shape is not None else self.layout.global_shape(mesh, local)

    @staticmethod
    def of(layout: Layout, mesh: Mesh, shape: Shape) -> "LocalLayout":
        """The local form of `layout` for a tensor of global `shape`."""
        return LocalLayout(layout, None if layout.even(mesh, shape) else shape)
