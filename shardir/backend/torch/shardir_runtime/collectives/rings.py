"""Products in steps around a ring: a rank computes with one shard while its neighbour sends it the
next one."""

from typing import Any

import torch
from torch import Tensor

from . import buffers, channels
from .mesh import Axes, Mesh
from .position import recorded


@recorded
def gathered_product(
    mesh: Mesh, x: Tensor, y: Tensor, equation: str, ring: tuple[int, int, int], axes: Axes,
    keep: bool = False,
) -> Any:  # fmt: skip
    """Return the einsum of two tensors, one of them sharded over the group and gathered.

    Args:
        ring: the index of the sharded tensor, its dimension, and the dimension of the result.
        keep: whether to return the gathered tensor too.
    """
    (which, along, dim), group = ring, mesh.group(axes)
    xs, n = [x, y], mesh.group(axes).size
    out: Any = None
    gathered: Any = None
    if keep:
        gathered = x.new_empty(
            buffers.with_size(xs[which].shape, along, n * xs[which].shape[along])
        )
    for step in range(n):
        arriving, works = None, []
        if step < n - 1:
            xs[which] = xs[which].contiguous()
            arriving, works = _pass_on(mesh, xs[which], axes)
        part = torch.einsum(equation, *xs)
        owner, size = (group.index - step) % n, part.shape[dim]
        if keep:
            length = xs[which].shape[along]
            gathered.narrow(along, owner * length, length).copy_(xs[which])
        if out is None:
            out = part.new_empty(buffers.with_size(part.shape, dim, n * size))
        out.narrow(dim, owner * size, size).copy_(part)
        for work in works:
            work.wait()
        if arriving is not None:
            xs[which] = arriving
    return (out, gathered) if keep else out


@recorded
def scattered_product(
    mesh: Mesh, x: Tensor, y: Tensor, equation: str, ring: tuple[int, int, int], axes: Axes
) -> Tensor:  # fmt: skip
    """Return this rank's shard of the sum of the group's einsums.

    ring: the index of the tensor that has the sharded dimension, and that dimension.
    """
    (which, dim, _), group = ring, mesh.group(axes)
    n = group.size
    whole = (x, y)[which]
    size = whole.shape[dim] // n
    xs, total = [x, y], None
    for step in range(n):
        arriving, works = None, []
        if total is not None:
            arriving, works = _pass_on(mesh, total, axes)
        xs[which] = whole.narrow(dim, (group.index - 1 - step) % n * size, size)
        part = torch.einsum(equation, *xs).contiguous()
        for work in works:
            work.wait()
        total = part if arriving is None else arriving.add_(part)
    assert total is not None
    return total


def _pass_on(mesh: Mesh, x: Tensor, axes: Axes) -> tuple[Tensor, list[Any]]:
    """Start to send x to the next rank of the ring, and to receive from the previous rank. Return
    the received tensor, and the works in progress."""
    group = mesh.group(axes)
    n, me = group.size, group.index
    for k in range(n):  # the same order on all ranks
        mesh.connect(axes, k, (k + 1) % n)
    arriving = torch.empty_like(x)
    works = [
        channels.start_receive(mesh, arriving, group.ranks[(me - 1) % n]),
        channels.start_send(mesh, x, group.ranks[(me + 1) % n]),
    ]
    return arriving, works
