"""The runtime of an emitted program: the mesh, shards, and collectives on local tensors.

This file is copied beside every emitted program and needs only torch. A program calls it like this:

    import runtime as rt
    y = rt.all_reduce(rt_mesh, y, "sum", ("tp",))

* An axis is a mesh axis' name, or `(name, pre, size)`: the axis seen as [pre, size, rest], major to
  minor, of which the middle is meant. Axes are given as a tuple, major to minor.
* A group is the ranks that differ only in those axes, in row-major order of the axes as listed; a
  `root`, `source` or `target` is a position in that order.
* A dimension of size N over n ranks has shards of c = ceil(N / n): rank k holds the elements
  [min(k*c, N), min((k+1)*c, N)). The last shards may be short or empty, in every collective.
* A result may be an argument, or a view of it. Only `donate=True` writes into one.
* With `wait=False` a collective is only started, and returns a `buffers.Pending`; its arguments
  must not change before its `wait()`.
* A group of one rank never communicates.
"""

import sys
from collections.abc import Callable, Sequence

import runtime_buffers as buffers
import runtime_position as position
import torch
from runtime_axes import Sized
from runtime_gathers import all_gather, all_to_all
from runtime_host import copy
from runtime_mesh import Axes, Group, Mesh, bounds
from runtime_reductions import all_reduce, reduce_scatter
from runtime_rings import gathered_product, scattered_product
from runtime_transfers import broadcast, gather, permute, recv, scatter, send
from torch import Tensor

__all__ = [
    "Axes",
    "Group",
    "Mesh",
    "Sized",
    "all_gather",
    "all_reduce",
    "all_slice",
    "all_to_all",
    "bounds",
    "broadcast",
    "copy",
    "gather",
    "gather_global",
    "gathered_product",
    "local_bounds",
    "main",
    "permute",
    "recv",
    "reduce_scatter",
    "scatter",
    "scattered_product",
    "send",
]


def main(functions: dict[str, Callable], single: bool = False) -> None:
    """Run the functions of plan.json (see runtime_main.py); `single`: on one device, unsplit."""
    import runtime_main

    position.attach(sys._getframe(1).f_code.co_filename)
    runtime_main.main(functions, single)


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
            blocks = all_gather(mesh, buffers.padded(x, dim, largest), dim, tuple(axes))
            blocks = blocks.split([largest] * len(axes.sizes), dim)
            x = torch.cat(
                [b.narrow(dim, 0, n) for b, n in zip(blocks, axes.sizes, strict=True)], dim
            )
        elif axes:
            x = all_gather(mesh, x, dim, axes, total=shape[dim])
    return x
