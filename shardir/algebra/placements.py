"""Layouts as DTensor's placements: one for each dim of a device mesh.

    @m, [{tp, dp}, {}], partial ...  on <dp = 2, tp = 4>
 -> [_StridedShard(dim=0, sf=4), Shard(dim=0)]

DTensor cuts a dimension by one mesh dim after another, first to last, each time as `torch.chunk`
does. Where a layout's order is another, the earlier mesh dim cuts strided: `split_factor` is the
number of parts into which later mesh dims, major to it, are still to cut (torch 2.13,
torch/distributed/tensor/placement_types.py). A mesh dim has one placement, so sub-axes are dims of
their own: the device mesh has the sub-axes of the axes as its dims, major to minor, and numbers the
ranks as before. A layout cuts at once, by ceil(N / n): the shards of uneven dimensions can differ.
A layout with explicit sizes can have the shards of DTensor; otherwise it has no placements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, SizedAxes, axes_text
from shardir.diagnostics import ShardirError

REDUCE_OPS = {"sum": "sum", "mean": "avg", "max": "max", "min": "min"}
"""DTensor's names of the reductions."""


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is cut; with a split factor above 1 it is DTensor's _StridedShard."""

    dim: int
    split_factor: int = 1

    def __str__(self) -> str:
        if self.split_factor == 1:
            return f"Shard(dim={self.dim})"
        return f"_StridedShard(dim={self.dim}, sf={self.split_factor})"


@dataclass(frozen=True)
class Replicate:
    """Every device holds the value."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Partial:
    """Every device holds a partial value."""

    reduce_op: str = "sum"

    def __str__(self) -> str:
        return f"Partial({self.reduce_op})"


DTensorPlacement = Shard | Replicate | Partial


def sub_axes(mesh: Mesh, *layouts: Layout) -> Axes:
    """Return the dims of a device mesh on which all layouts have placements: the mesh's axes, major
    to minor, cut where a layout uses a sub-axis.

    Raises:
        ShardirError: two layouts cut one axis so that their sub-axes cross: 6 as 2 x 3 and 3 x 2.
    """
    dims: list[Axis] = []
    for axis in mesh.names:
        used = [a for l in layouts for a in l.simplified(mesh).used if a.name == axis.name]
        at = sorted({*mesh.span(axis), *(c for a in used for c in mesh.span(a))})
        if any(hi % lo for lo, hi in pairwise(at)):
            raise ShardirError(
                f"expected sub-axes of {axis}, of size {mesh.full(axis.name)}, that do not cross, "
                f"got {axes_text(tuple(dict.fromkeys(used)))}; redistribute to a layout without "
                "one of them"
            )
        cut = tuple(Axis(axis.name, lo, hi // lo) for lo, hi in pairwise(at))
        dims += [axis] if len(cut) < 2 else cut
    return tuple(dims)


def to_placements(
    layout: Layout, mesh: Mesh, shape: Shape, dims: Axes | None = None
) -> tuple[Axes, tuple[DTensorPlacement, ...]]:
    """Return the dims of the device mesh, and the placement on each.

    Args:
        shape: global; it decides whether DTensor would have the same shards.
        dims: of a device mesh for several layouts: the result of `sub_axes` for all of them.

    Raises:
        ShardirError: the layout does not fit the mesh or the shape, or DTensor cannot express it.
    """
    layout.check(mesh, shape)
    dims = sub_axes(mesh, layout) if dims is None else dims
    if layout.host:
        raise ShardirError(
            f"expected a layout in device memory, as all placements are, got [{layout}]; "
            "redistribute to it"
        )
    if layout.partial and layout.reduction not in REDUCE_OPS:
        raise ShardirError(
            f"expected a partial {', '.join(REDUCE_OPS)}, as DTensor's, got [{layout}]; "
            "redistribute it"
        )
    found: dict[Axis, DTensorPlacement] = {
        a: Partial(REDUCE_OPS[layout.reduction]) for a in _cut(mesh, layout.partial, dims)
    }
    for i, axes in enumerate(layout.dims):
        order = _cut(mesh, axes, dims)
        for k, a in enumerate(order):
            later = tuple(b for b in order[:k] if dims.index(b) > dims.index(a))
            found[a] = Shard(i, mesh.extent(later))
    placements = tuple(found.get(a, Replicate()) for a in dims)
    cuts = [*zip(dims, placements, strict=True)]
    for i, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        own, dtensor = _layout_ranges(mesh, size, axes), _held_ranges(mesh, size, axes, cuts, i)
        if own != dtensor:
            k = next(k for k, ranges in enumerate(own) if ranges != dtensor[k])
            sized = _with_sizes(mesh, size, tuple(axes), dtensor)
            raise ShardirError(
                f"dimension {i} of size {size} over {axes_text(axes)}: expected "
                f"{_ranges_text(own[k])} on rank {mesh.moved(0, axes, k)}, got "
                f"{_ranges_text(dtensor[k])} by DTensor, which cuts by one mesh dim after another; "
                f"use a size that {len(own)} divides"
                + (f", or DTensor's shards, {axes_text(sized)}" if sized is not None else "")
            )
    return dims, placements


def from_placements(
    placements: Sequence[DTensorPlacement], mesh: Mesh, shape: Shape, dims: Axes | None = None
) -> Layout:
    """Return the layout that has the same shards.

    Args:
        dims: the axes of the dims of the device mesh; those of `mesh` if not given.

    Raises:
        ShardirError: no layout has these shards.
    """
    dims = mesh.names if dims is None else dims
    if len(placements) != len(dims):
        raise ShardirError(
            f"expected {len(dims)} placements, one for each dim of the mesh, got {len(placements)}"
        )
    orders: list[list[Axis]] = [[] for _ in shape]
    partial: dict[Axis, str] = {}
    for n, (a, p) in reversed([*enumerate(zip(dims, placements, strict=True))]):
        match p:
            case Shard(dim, split_factor):
                if not 0 <= dim < len(shape):
                    raise ShardirError(
                        f"expected a placement of a tensor of {len(shape)} dimensions, got {p}"
                    )
                _insert(mesh, orders[dim], a, split_factor, n)
            case Partial(reduce_op):
                partial[a] = reduce_op
    reductions = {ours: op for ours, op in REDUCE_OPS.items() if op in partial.values()}
    if unknown := sorted({*partial.values()} - {*reductions.values()}):
        raise ShardirError(
            f"expected a Partial of {', '.join(REDUCE_OPS.values())}, got Partial({unknown[0]}); "
            "redistribute it to Replicate() first"
        )
    if len(reductions) > 1:
        raise ShardirError(
            f"expected Partial of one reduction, got {' and '.join(reductions.values())}; "
            "redistribute one of them to Replicate() first"
        )
    split: list[Axes] = []
    cuts = [*zip(dims, placements, strict=True)]
    for i, (size, axes) in enumerate(zip(shape, map(tuple, orders), strict=True)):
        held = _held_ranges(mesh, size, axes, cuts, i)
        if (sized := _with_sizes(mesh, size, axes, held)) is None:
            shards = _layout_ranges(mesh, size, axes)
            k = next(k for k, ranges in enumerate(shards) if ranges != held[k])
            raise ShardirError(
                f"dimension {i} of size {size}: expected ranges in the order of {axes_text(axes)}, "
                f"got {_ranges_text(held[k])} on rank {mesh.moved(0, axes, k)}; redistribute to "
                "Shard(...) first"
            )
        split.append(sized)
    layout = Layout(mesh.name, tuple(split))
    layout = layout.with_partial(tuple(a for a in dims if a in partial), *reductions)
    layout.check(mesh, shape)
    return layout.simplified(mesh)


def _cut(mesh: Mesh, axes: Axes, dims: Axes) -> Axes:
    """Return axes cut into dims of the device mesh."""
    cut = mesh.cut(mesh.simplify(axes), dims)
    cut = tuple(mesh.simplify((a,))[0] for a in cut)
    if missing := [a for a in cut if a not in dims]:
        raise ShardirError(
            f"expected a dim of the device mesh {axes_text(dims)}, got {missing[0]}; "
            "use the dims of `sub_axes` for all layouts"
        )
    return cut


def _insert(mesh: Mesh, order: list[Axis], a: Axis, split_factor: int, n: int) -> None:
    """Insert the axis of mesh dim `n` behind axes of later mesh dims with `split_factor` parts,
    cutting one of them into sub-axes if necessary."""
    extents = [mesh.extent((b,)) for b in order]
    major = [*accumulate(extents, mul, initial=1)]
    for k, parts in enumerate(major):
        if parts == split_factor:
            order.insert(k, a)
            return
    for k, (parts, size) in enumerate(zip(major, extents, strict=False)):
        first, rest = divmod(split_factor, parts)
        if rest == 0 and 1 < first < size and size % first == 0:
            order[k : k + 1] = mesh.split(order[k], first)
            order.insert(k + 1, a)
            return
    raise ShardirError(
        f"mesh dim {n}: expected a split factor that fits the later mesh dims, which cut into "
        f"{' x '.join(map(str, extents)) or 1}, got {split_factor}; redistribute to Shard(...) "
        "first"
    )


Ranges = list[tuple[int, int]]
"""Half-open ranges of a dimension, in order."""


def dtensor_ranges(
    size: int, placements: Sequence[tuple[Shard, int]], coordinates: Sequence[int]
) -> Ranges:
    """Return the ranges of a dimension that DTensor assigns to the device at `coordinates`, for the
    shards of one dimension, each with the size of its mesh dim."""
    ranges: Ranges = [(0, size)] if size else []
    for (p, parts), k in zip(placements, coordinates, strict=True):
        pieces = [_chunk(ranges, p.split_factor, i) for i in range(p.split_factor)]
        ranges = _merge([r for piece in pieces for r in _chunk(piece, parts, k)])
    return ranges


def _chunk(ranges: Ranges, parts: int, k: int) -> Ranges:
    """Return chunk `k` of ranges, cut as `torch.chunk` does."""
    size = sum(b - a for a, b in ranges)
    c = -(-size // parts)
    lo, hi = min(k * c, size), min((k + 1) * c, size)
    out, at = [], 0
    for a, b in ranges:
        first, last = max(lo - at, 0), min(hi - at, b - a)
        if first < last:
            out.append((a + first, a + last))
        at += b - a
    return out


def _merge(ranges: Ranges) -> Ranges:
    """Return ranges with adjacent ones merged."""
    out: Ranges = []
    for a, b in ranges:
        if out and out[-1][1] == a:
            a = out.pop()[0]
        out.append((a, b))
    return out


def _held_ranges(
    mesh: Mesh, size: int, axes: Axes, cuts: Sequence[tuple[Axis, DTensorPlacement]], dim: int
) -> list[Ranges]:
    """Return the ranges of a dimension that DTensor assigns to each position along `axes`."""
    own = [(a, p) for a, p in cuts if isinstance(p, Shard) and p.dim == dim]
    steps = [(p, mesh.extent((a,))) for a, p in own]
    ranks = [mesh.moved(0, axes, k) for k in range(mesh.extent(axes))]
    return [dtensor_ranges(size, steps, [mesh.coordinate(r, a) for a, _ in own]) for r in ranks]


def _layout_ranges(mesh: Mesh, size: int, axes: Axes) -> list[Ranges]:
    """Return the ranges that a layout assigns to each position along `axes`."""
    bounds = [mesh.bounds(size, axes, k) for k in range(mesh.extent(axes))]
    return [[(a, b)] if a < b else [] for a, b in bounds]


def _with_sizes(mesh: Mesh, size: int, axes: Axes, held: list[Ranges]) -> Axes | None:
    """Return `axes` with explicit sizes whose shards are the ranges `held`; None if no sizes
    give them."""
    sized = SizedAxes(axes, tuple(sum(b - a for a, b in ranges) for ranges in held))
    return sized if _layout_ranges(mesh, size, sized) == held else None


def _ranges_text(ranges: Ranges) -> str:
    return f"elements {', '.join(f'{a} to {b - 1}' for a, b in ranges)}" if ranges else "none"
