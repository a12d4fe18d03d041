"""Shards of global values: this rank's part, and the global value again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan.axes import Sized
from . import buffers
from .gathers import all_gather
from .mesh import Axes, Mesh
from .reductions import all_reduce


def all_slice(mesh: Mesh, x: Tensor, dim: int, axes: Axes) -> Tensor:
    """Return this rank's shard of x along `dim`: a view, no communication."""
    start, stop = mesh.bounds(x.shape[dim], axes)
    return x.narrow(dim, start, stop - start)


def local_bounds(mesh: Mesh, shape: Sequence[int], dims: Sequence[Axes]) -> list[tuple[int, int]]:
    """Return the range [start, stop) of each dimension that this rank holds of a value split by
    `dims`."""
    return [mesh.bounds(size, axes) for size, axes in zip(shape, dims, strict=True)]


def gather_global(
    mesh: Mesh, x: Tensor, dims: Sequence[Axes], partial: tuple[str, Axes] | None,
    shape: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the global value, on every rank, from the shards.

    dims: the axes that split each dimension; partial: the reduction still due, and its axes.
    """
    if partial is not None:
        x = all_reduce(mesh, x, partial[0], partial[1])
    for dim, axes in enumerate(dims):
        if isinstance(axes, Sized):
            largest = max(axes.sizes)
            blocks = all_gather(mesh, buffers.pad_to(x, dim, largest), dim, tuple(axes))
            blocks = blocks.split([largest] * len(axes.sizes), dim)
            x = torch.cat(
                [b.narrow(dim, 0, n) for b, n in zip(blocks, axes.sizes, strict=True)], dim
            )
        elif axes:
            x = all_gather(mesh, x, dim, axes, total=shape[dim])
    return x
