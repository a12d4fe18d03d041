"""Layouts to and from DTensor's own objects.

    names, sizes, placements = shardir.to_dtensor(layout, mesh, shape)
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    x = distribute_tensor(full, device_mesh, placements)
    layout, mesh = shardir.from_dtensor(x)

shardir/algebra/placements.py has the correspondence, and its exceptions.
"""

from math import prod
from typing import TYPE_CHECKING, Any

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.notation import parse_axes
from shardir.algebra.placements import (
    DTensorPlacement,
    Partial,
    Replicate,
    Shard,
    from_placements,
    to_placements,
)
from shardir.diagnostics import NotationError, ShardirError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Placement as TorchPlacement


def to_dtensor(
    layout: Layout, mesh: Mesh, shape: Shape, dims: Axes | None = None
) -> tuple[tuple[str, ...], tuple[int, ...], "tuple[TorchPlacement, ...]"]:
    """Names and sizes of the device mesh's dims, and the placement on each.

    Args:
        shape: the global shape.
        dims: of the device mesh, where it serves other layouts too (`placements.sub_axes`).

    Raises:
        ShardirError: DTensor has no form for the layout, or cuts the shape into other shards.
    """
    dims, placements = to_placements(layout, mesh, shape, dims)
    sizes = tuple(mesh.extent((a,)) for a in dims)
    return tuple(map(str, dims)), sizes, tuple(map(_theirs, placements))


def from_dtensor(tensor: "DTensor | Any", mesh: Mesh | None = None) -> tuple[Layout, Mesh]:
    """The layout of a DTensor or a DTensorSpec, and the mesh that it is of.

    Args:
        mesh: where the dims of the device mesh are its axes or, by their names, sub-axes of them.
        If
            not given, they are the axes of a mesh @m.

    Raises:
        ShardirError: no layout has these shards, or no mesh these ranks.
    """
    spec: Any = getattr(tensor, "_spec", tensor)
    sizes = tuple(map(int, spec.mesh.shape))
    if spec.mesh.mesh.flatten().tolist() != list(range(prod(sizes))):
        raise ShardirError(
            f"expected ranks 0 to {prod(sizes) - 1} in row-major order, got {spec.mesh}; start the "
            "ranks in that order"
        )
    names = spec.mesh.mesh_dim_names
    dims = _dims(names) if names else None
    if mesh is None:
        dims = dims or _dims([f"d{n}" for n in range(len(sizes))])
        if sub_axis := next((a for a in dims if a.size), None):
            raise ShardirError(
                f"expected mesh dims that are axes, got the sub-axis {sub_axis}; use mesh=..."
            )
        mesh = Mesh("m", tuple((a.name, n) for a, n in zip(dims, sizes, strict=True)))
    dims = dims or mesh.names
    for a in dims:
        mesh.check_axis(a)
    if mesh.simplify(dims) != mesh.simplify(mesh.names) or sizes != tuple(
        mesh.extent((a,)) for a in dims
    ):
        raise ShardirError(f"expected mesh dims that are the axes of {mesh}, got {spec.mesh}")
    factors = _split_factors(getattr(spec, "shard_order", None) or (), sizes)
    placements = [_ours(p, factors.get(n, 1)) for n, p in enumerate(spec.placements)]
    return from_placements(placements, mesh, tuple(map(int, spec.shape)), dims), mesh


def _dims(names: Any) -> Axes:
    try:
        return tuple(a for name in names for a in parse_axes(name))
    except NotationError as e:
        raise ShardirError(f"mesh dims {tuple(names)}: {e}") from None


def _split_factors(order: Any, sizes: tuple[int, ...]) -> dict[int, int]:
    """A spec's `shard_order` (the mesh dims of each dimension, in order of their splits) as split
    factors: the shards along major mesh dims that come later."""
    return {
        d: prod(sizes[e] for e in entry.mesh_dims[:k] if e > d)
        for entry in order
        for k, d in enumerate(entry.mesh_dims)
    }


def _theirs(p: DTensorPlacement) -> "TorchPlacement":
    from torch.distributed import tensor

    from shardir.compat.torch import StridedShard

    match p:
        case Shard(dim, 1):
            return tensor.Shard(dim)
        case Shard(dim, split_factor):
            return StridedShard(dim, split_factor=split_factor)
        case Partial(reduce_op):
            return tensor.Partial(reduce_op)
        case Replicate():
            return tensor.Replicate()


def _ours(p: Any, split_factor: int) -> DTensorPlacement:
    from torch.distributed import tensor

    from shardir.compat.torch import StridedShard

    if isinstance(p, StridedShard):
        return Shard(p.dim, int(p.split_factor))
    if isinstance(p, tensor.Shard):
        return Shard(p.dim, split_factor)
    if isinstance(p, tensor.Replicate):
        return Replicate()
    if type(p) is tensor.Partial:  # a subclass may have another reduction than its reduce_op
        return Partial(p.reduce_op)
    raise ShardirError(
        f"expected a Shard, Replicate or Partial, got {p!r}; redistribute it to Replicate() first"
    )
