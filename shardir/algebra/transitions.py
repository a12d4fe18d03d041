"""Layouts before and after: what happens to the axes over which devices communicate.

    gathered_along dimension 0 over dp    [{dp}, {}]                  ->  [{}, {}]
    split_along dimension 1 over dp       [{}, {}]                    ->  [{}, {dp}]
    without_partial over dp               [{}, {}], partial sum {dp}  ->  [{}, {}]
    more_partial over dp                  [{}, {}]          ->  [{}, {}], partial sum {dp}

Each returns a layout or raises a ShardirError that names the invariant of docs/invariants.md. Axes
keep the spelling that they have in the layout.
"""

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text, sizes_of
from shardir.diagnostics import ShardirError


def check_dim(layout: Layout, dim: int) -> None:
    """Raises ShardirError when there is no such dimension."""
    if not 0 <= dim < len(layout.dims):
        raise ShardirError(f"[C6] no dimension {dim} in a tensor of {len(layout.dims)}")


def check_no_sizes(layout: Layout, dim: int) -> None:
    """Raises ShardirError where a dimension is split into shards of stated sizes."""
    if sizes_of(layout.dims[dim]):
        raise ShardirError(
            f"[C13] dimension {dim} is split as {axes_text(layout.dims[dim])}; only a "
            "dist.exchange moves shards of stated sizes"
        )


def check_unused(layout: Layout, axes: Axes, mesh: Mesh) -> None:
    """Raises ShardirError where the value is split or partial over one of the axes."""
    for a in axes:
        if any(mesh.overlap(a, b) for b in layout.used):
            raise ShardirError(f"[C8] axis {a} is in use in the layout [{layout}]")


def without_partial(layout: Layout, axes: Axes, reduction: str, mesh: Mesh) -> Layout:
    """The layout after the partial values over these axes are reduced."""
    kept = _removed(layout.partial, axes, mesh)
    if kept is None:
        raise ShardirError(
            f"[C5] the value is partial over {axes_text(layout.partial)}, "
            f"not over {axes_text(axes)}: there is nothing to reduce"
        )
    if layout.reduction != reduction:
        raise ShardirError(
            f"[C5] the value is a partial {layout.reduction}, the collective takes the {reduction}"
        )
    return layout.with_partial(kept, layout.reduction)


def of_root(layout: Layout, axes: Axes, mesh: Mesh) -> Layout:
    """The layout of what one device of a group holds: no longer partial over `axes`, if it was."""
    kept = _removed(layout.partial, axes, mesh)
    return layout if kept is None else layout.with_partial(kept, layout.reduction)


def more_partial(layout: Layout, axes: Axes, reduction: str, mesh: Mesh) -> Layout:
    """The layout, partial over these axes too."""
    check_unused(layout, axes, mesh)
    if layout.partial and layout.reduction != reduction:
        raise ShardirError(
            f"[C5] the value is a partial {layout.reduction} already, it can't be a partial "
            f"{reduction} as well; reduce it first"
        )
    partial = sorted((*layout.partial, *axes), key=mesh.order)
    return layout.with_partial(tuple(partial), reduction)


def gathered_along(layout: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    """The layout, its dimension no longer split over these axes, which are the minor ones."""
    check_dim(layout, dim)
    check_no_sizes(layout, dim)
    have = layout.dims[dim]
    if axes and have[-len(axes) :] == axes:
        return layout.with_dim(dim, have[: -len(axes)])
    rest = mesh.without_minor(have, axes) if axes else None
    if rest is None:
        raise ShardirError(
            f"[C7] dimension {dim} is split over {axes_text(have)}, "
            f"whose minor end is not {axes_text(axes)}"
        )
    return layout.with_dim(dim, rest)


def split_along(layout: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    """The layout, its dimension split over these axes too, on the minor side."""
    check_dim(layout, dim)
    check_no_sizes(layout, dim)
    check_unused(layout, axes, mesh)
    return layout.with_dim(dim, layout.dims[dim] + axes)


def _removed(partial: Axes, axes: Axes, mesh: Mesh) -> Axes | None:
    """The partial axes less some of them; None where these are not among them."""
    if len(set(axes)) == len(axes) and set(axes) <= set(partial):
        return tuple(a for a in partial if a not in axes)
    return mesh.without(partial, axes)
