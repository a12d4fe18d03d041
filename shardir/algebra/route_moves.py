"""The layouts over some sub-axes, and the moves by named collectives from one to others."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations, product
from math import comb, prod

import numpy as np

from shardir.algebra.arrays import Indices
from shardir.algebra.collectives import AxisState
from shardir.algebra.mesh import Axes, Axis
from shardir.algebra.named_costs import NamedMove, first_dims

REPLICATED, SHARDED, PARTIAL, _ = AxisState

SplitState = tuple[tuple[Axes, ...], Axes]
"""The axes that split each dimension, and the partial ones."""


def states(axes: Axes, rank: int) -> Iterator[SplitState]:
    """Yield all layouts of a tensor of `rank` dimensions, with axes in all orders."""
    for n in range(len(axes) + 1):
        for partial in combinations(axes, n):
            rest = tuple([a for a in axes if a not in partial])
            yield from ((dims, partial) for dims in _dims(rest, ((),) * rank))


def _dims(axes: Axes, dims: tuple[Axes, ...]) -> Iterator[tuple[Axes, ...]]:
    """Yield the dimensions split over some of the axes too, in all orders."""
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
    """The moves between layouts over `axes`, of a `reduction`; `in_order`: those of a dimension are
    in the order of `axes`."""

    axes: Axes
    reduction: str
    in_order: bool

    def of(self, now: SplitState) -> Iterator[tuple[SplitState, NamedMove]]:
        """Yield the moves from a layout, each with the layout after it."""
        yield from self._local(now)
        yield from self._reductions(now)
        dims, partial = now
        for dim, have in enumerate(dims):
            for n in range(1, len(have) + 1):
                axes, gathered = have[-n:], (*dims[:dim], have[:-n], *dims[dim + 1 :])
                yield (gathered, partial), NamedMove(SHARDED, REPLICATED, axes, dim)
                if self.reduction == "sum":
                    among = self._ordered(partial + axes)
                    yield (gathered, among), NamedMove(SHARDED, PARTIAL, axes, dim)
                for other in range(len(dims)):
                    if other != dim:
                        named = NamedMove(SHARDED, SHARDED, axes, other, dim)
                        yield (_added(gathered, other, axes), partial), named

    def _local(self, now: SplitState) -> Iterator[tuple[SplitState, NamedMove]]:
        """Yield slices, and complete values made partial."""
        dims, partial = now
        used = {*partial, *(a for axes in dims for a in axes)}
        unused = [a for a in self.axes if a not in used]
        for a in unused:
            for dim in range(len(dims)):
                named = NamedMove(REPLICATED, SHARDED, (a,), dim)
                yield (_added(dims, dim, (a,)), partial), named
            among = self._ordered((*partial, a))
            yield (dims, among), NamedMove(REPLICATED, PARTIAL, (a,))
        for n, dim in product(range(2, len(unused) + 1), range(len(dims))):
            if not dims[dim]:  # perhaps into uneven shards that are not within those over fewer
                for axes in self._orders(combinations(unused, n)):
                    named = NamedMove(REPLICATED, SHARDED, axes, dim)
                    yield (_added(dims, dim, axes), partial), named

    def _reductions(self, now: SplitState) -> Iterator[tuple[SplitState, NamedMove]]:
        dims, partial = now
        for n in range(1, len(partial) + 1):
            for axes in combinations(partial, n):
                rest = tuple([a for a in partial if a not in axes])
                yield (dims, rest), NamedMove(PARTIAL, REPLICATED, axes)
                for dim in range(len(dims)):
                    for order in self._orders([axes]):
                        named = NamedMove(PARTIAL, SHARDED, order, dim)
                        yield (_added(dims, dim, order), rest), named

    def _orders(self, some: Iterable[Axes]) -> Iterator[Axes]:
        """Yield some axes in the orders in which they split a dimension."""
        for axes in some:
            yield from (axes,) if self.in_order else permutations(axes)

    def _ordered(self, axes: Axes) -> Axes:
        return tuple([a for a in self.axes if a in axes])


def _added(dims: tuple[Axes, ...], dim: int, axes: Axes) -> tuple[Axes, ...]:
    """Return the split of the dimensions, one split over these axes too."""
    return (*dims[:dim], dims[dim] + axes, *dims[dim + 1 :])


def _numbers(count: int) -> Axes:
    """Return so many axes whose names are numbers."""
    return tuple([Axis(str(i)) for i in range(count)])


@lru_cache(maxsize=64)
def numbered_states(count: int, rank: int, in_order: bool) -> list[SplitState]:
    """Return the layouts over `count` axes whose names are numbers."""
    axes = _numbers(count)
    return [
        s for s in states(axes, rank)
        if not in_order or all(d == tuple(a for a in axes if a in d) for d in s[0])
    ]  # fmt: skip


class NumberedMoves:
    """The moves between the `numbered_states` by named collectives: equal for all axes.

    Attributes:
        ends: the numbers of the layouts before and after each move: [move, end].
        equal: the numbers of the moves that are equal but for their layouts.
        dims: `dim` and `concat` of each move: [move, 2].
        kinds: the number of each move among the `distinct` ones, which are of the first dimensions.
    """

    def __init__(self, count: int, rank: int, reduction: str, in_order: bool):
        axes, every = _numbers(count), numbered_states(count, rank, in_order)
        at, moves = {s: i for i, s in enumerate(every)}, NamedMoves(axes, reduction, in_order)
        self.index: dict[tuple[int, int], int] = {}
        self.moves: list[NamedMove] = []
        for i, state in enumerate(every):
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


def spelled(numbers: Axes, axes: Axes) -> Axes:
    """Return the axes of some numbers."""
    return tuple([axes[int(a.name)] for a in numbers])


@lru_cache(maxsize=64)
def count_of(axes: int, rank: int) -> int:
    """Return the number of layouts over some axes in all orders."""
    return sum(
        comb(axes, n) * 2 ** (axes - n) * prod(range(rank, rank + n)) for n in range(axes + 1)
    )
