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

from shardir.algebra.exchange_costs import Table, exchange_costs
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.traffic import Indices

MAX_BETWEEN = 50_000
"""The maximum number of layouts between the two exchanges: of six sub-axes and three dimensions
there are 42,079."""


def detour(
    mesh: Mesh, shape: Shape, axes: Axes, source: Layout, target: Layout, itemsize: int
) -> tuple[float, Layout] | None:
    """Return the estimated time of the fastest two exchanges, and the layout between them; None
    where no two have a closed form, or where there are too many.

    Args:
        axes: disjoint sub-axes that spell the layouts.
        source, target: of even shards, partial over the same axes.
    """
    axes = tuple([a for a in axes if a not in source.partial])
    rank = len(shape)
    if _count(rank, len(axes)) > MAX_BETWEEN:
        return None
    splits, between = _layouts(axes, rank)
    divides = np.array([[n % mesh.extent(s) == 0 for s in splits] for n in shape])
    between = between[divides[np.arange(rank), between].all(axis=1)]
    size, ends = prod(shape) * itemsize, np.tile(np.arange(rank), (len(between), 1))
    first = _seconds(exchange_costs(mesh, source.dims, splits, ends, between), size)
    second = _seconds(exchange_costs(mesh, splits, target.dims, between, ends), size)
    k = int((first + second).argmin())
    if (seconds := float(first[k] + second[k])) == inf:
        return None
    dims = tuple([splits[i] for i in between[k].tolist()])
    return seconds, Layout(mesh.name, dims).with_partial(source.partial, source.reduction)


def _seconds(costs: tuple[Table, Table], size: int) -> Table:
    latency, rate = costs
    return np.where(np.isnan(rate), inf, latency + rate * size)


def _count(rank: int, axes: int) -> int:
    """Return the number of splits of some dimensions over some axes in all orders."""
    return sum(comb(axes, n) * prod(range(rank, rank + n)) for n in range(axes + 1))


@lru_cache(maxsize=64)
def _layouts(axes: Axes, rank: int) -> tuple[list[Axes], Indices]:
    """Return the splits of a dimension over some axes in all orders, and for each split of all
    dimensions their numbers: [layout, dimension]."""
    splits: list[Axes] = [()]
    for split in splits:
        splits += [(*split, a) for a in axes if a not in split]
    masks = np.array([sum(1 << axes.index(a) for a in split) for split in splits])
    found, used = np.arange(len(splits))[:, None], masks
    for _ in range(rank - 1):
        at, split = np.nonzero((used[:, None] & masks) == 0)
        found = np.concatenate([found[at], split[:, None]], axis=1)
        used = used[at] | masks[split]
    return splits, found
