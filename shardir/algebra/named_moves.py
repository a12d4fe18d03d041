"""Moves by named collectives between layouts over some sub-axes, and their latencies and rates.

    [{b}, {}] -> [{}, {b}]             priced once
    [{a, b}, {c}] -> [{a}, {c, b}]     equal latency; the rate times the share of a device over a
                                       and c: 1 / (a c), or more where shards are uneven

The moves between numbered axes are equal for all meshes. The bytes of a named collective, and the
bytes that it packs, are proportional to the shards. A device packs unless it moves blocks of the
first dimension, along which shards are contiguous.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations, product
from math import comb, prod
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Indices, Table
from shardir.algebra.collectives import AxisState, Collective, CollectiveStep, between
from shardir.algebra.collectives import move as step_of
from shardir.algebra.forms import NO_COMMUNICATION, Forms
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.steps import step_forms


class NamedMove(NamedTuple):
    """The change of the state of axes; `dim` and `concat` as in `CollectiveStep`."""

    start: AxisState
    end: AxisState
    axes: Axes
    dim: int = -1
    concat: int = -1

    @property
    def record(self) -> Collective:
        return between(self.start, self.end)


def named_costs(mesh: Mesh, moves: Sequence[tuple[NamedMove, Shape]]) -> tuple[Table, Table]:
    """Return the latencies of moves, and their seconds for each byte of a tensor that no other axes
    split: two arrays [form, move].

    Args:
        moves: of the `first_dims`, each with the sizes of its `dim` and `concat`; 0 for a dimension
            that is split evenly.
    """
    forms = [named_forms(mesh, *move) for move in moves]
    count = max(map(len, forms), default=1)
    table = np.array([
        [(form.latency, form.rate) for form in (*own, *[own[-1]] * (count - len(own)))]
        for own in forms
    ])  # fmt: skip
    latency, rate = table.reshape(-1, count, 2).T
    return latency, rate


def first_dims(move: NamedMove) -> NamedMove:
    """Return a move of equal cost between the first dimensions: the second and all later ones have
    equal costs."""
    dim, concat = min(move.dim, 1), min(move.concat, 1)
    return move._replace(dim=dim, concat=2 if dim == concat == 1 else concat)


@lru_cache(maxsize=16384)
def named_forms(mesh: Mesh, move: NamedMove, sizes: Shape = ()) -> Forms:
    """Return the forms of a move of a tensor that no other axes split.

    Args:
        sizes: of the dimensions `dim` and `concat`; 0 or missing for one that is split evenly.
    """
    if not move.record.communicates:
        return NO_COMMUNICATION
    return step_forms(mesh, *_example(mesh, move, sizes))


def _example(mesh: Mesh, move: NamedMove, sizes: Shape) -> tuple[Shape, Layout, CollectiveStep]:
    """Return the shape, layout and step of a tensor that `named_forms` prices."""
    start, end, axes, dim, concat = move
    before = Layout(mesh.name, ((),) * 4)
    if start is AxisState.SHARDED:
        before = before.with_dim(concat if end is AxisState.SHARDED else dim, axes)
    elif start is AxisState.PARTIAL:
        before = before.with_partial(axes)
    shape = [*[2 * mesh.size] * 3, mesh.size**2]
    for d, size in zip((dim, concat), sizes, strict=False):
        shape[d] = size or shape[d]
    return tuple(shape), before, step_of(start, end, mesh, before, axes, dim, concat)


REPLICATED, SHARDED, PARTIAL, _ = AxisState

SplitState = tuple[tuple[Axes, ...], Axes]
"""A layout: the axes that split each dimension, and the partial axes."""


def states(axes: Axes, rank: int) -> Iterator[SplitState]:
    """Yield all layouts of a tensor of `rank` dimensions over some of the axes, in all orders."""
    for n in range(len(axes) + 1):
        for partial in combinations(axes, n):
            rest = tuple([a for a in axes if a not in partial])
            yield from ((dims, partial) for dims in _dims(rest, ((),) * rank))


def _dims(axes: Axes, dims: tuple[Axes, ...]) -> Iterator[tuple[Axes, ...]]:
    """Yield the dimensions, split further over some of the axes, in all orders."""
    if not axes:
        yield dims
        return
    yield from _dims(axes[1:], dims)
    for d, have in enumerate(dims):
        for i in range(len(have) + 1):
            split = (*have[:i], axes[0], *have[i:])
            yield from _dims(axes[1:], (*dims[:d], split, *dims[d + 1 :]))


@dataclass(frozen=True)
class NamedMoves:
    """The moves between layouts over `axes` with a `reduction`. With `in_order` the axes of a
    dimension keep the order of `axes`."""

    axes: Axes
    reduction: str
    in_order: bool

    def of(self, now: SplitState) -> Iterator[tuple[SplitState, NamedMove]]:
        """Yield each move from a layout, with the layout after it."""
        yield from self._local(now)
        yield from self._reductions(now)
        dims, partial = now
        for dim, have in enumerate(dims):
            for n in range(1, len(have) + 1):
                axes, gathered = have[-n:], (*dims[:dim], have[:-n], *dims[dim + 1 :])
                yield (gathered, partial), NamedMove(SHARDED, REPLICATED, axes, dim)
                if self.reduction == "sum":
                    more = self._sort(partial + axes)
                    yield (gathered, more), NamedMove(SHARDED, PARTIAL, axes, dim)
                for other in range(len(dims)):
                    if other != dim:
                        named = NamedMove(SHARDED, SHARDED, axes, other, dim)
                        yield (_split_further(gathered, other, axes), partial), named

    def _local(self, now: SplitState) -> Iterator[tuple[SplitState, NamedMove]]:
        """Yield all_slice and replicated_to_partial."""
        dims, partial = now
        used = {*partial, *(a for axes in dims for a in axes)}
        unused = [a for a in self.axes if a not in used]
        for a in unused:
            for dim in range(len(dims)):
                named = NamedMove(REPLICATED, SHARDED, (a,), dim)
                yield (_split_further(dims, dim, (a,)), partial), named
            more = self._sort((*partial, a))
            yield (dims, more), NamedMove(REPLICATED, PARTIAL, (a,))
        for n, dim in product(range(2, len(unused) + 1), range(len(dims))):
            if not dims[dim]:  # uneven shards over several axes do not nest in those over fewer
                for axes in self._orders(combinations(unused, n)):
                    named = NamedMove(REPLICATED, SHARDED, axes, dim)
                    yield (_split_further(dims, dim, axes), partial), named

    def _reductions(self, now: SplitState) -> Iterator[tuple[SplitState, NamedMove]]:
        """Yield all-reduces and reduce-scatters."""
        dims, partial = now
        for n in range(1, len(partial) + 1):
            for axes in combinations(partial, n):
                rest = tuple([a for a in partial if a not in axes])
                yield (dims, rest), NamedMove(PARTIAL, REPLICATED, axes)
                for dim in range(len(dims)):
                    for order in self._orders([axes]):
                        named = NamedMove(PARTIAL, SHARDED, order, dim)
                        yield (_split_further(dims, dim, order), rest), named

    def _orders(self, choices: Iterable[Axes]) -> Iterator[Axes]:
        """Yield each choice of axes in the orders in which it may split a dimension."""
        for axes in choices:
            yield from (axes,) if self.in_order else permutations(axes)

    def _sort(self, axes: Axes) -> Axes:
        """Return the axes in the order of `self.axes`."""
        return tuple([a for a in self.axes if a in axes])


def _split_further(dims: tuple[Axes, ...], dim: int, axes: Axes) -> tuple[Axes, ...]:
    """Return the splits of the dimensions with `axes` added to one of them."""
    return (*dims[:dim], dims[dim] + axes, *dims[dim + 1 :])


def _numbered_axes(count: int) -> Axes:
    """Return `count` axes whose names are their numbers."""
    return tuple([Axis(str(i)) for i in range(count)])


@lru_cache(maxsize=64)
def numbered_states(count: int, rank: int, in_order: bool) -> list[SplitState]:
    """Return the layouts over `count` numbered axes."""
    axes = _numbered_axes(count)
    return [
        s for s in states(axes, rank)
        if not in_order or all(d == tuple(a for a in axes if a in d) for d in s[0])
    ]  # fmt: skip


class NumberedMoves:
    """The moves between the `numbered_states` by named collectives.

    Attributes:
        index: the number of the move between two layouts.
        moves: by number.
        ends: the layouts before and after each move: [move, 2].
        equal: groups of moves that are equal but for their layouts, by number.
        dims: `dim` and `concat` of each move: [move, 2].
        distinct: the distinct `first_dims` of moves.
        kinds: the index of each move's `first_dims` in `distinct`: [move].
    """

    def __init__(self, count: int, rank: int, reduction: str, in_order: bool):
        axes, layouts = _numbered_axes(count), numbered_states(count, rank, in_order)
        at, moves = {s: i for i, s in enumerate(layouts)}, NamedMoves(axes, reduction, in_order)
        self.index: dict[tuple[int, int], int] = {}
        self.moves: list[NamedMove] = []
        for i, state in enumerate(layouts):
            for after, named in moves.of(state):
                if (j := at.get(after)) is not None and (i, j) not in self.index:
                    self.index[i, j] = len(self.moves)
                    self.moves.append(named)
        self.ends: Indices = np.array([*self.index], dtype=np.int64).reshape(-1, 2)
        equal: dict[NamedMove, list[int]] = {}
        for k, named in enumerate(self.moves):
            equal.setdefault(named, []).append(k)
        self.equal = [*equal.values()]
        self.dims: Indices = np.array([m[3:] for m in self.moves], dtype=np.int64).reshape(-1, 2)
        numbers: dict[NamedMove, int] = {}
        kinds = [numbers.setdefault(first_dims(m), len(numbers)) for m in self.moves]
        self.kinds: Indices = np.array(kinds, dtype=np.int64)
        self.distinct = [*numbers]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(count: int, rank: int, reduction: str, in_order: bool) -> "NumberedMoves":
        return NumberedMoves(count, rank, reduction, in_order)


def select_axes(numbers: Axes, axes: Axes) -> Axes:
    """Return the axes that numbered axes stand for."""
    return tuple([axes[int(a.name)] for a in numbers])


@lru_cache(maxsize=64)
def count_of(axes: int, rank: int) -> int:
    """Return the number of layouts of `rank` dimensions over a number of axes, in all orders."""
    return sum(
        comb(axes, n) * 2 ** (axes - n) * prod(range(rank, rank + n)) for n in range(axes + 1)
    )
