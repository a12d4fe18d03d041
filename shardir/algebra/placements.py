"""Layouts as DTensor says them: one placement for each dim of a device mesh.

    @m, [{tp, dp}, {}], partial ...  on <dp = 2, tp = 4>
 -> [_StridedShard(dim=0, sf=4), Shard(dim=0)]

DTensor cuts a dimension by one mesh dim after another, first to last, each time as `torch.chunk`
does. Where a layout's order is another, the earlier mesh dim cuts strided: `split_factor` is the
number of parts into which later mesh dims, major to it, are still to cut (torch 2.13,
torch/distributed/tensor/placement_types.py). A mesh dim has one placement, so sub-axes are dims of
their own: the device mesh has the sub-axes of the axes as its dims, major to minor, and numbers the
ranks as before. A layout cuts at once, by ceil(N / n): the shards of uneven dimensions can differ.
A layout that states DTensor's sizes has them; one that does not has no placements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, Sized, axes_text
from shardir.diagnostics import ShardirError

REDUCE_OPS = {"sum": "sum", "mean": "avg", "max": "max", "min": "min"}
"""Our reductions, and what DTensor's Partial calls them."""


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
    """Every device holds the same."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Partial:
    """Every device holds a contribution."""

    reduce_op: str = "sum"

    def __str__(self) -> str:
        return f"Partial({self.reduce_op})"


Placement = Shard | Replicate | Partial


def sub_axes(mesh: Mesh, *layouts: Layout) -> Axes:
    """The dims of a device mesh on which all of the layouts have placements: the mesh's axes,
    major to minor, cut where a layout uses a sub-axis.

    Raises:
        ShardirError: two layouts cut one axis so that their sub-axes cross: 6 as 2 x 3 and 3 x 2.
    """
    dims: list[Axis] = []
    for axis in mesh.names:
        used = [a for l in layouts for a in l.simplified(mesh).used if a.name == axis.name]
        at = sorted({*mesh.span(axis), *(c for a in used for c in mesh.span(a))})
        if any(hi % lo for lo, hi in pairwise(at)):
            raise ShardirError(
                f"axis {axis} of size {mesh.full(axis.name)} is cut in ways that cross: "
                f"{axes_text(tuple(dict.fromkeys(used)))}; a device mesh has one of them: "
                "redistribute to a layout without the other"
            )
        cut = tuple(Axis(axis.name, lo, hi // lo) for lo, hi in pairwise(at))
        dims += [axis] if len(cut) < 2 else cut
    return tuple(dims)


def to_placements(
    layout: Layout, mesh: Mesh, shape: Shape, dims: Axes | None = None
) -> tuple[Axes, tuple[Placement, ...]]:
    """The dims of the device mesh, and the placement on each.

    Args:
        shape: of the whole tensor: it decides whether DTensor would cut the same shards.
        dims: of the device mesh, where it serves other layouts too: what `sub_axes` gives for all.

    Raises:
        ShardirError: the layout does not fit the mesh or the shape; or DTensor has no form for it.
    """
    layout.check(mesh, shape)
    dims = sub_axes(mesh, layout) if dims is None else dims
    if layout.partial and layout.reduction not in REDUCE_OPS:
        raise ShardirError(
            f"[{layout}] is a partial {layout.reduction}, which no Partial of DTensor is; "
            "redistribute it, or make it a partial sum, mean, max or min"
        )
    place: dict[Axis, Placement] = {
        a: Partial(REDUCE_OPS[layout.reduction]) for a in _cut(mesh, layout.partial, dims)
    }
    for i, axes in enumerate(layout.dims):
        order = _cut(mesh, axes, dims)
        for k, a in enumerate(order):
            later = tuple(b for b in order[:k] if dims.index(b) > dims.index(a))
            place[a] = Shard(i, mesh.extent(later))
    placements = tuple(place.get(a, Replicate()) for a in dims)
    cuts = [*zip(dims, placements, strict=True)]
    for i, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        ours, theirs = _shards(mesh, size, axes), _held(mesh, size, axes, cuts, i)
        if ours != theirs:
            k = next(k for k, rows in enumerate(ours) if rows != theirs[k])
            stated = _stated(mesh, size, tuple(axes), theirs)
            raise ShardirError(
                f"dimension {i} of size {size} over {axes_text(axes)}: in the layout rank "
                f"{mesh.moved(0, axes, k)} has {_rows_text(ours[k])}, but DTensor, which cuts by "
                f"one mesh dim after another, gives it {_rows_text(theirs[k])}; a size that "
                f"{len(ours)} divides is cut alike"
                + (f", and DTensor's shards are {axes_text(stated)}" if stated is not None else "")
            )
    return dims, placements


def from_placements(
    placements: Sequence[Placement], mesh: Mesh, shape: Shape, dims: Axes | None = None
) -> Layout:
    """The layout that has the same shards.

    Args:
        dims: the axes that the dims of the device mesh are; those of `mesh` if not given.

    Raises:
        ShardirError: no layout has these shards, and why not.
    """
    dims = mesh.names if dims is None else dims
    if len(placements) != len(dims):
        raise ShardirError(f"{len(placements)} placements for {len(dims)} dims of the mesh")
    orders: list[list[Axis]] = [[] for _ in shape]
    partial: dict[Axis, str] = {}
    for n, (a, p) in reversed([*enumerate(zip(dims, placements, strict=True))]):
        match p:
            case Shard(dim, split_factor):
                if not 0 <= dim < len(shape):
                    raise ShardirError(f"{p} on a tensor of {len(shape)} dimensions")
                _insert(mesh, orders[dim], a, split_factor, n)
            case Partial(reduce_op):
                partial[a] = reduce_op
    reductions = {ours: op for ours, op in REDUCE_OPS.items() if op in partial.values()}
    if unknown := sorted({*partial.values()} - {*reductions.values()}):
        raise ShardirError(
            f"there is no layout for Partial({unknown[0]}); redistribute it to Replicate() first"
        )
    if len(reductions) > 1:
        raise ShardirError(
            f"a value that is partial in two ways, {' and '.join(reductions.values())}, has no "
            "layout; redistribute one of them to Replicate() first"
        )
    split: list[Axes] = []
    cuts = [*zip(dims, placements, strict=True)]
    for i, (size, axes) in enumerate(zip(shape, map(tuple, orders), strict=True)):
        held = _held(mesh, size, axes, cuts, i)
        if (stated := _stated(mesh, size, axes, held)) is None:
            shards = _shards(mesh, size, axes)
            k = next(k for k, rows in enumerate(shards) if rows != held[k])
            raise ShardirError(
                f"dimension {i} of size {size}: rank {mesh.moved(0, axes, k)} has "
                f"{_rows_text(held[k])}, and a layout over {axes_text(axes)} has one range after "
                "another; redistribute to Shard(...) first"
            )
        split.append(stated)
    layout = Layout(mesh.name, tuple(split))
    layout = layout.with_partial(tuple(a for a in dims if a in partial), *reductions)
    layout.check(mesh, shape)
    return layout.simplified(mesh)


def _cut(mesh: Mesh, axes: Axes, dims: Axes) -> Axes:
    """Axes as dims of the device mesh."""
    cut = mesh.cut(mesh.simplify(axes), dims)
    cut = tuple(mesh.simplify((a,))[0] for a in cut)
    if missing := [a for a in cut if a not in dims]:
        raise ShardirError(
            f"axis {missing[0]} is no dim of the device mesh {axes_text(dims)}; "
            "let `sub_axes` find the dims for all layouts"
        )
    return cut


def _insert(mesh: Mesh, order: list[Axis], a: Axis, split_factor: int, n: int) -> None:
    """Put the axis of mesh dim `n` where `split_factor` parts are major to it among the axes of
    later mesh dims, cutting one of them at a sub-axis where that is needed."""
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
        f"mesh dim {n} strides over {split_factor} parts, and the later mesh dims cut into "
        f"{' x '.join(map(str, extents)) or 1}: its rows lie apart from each other, which no "
        "layout says; redistribute to Shard(...) first"
    )


Runs = list[tuple[int, int]]
"""Rows in order, as half-open ranges."""


def dtensor_rows(size: int, placements: Sequence[tuple[Shard, int]], place: Sequence[int]) -> Runs:
    """The rows of a dimension that DTensor gives the device at `place`, for the shards of one
    dimension, each with the size of its mesh dim."""
    rows: Runs = [(0, size)] if size else []
    for (p, parts), k in zip(placements, place, strict=True):
        pieces = [_chunk(rows, p.split_factor, i) for i in range(p.split_factor)]
        rows = _joined([r for piece in pieces for r in _chunk(piece, parts, k)])
    return rows


def _chunk(rows: Runs, parts: int, k: int) -> Runs:
    """Part `k` of rows, cut as `torch.chunk` does."""
    size = sum(b - a for a, b in rows)
    c = -(-size // parts)
    lo, hi = min(k * c, size), min((k + 1) * c, size)
    out, at = [], 0
    for a, b in rows:
        first, last = max(lo - at, 0), min(hi - at, b - a)
        if first < last:
            out.append((a + first, a + last))
        at += b - a
    return out


def _joined(rows: Runs) -> Runs:
    out: Runs = []
    for a, b in rows:
        if out and out[-1][1] == a:
            a = out.pop()[0]
        out.append((a, b))
    return out


def _held(
    mesh: Mesh, size: int, axes: Axes, cuts: Sequence[tuple[Axis, Placement]], dim: int
) -> list[Runs]:
    """The rows of a dimension that DTensor gives to each place along `axes`."""
    mine = [(a, p) for a, p in cuts if isinstance(p, Shard) and p.dim == dim]
    steps = [(p, mesh.extent((a,))) for a, p in mine]
    ranks = [mesh.moved(0, axes, k) for k in range(mesh.extent(axes))]
    return [dtensor_rows(size, steps, [mesh.coordinate(r, a) for a, _ in mine]) for r in ranks]


def _shards(mesh: Mesh, size: int, axes: Axes) -> list[Runs]:
    """The rows that a layout gives to each place along `axes`."""
    bounds = [mesh.bounds(size, axes, k) for k in range(mesh.extent(axes))]
    return [[(a, b)] if a < b else [] for a, b in bounds]


def _stated(mesh: Mesh, size: int, axes: Axes, held: list[Runs]) -> Axes | None:
    """`axes` with sizes that make these the shards; None where no sizes do."""
    stated = Sized(axes, tuple(sum(b - a for a, b in rows) for rows in held))
    return stated if _shards(mesh, size, stated) == held else None


def _rows_text(rows: Runs) -> str:
    return f"rows {', '.join(f'{a} to {b - 1}' for a, b in rows)}" if rows else "no rows"
