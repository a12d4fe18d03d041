"""An exchange: from any split of a tensor to any other, each rank fetching what it lacks.

A rank takes each piece of its new shard from the rank that holds it and otherwise has the same
coordinates. All pieces between two ranks travel together, in one all-to-all of uneven parts.
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
    """The transfers of an exchange: for each member, in torch's order, the regions of this rank's
    shard that it receives, and those of the new shard that it sends; and the regions that this rank
    retains (from, to)."""

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
    got = buffers.exchanged(flat, sizes, x, transfers.process_group)
    start = 0
    for region in (r for regions in transfers.receives for r in regions):
        part = _part(out, region)
        part.copy_(got[start : start + part.numel()].view(part.shape))
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
    for other in members:
        theirs = _pieces(mesh, shape, source, target, other)
        given = [_within(region, mine) for holder, region in theirs if holder == rank]
        taken = [
            _within(region, new)
            for holder, region in _pieces(mesh, shape, source, target, rank)
            if holder == other
        ]
        if other == rank:
            kept, given, taken = list(zip(given, taken, strict=True)), [], []
        sends.append(given)
        receives.append(taken)
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
    found = []
    for cell in itertools.product(*cells):
        holder = rank
        for axes, (k, _) in zip(source, cell, strict=True):
            holder = mesh.members(axes, holder)[k]
        found.append((holder, tuple(region for _, region in cell)))
    return found


def _bounds(mesh: Mesh, shape: tuple[int, ...], dims: DimAxes, rank: int) -> Region:
    """Return the region of the global tensor that a rank holds."""
    return tuple(mesh.bounds(n, axes, rank) for n, axes in zip(shape, dims, strict=True))


def _within(region: Region, part: Region) -> Region:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(region, part, strict=True))


def _part(x: Tensor, region: Region) -> Tensor:
    for dim, (start, stop) in enumerate(region):
        x = x.narrow(dim, start, stop - start)
    return x


def _size(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)
