"""Transitions of layouts: the changes along the axes of a collective.

    gathered_along dimension 0 over dp    [{dp}, {}]                  ->  [{}, {}]
    split_along dimension 1 over dp       [{}, {}]                    ->  [{}, {dp}]
    without_partial over dp               [{}, {}], partial sum {dp}  ->  [{}, {}]
    more_partial over dp                  [{}, {}]          ->  [{}, {}], partial sum {dp}

Each returns a layout, or raises a ShardirError with the code of the violated invariant. Axes keep
the spelling that they have in the layout.
"""

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text, sizes_of
from shardir.diagnostics import ShardirError, coded


def check_dim(layout: Layout, dim: int) -> None:
    """Raise ShardirError unless a layout has this dimension."""
    if not 0 <= dim < len(layout.dims):
        found = f"expected a dimension of a tensor of rank {len(layout.dims)}, got {dim}"
        raise ShardirError(coded("C6", found))


def check_no_sizes(layout: Layout, dim: int, mesh: Mesh) -> None:
    """Raise ShardirError if the shards of a dimension have explicit sizes."""
    if sizes_of(mesh.simplify(layout.dims[dim])):
        found = (
            f"expected shards of usual sizes in dimension {dim}, got {axes_text(layout.dims[dim])}"
        )
        raise ShardirError(coded("C13", found))


def check_unused(layout: Layout, axes: Axes, mesh: Mesh) -> None:
    """Raise ShardirError if the value is split or partial over one of the axes."""
    for a in axes:
        if any(mesh.overlap(a, b) for b in layout.used):
            found = f"expected an axis over which the value is replicated, got {a} of [{layout}]"
            raise ShardirError(coded("C8", found))


def check_kind(layout: Layout, reduction: str) -> None:
    """Raise ShardirError if the value is partial with another reduction."""
    if layout.partial and layout.reduction != reduction:
        found = (
            f"expected a complete value or a partial {reduction}, got a partial {layout.reduction}"
        )
        raise ShardirError(coded("C5", found, use="reduce it first"))


def check_reachable(source: Layout, target: Layout) -> None:
    """Raise ShardirError if the target is `partial any` and the source is not so over the same
    axes."""
    if target.reduction == "any" and (source.reduction, source.partial) != ("any", target.partial):
        found = f"expected a target that a redistribution can make, got [{target}]"
        raise ShardirError(coded("L4", found))


def without_partial(layout: Layout, axes: Axes, reduction: str, mesh: Mesh) -> Layout:
    """Return the layout after a reduction over partial axes."""
    rest = _removed(layout.partial, axes, mesh)
    if rest is None:
        found = f"expected a value that is partial over {axes_text(axes)}, got [{layout}]"
        raise ShardirError(coded("C5", found))
    if layout.reduction not in (reduction, "any"):
        found = f"expected a partial {reduction}, got a partial {layout.reduction}"
        raise ShardirError(coded("C5", found, use=f"use the reduction {layout.reduction}"))
    return layout.with_partial(rest, layout.reduction)


def of_root(layout: Layout, axes: Axes, mesh: Mesh) -> Layout:
    """Return the layout of the value that the root of a group holds: not partial over `axes`."""
    rest = _removed(layout.partial, axes, mesh)
    return layout if rest is None else layout.with_partial(rest, layout.reduction)


def more_partial(layout: Layout, axes: Axes, reduction: str, mesh: Mesh) -> Layout:
    """Return the layout with further partial axes."""
    check_unused(layout, axes, mesh)
    check_kind(layout, reduction)
    partial = sorted((*layout.partial, *axes), key=mesh.order)
    return layout.with_partial(tuple(partial), reduction)


def gathered_along(layout: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    """Return the layout without these axes at the minor end of a dimension."""
    check_dim(layout, dim)
    check_no_sizes(layout, dim, mesh)
    have = layout.dims[dim]
    if axes and have[-len(axes) :] == axes:
        return layout.with_dim(dim, have[: -len(axes)])
    rest = mesh.without_minor(have, axes) if axes else None
    if rest is None:
        found = f"expected minor axes of {axes_text(have)}, dimension {dim}, got {axes_text(axes)}"
        raise ShardirError(coded("C7", found))
    return layout.with_dim(dim, rest)


def split_along(layout: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    """Return the layout with these axes added at the minor end of a dimension."""
    check_dim(layout, dim)
    check_no_sizes(layout, dim, mesh)
    check_unused(layout, axes, mesh)
    return layout.with_dim(dim, layout.dims[dim] + axes)


def _removed(partial: Axes, axes: Axes, mesh: Mesh) -> Axes | None:
    """Return `partial` without `axes`; None unless it contains all of them."""
    if len(set(axes)) == len(axes) and set(axes) <= set(partial):
        return tuple(a for a in partial if a not in axes)
    return mesh.without(partial, axes)
