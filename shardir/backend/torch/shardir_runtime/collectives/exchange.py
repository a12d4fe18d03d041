"""An exchange: from any split of a tensor to any other split.

A rank takes each piece of its new shard from a rank that holds it: the one with its own coordinates
on the axes that do not split the piece. All pieces between two ranks are one message, in one
all-to-all of uneven parts.
"""

import itertools
import math
from typing import NamedTuple

from torch import Tensor

from . import buffers
from .mesh import Axes, Mesh
from .position import recorded

DimAxes = tuple[Axes, ...]
Region = tuple[tuple[int, int], ...]


class _Transfers(NamedTuple):
    """The transfers of an exchange on this rank.

    Attributes:
        sends: the regions of the shard for each member of the group, in torch's order.
        receives: the regions of the new shard from each member.
        kept: the regions that stay on this rank: (in the shard, in the new shard).
        shape: of the new shard.
    """

    process_group: object
    sends: list[list[Region]]
    receives: list[list[Region]]
    kept: list[tuple[Region, Region]]
    shape: list[int]


_transfers: dict[tuple, _Transfers] = {}


@recorded
def exchange(
    mesh: Mesh, x: Tensor, shape: tuple[int, ...], source: DimAxes, target: DimAxes
) -> Tensor:
    """Return this rank's shard after the exchange.

    shape: the global shape. source, target: the axes that split each dimension before and after.
    """
    key = (id(mesh), shape, source, target)
    transfers = _transfers.get(key) or _transfers.setdefault(
        key, _transfers_of(mesh, shape, source, target)
    )
    out = x.new_empty(transfers.shape)
    for here, there in transfers.kept:
        _part(out, there).copy_(_part(x, here))
    if len(transfers.sends) == 1:
        return out
    sizes = [
        [sum(map(_size, regions)) for regions in side]
        for side in (transfers.sends, transfers.receives)
    ]
    flat = [_part(x, region).reshape(-1) for regions in transfers.sends for region in regions]
    received = buffers.exchange_parts(flat, sizes, x, transfers.process_group)
    start = 0
    for region in (r for regions in transfers.receives for r in regions):
        part = _part(out, region)
        part.copy_(received[start : start + part.numel()].view(part.shape))
        start += part.numel()
    return out


def _transfers_of(
    mesh: Mesh, shape: tuple[int, ...], source: DimAxes, target: DimAxes
) -> _Transfers:
    axes = tuple(a for s, t in zip(source, target, strict=True) if s != t for a in s)
    members = sorted(mesh.members(axes, mesh.rank))
    rank = mesh.rank
    mine, new = _bounds(mesh, shape, source, rank), _bounds(mesh, shape, target, rank)
    sends, receives, kept = [], [], []
    own = _pieces(mesh, shape, source, target, rank)
    for member in members:
        theirs = _pieces(mesh, shape, source, target, member)
        sent = [_relative(region, mine) for holder, region in theirs if holder == rank]
        received = [_relative(region, new) for holder, region in own if holder == member]
        if member == rank:
            kept, sent, received = list(zip(sent, received, strict=True)), [], []
        sends.append(sent)
        receives.append(received)
    group = mesh.group(axes).process_group
    return _Transfers(group, sends, receives, kept, [stop - start for start, stop in new])


def _pieces(
    mesh: Mesh, shape: tuple[int, ...], source: DimAxes, target: DimAxes, rank: int
) -> list[tuple[int, Region]]:
    """Return the pieces of a rank's new shard, in global indices, each with its holder."""
    cells = []
    for n, axes, (low, high) in zip(shape, source, _bounds(mesh, shape, target, rank), strict=True):
        shards = [mesh.bounds(n, axes, member) for member in mesh.members(axes, rank)]
        overlaps = [(k, max(low, start), min(high, stop)) for k, (start, stop) in enumerate(shards)]
        cells.append([(k, (a, b)) for k, a, b in overlaps if a < b])
    pieces = []
    for cell in itertools.product(*cells):
        holder = rank
        for axes, (k, _) in zip(source, cell, strict=True):
            holder = mesh.members(axes, holder)[k]
        pieces.append((holder, tuple(region for _, region in cell)))
    return pieces


def _bounds(mesh: Mesh, shape: tuple[int, ...], dims: DimAxes, rank: int) -> Region:
    """Return the region of the global tensor that a rank holds."""
    return tuple(mesh.bounds(n, axes, rank) for n, axes in zip(shape, dims, strict=True))


def _relative(region: Region, part: Region) -> Region:
    """Return a region of the global tensor in indices of a part that contains it."""
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(region, part, strict=True))


def _part(x: Tensor, region: Region) -> Tensor:
    for dim, (start, stop) in enumerate(region):
        x = x.narrow(dim, start, stop - start)
    return x


def _size(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)
