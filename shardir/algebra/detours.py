"""Exchanges by way of a third layout.

    [{b:(8)2, a:(2)2}, {a:(1)2}, {b:(1)8}] -> [{a}, {b}, {}]                22 ms on four levels
    the same -> [{a}, {}, {b}] -> [{a}, {b}, {}]                            12 ms + 7 ms

An exchange moves all its bytes at once, so most of them cross the outermost links. One that
moves less over these, and another within the units, may be faster; the layout between them splits
dimensions as neither end does. All layouts between are priced at once (exchange_costs.py).
"""

from functools import lru_cache
from math import comb, inf, prod

import numpy as np

from shardir.algebra.exchange_costs import ManyExchanges, Table
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.split_arrays import SplitArrays
from shardir.algebra.traffic import Indices

MAX_BETWEEN = 50_000
"""The maximum number of layouts between the two exchanges: of six sub-axes and three dimensions
there are 42,079."""


class Detours:
    """Two exchanges in place of steps between layouts of one tensor.

    Args:
        axes: disjoint sub-axes that spell the layouts.
    """

    def __init__(self, mesh: Mesh, shape: Shape, axes: Axes, itemsize: int):
        self.mesh, self.shape, self.axes = mesh, shape, axes
        self.size = prod(shape) * itemsize
        self._between: dict[Axes, tuple[SplitArrays, Indices] | None] = {}
        self._first: dict[Layout, tuple[ManyExchanges, Table]] = {}

    def faster(self, source: Layout, target: Layout, limit: float) -> tuple[float, Layout] | None:
        """Return the estimated time of the fastest two exchanges, and the layout between them; None
        where no two of closed form take less than `limit` seconds, or there are too many.

        Args:
            source, target: of even shards, partial over the same axes.
        """
        axes = tuple([a for a in self.axes if a not in source.partial])
        if axes not in self._between:
            self._between[axes] = self._even_layouts(axes)
        if (known := self._between[axes]) is None:
            return None
        (splits, between), end = known, np.arange(len(self.shape))
        if source not in self._first:
            exchanges = ManyExchanges(self.mesh, SplitArrays(self.mesh, source.dims), splits)
            self._first[source] = exchanges, self._seconds(exchanges.lowest(end[None], between))
        first, lowest = self._first[source]
        second = ManyExchanges(self.mesh, splits, SplitArrays(self.mesh, target.dims))
        if not second.closed:
            return None
        some = np.flatnonzero(lowest < limit)
        lowest = lowest[some] + self._seconds(second.lowest(between[some], end[None]))
        some = some[lowest < limit]
        seconds = self._seconds(first.costs(end[None], between[some]))
        seconds += self._seconds(second.costs(between[some], end[None]))
        if not len(some) or (found := float(seconds.min())) >= limit:
            return None
        dims = tuple([splits.splits[i] for i in between[some[seconds.argmin()]].tolist()])
        return found, Layout(self.mesh.name, dims).with_partial(source.partial, source.reduction)

    def _even_layouts(self, axes: Axes) -> tuple[SplitArrays, Indices] | None:
        """Return the layouts over these axes that split the tensor evenly, as `_layouts` does; None
        where there are too many."""
        rank = len(self.shape)
        if _count(rank, len(axes)) > MAX_BETWEEN:
            return None
        splits, between = _layouts(self.mesh, axes, rank)
        divides = np.array(self.shape)[:, None] % splits.extents == 0
        return splits, between[divides[np.arange(rank), between].all(axis=1)]

    def _seconds(self, costs: tuple[Table, Table]) -> Table:
        latency, rate = costs
        return np.where(np.isnan(rate), inf, latency + rate * self.size)


def _count(rank: int, axes: int) -> int:
    """Return the number of splits of some dimensions over some axes in all orders."""
    return sum(comb(axes, n) * prod(range(rank, rank + n)) for n in range(axes + 1))


@lru_cache(maxsize=64)
def _layouts(mesh: Mesh, axes: Axes, rank: int) -> tuple[SplitArrays, Indices]:
    """Return the splits of a dimension over some axes in all orders, and for each split of all
    dimensions their numbers: [layout, dimension]."""
    splits: list[Axes] = [()]
    for split in splits:
        splits += [(*split, a) for a in axes if a not in split]
    bits = {a: 1 << i for i, a in enumerate(axes)}
    masks = np.array([sum(bits[a] for a in split) for split in splits])
    free = [np.flatnonzero(masks & used == 0) for used in range(1 << len(axes))]
    found, used = np.arange(len(splits))[:, None], masks
    for _ in range(rank - 1):
        split = np.concatenate([free[k] for k in used.tolist()])
        at = np.repeat(np.arange(len(used)), [len(free[k]) for k in used.tolist()])
        found = np.concatenate([found[at], split[:, None]], axis=1)
        used = used[at] | masks[split]
    return SplitArrays(mesh, splits), found
