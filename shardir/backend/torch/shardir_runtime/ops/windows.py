"""Windows of a dimension, and ops that slide over rows.

Window p of a dimension of `rows` has the rows [p step + offset, p step + offset + size). Where one
set of axes splits rows and windows, a rank fetches the missing rows of its windows from other ranks
(unfold), or sends them its sums for their rows (fold), in one all-to-all of uneven parts.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives import buffers
from ..collectives.mesh import Axes, Mesh

RowRange = tuple[int, int]


def span(x: Tensor, dim: int, start: int, length: int, lowest: bool = False) -> Tensor:
    """Return rows [start, start + length) of a dimension, with zeros or the lowest number past its
    ends."""
    n = x.shape[dim]
    if start == 0 and length == n:
        return x
    low, high = min(max(start, 0), n), max(min(start + length, n), 0)
    if low == start and high == start + length:
        return x.narrow(dim, low, length)
    fill = 0 if not lowest else float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    shape = list(x.shape)
    shape[dim] = length
    out = x.new_full(shape, fill)
    if low < high:
        out.narrow(dim, low - start, high - low).copy_(x.narrow(dim, low, high - low))
    return out


def unfold(
    x: Tensor, dim: int, count: int, size: int, step: int, start: int, lowest: bool = False
) -> Tensor:
    """Return windows of x, the first from row `start` on, as two dimensions: windows and rows."""
    if count == 0:
        return x.new_empty((*x.shape[:dim], 0, size, *x.shape[dim + 1 :]))
    rows = span(x, dim, start, (count - 1) * step + size, lowest)
    if count == 1:
        return rows.unsqueeze(dim)
    return rows.unfold(dim, size, step).movedim(-1, dim + 1).contiguous()


def fold(x: Tensor, dim: int, rows: int, step: int, start: int) -> Tensor:
    """Return the sums of windows at their rows, the first window from row `start` on."""
    return span(_add_windows(x, dim, step), dim, -start, rows)


def _add_windows(x: Tensor, dim: int, step: int) -> Tensor:
    """Return the sums of windows at the rows from the first to the last window."""
    count, size = x.shape[dim : dim + 2]
    if count == 1:
        return x.squeeze(dim)
    flat = x.flatten(dim, dim + 1)
    if size == step or count == 0:
        return flat
    out = flat.new_zeros((*x.shape[:dim], (count - 1) * step + size, *x.shape[dim + 2 :]))
    first = torch.arange(count, device=x.device) * step
    at = first.unsqueeze(1) + torch.arange(size, device=x.device)
    return out.index_add_(dim, at.flatten(), flat)


# ---- over ranks ------------------------------------------------------------------------------


class _HaloTransfers(NamedTuple):
    """The transfers of a halo exchange on this rank.

    Attributes:
        given: by member of the group, in torch's order, the rows of this shard in its windows,
            relative to the first row of this shard.
        taken: by member, the rows of its shard in this rank's windows, relative to `first`.
        rows, windows: the ranges of this rank.
        first: the first row of its windows.
    """

    process_group: object
    given: list[list[RowRange]]
    taken: list[list[RowRange]]
    rows: tuple[int, int]
    windows: tuple[int, int]
    first: int


_transfers: dict[tuple, _HaloTransfers] = {}


def unfold_split(
    mesh: Mesh, x: Tensor, dim: int, axes: Axes, rows: int, count: int, size: int, step: int,
    offset: int, lowest: bool = False,
) -> Tensor:  # fmt: skip
    """Return this rank's part of `count` windows of a dimension of `rows`, both split by axes."""
    transfers = _transfers_of(mesh, axes, rows, count, size, step, offset)
    begin, end = transfers.windows
    length = max(end - begin - 1, 0) * step + (size if end > begin else 0)
    buffer = span(x, dim, transfers.first - transfers.rows[0], length, lowest)
    _move(transfers, x, transfers.given, buffer, transfers.taken, dim, add=False)
    return unfold(buffer, dim, end - begin, size, step, 0)


def fold_split(
    mesh: Mesh, x: Tensor, dim: int, axes: Axes, rows: int, count: int, size: int, step: int,
    offset: int,
) -> Tensor:  # fmt: skip
    """Return this rank's part of the sums of the windows of all ranks."""
    transfers = _transfers_of(mesh, axes, rows, count, size, step, offset)
    added = _add_windows(x, dim, step)
    first, last = transfers.rows
    out = span(added, dim, first - transfers.first, last - first).clone()
    _move(transfers, added, transfers.taken, out, transfers.given, dim, add=True)
    return out


def _move(
    transfers: _HaloTransfers, x: Tensor, sends: list[list[RowRange]], out: Tensor,
    receives: list[list[RowRange]], dim: int, add: bool,
) -> None:  # fmt: skip
    """Send runs of rows of x. Copy the received rows into `out`, or add them."""
    per_row = math.prod(x.shape[:dim]) * math.prod(x.shape[dim + 1 :])
    sizes = [[sum(b - a for a, b in runs) * per_row for runs in side] for side in (sends, receives)]
    flat = [x.narrow(dim, a, b - a).reshape(-1) for runs in sends for a, b in runs]
    got = buffers.exchange_parts(flat, sizes, x, transfers.process_group)
    at = 0
    for a, b in (run for runs in receives for run in runs):
        part = out.narrow(dim, a, b - a)
        new = got[at : at + part.numel()].view(part.shape)
        part.add_(new) if add else part.copy_(new)
        at += part.numel()


def _transfers_of(
    mesh: Mesh, axes: Axes, rows: int, count: int, size: int, step: int, offset: int
) -> _HaloTransfers:
    key = (id(mesh), axes, rows, count, size, step, offset)
    if key not in _transfers:
        mine, windows = mesh.bounds(rows, axes), mesh.bounds(count, axes)
        first = windows[0] * step + offset
        ours = _rows_of(windows, size, step, offset)
        given, taken = [], []
        for other in sorted(mesh.members(axes, mesh.rank)):
            theirs = _rows_of(mesh.bounds(count, axes, other), size, step, offset)
            away = other != mesh.rank
            given.append(_intersect(theirs, mine, mine[0]) if away else [])
            taken.append(_intersect(ours, mesh.bounds(rows, axes, other), first) if away else [])
        group = mesh.group(axes).process_group
        _transfers[key] = _HaloTransfers(group, given, taken, mine, windows, first)
    return _transfers[key]


def _rows_of(windows: RowRange, size: int, step: int, offset: int) -> list[RowRange]:
    """Return the rows of a range of windows, as runs in order, without repetition."""
    runs: list[RowRange] = []
    for p in range(*windows):
        start = p * step + offset
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], start + size
        else:
            runs.append((start, start + size))
    return runs


def _intersect(runs: list[RowRange], part: RowRange, first: int) -> list[RowRange]:
    """Return the intersection of runs with a range of rows, relative to row `first`."""
    cut = [(max(a, part[0]) - first, min(b, part[1]) - first) for a, b in runs]
    return [(a, b) for a, b in cut if a < b]
