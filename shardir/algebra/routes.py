"""All redistributions of evenly split tensors of one size at once: shortest paths over whole axes.

    <a = 2, b = 4>, two dimensions: a and b each split dimension 0 or 1, are partial, or do neither:
    18 layouts, for both may split a dimension in either order. Between them are the single moves,
    and all shortest paths are found together.

The forms of a move have a latency and a rate, which no shape changes as long as its shards are
even: they are found once for a mesh and a number of dimensions. Between these layouts the planner
(redistribution.py) takes these paths, and the search counts their seconds.
"""

from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import combinations, permutations
from math import inf, prod
from typing import Any

import numpy as np

from shardir.algebra.collectives import AxisState, CollectiveStep, move
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.forms import Forms
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.steps import step_forms

REPLICATED, SHARDED, PARTIAL, _ = AxisState

Table = np.ndarray[Any, np.dtype[np.float64]]

Solved = tuple[Table, np.ndarray[Any, np.dtype[np.int64]]]
"""The lengths of the shortest ways, and the first layout of each."""

MAX_LAYOUTS, MAX_ORDERED_LAYOUTS = 400, 64
"""Of more layouts no table is made; where all orders of a dimension's axes give more than the
second, axes stand in the mesh's order."""


PREFERENCE = 1e-9
"""The relative time that breaks ties: a path of one regular collective may exceed an exchange by
it, and a path of several collectives must be faster than one of fewer by some of it."""


@lru_cache(maxsize=256)
def routes(mesh: Mesh, rank: int, reduction: str = "sum") -> "Routes | None":
    """The ways between the layouts of tensors of `rank` dimensions; None where there are too many
    layouts."""
    axes = sum(mesh.extent((a,)) > 1 for a in mesh.names)
    if (rank + 2) ** axes > MAX_LAYOUTS or reduction == "any":
        return None
    return Routes(mesh, rank, reduction)


class Routes:
    """`layouts`, and where each stands in them; the single moves between them."""

    def __init__(self, mesh: Mesh, rank: int, reduction: str):
        self.mesh, self.rank, self.reduction = mesh, rank, reduction
        axes = tuple(a for a in mesh.names if mesh.extent((a,)) > 1)
        every = [
            Layout(mesh.name, dims).with_partial(partial, reduction)
            for n in range(len(axes) + 1)
            for partial in combinations(axes, n)
            for dims in _dims(tuple(a for a in axes if a not in partial), ((),) * rank)
        ]
        if len(every) > MAX_ORDERED_LAYOUTS:
            every = [l for l in every if all(d == tuple(a for a in axes if a in d) for d in l.dims)]
        self.layouts = every
        self.index = {l: i for i, l in enumerate(every)}
        code = codes(mesh)
        self._codes = {l: [code.setdefault(d, len(code)) for d in l.dims] for l in every}
        self._solved: dict[tuple[Shape, int], Solved] = {}

    def seconds(self, shape: Shape, itemsize: int) -> Table:
        """What each way takes for a tensor of this shape: [from, to]; infinite from or to layouts
        that do not split it evenly."""
        return self.ways(shape, itemsize)[0]

    def steps(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[CollectiveStep] | None:
        """The moves of the way from one layout to another; None where there is none."""
        if source not in self.index or target not in self.index:
            return None
        least, via = self.ways(shape, itemsize)
        i, j = self.index[source], self.index[target]
        if least[i, j] == inf:
            return None
        found = []
        while i != j:
            k = int(via[i, j])
            found.append(self.moves[i, k])
            i = k
        return found

    def ways(self, shape: Shape, itemsize: int) -> Solved:
        """Of all ways the seconds, and the first layout on each."""
        if (shape, itemsize) not in self._solved:
            even = tuple(i for i, l in enumerate(self.layouts) if l.even(self.mesh, shape))
            self._solved[shape, itemsize] = self._solve(even, prod(shape) * itemsize)
        return self._solved[shape, itemsize]

    def _solve(self, even: tuple[int, ...], size: int) -> Solved:
        """The shortest paths (Floyd and Warshall). Of equal ones that of fewer collectives is
        preferred, then that without an exchange, which libraries do as an irregular all-to-all."""
        n = len(self.layouts)
        seconds: Table = np.full((n, n), inf)
        via = np.tile(np.arange(n), (n, 1))
        among = np.ix_(even, even)
        seconds[among] = self.each(size)[among]
        np.fill_diagonal(seconds, 0.0)
        weight = seconds * np.where(self._irregular, 1 + PREFERENCE, 1.0)
        for k in even:
            several = (seconds[:, k, None] > 0) & (seconds[k] > 0)
            path = (weight[:, k, None] + weight[k]) * np.where(several, 1 + 3 * PREFERENCE, 1.0)
            better = path < weight * (1 - 1e-12)
            np.copyto(weight, path, where=better)
            np.copyto(seconds, seconds[:, k, None] + seconds[k], where=better)
            np.copyto(via, via[:, k, None], where=better)
        return seconds, via

    @cached_property
    def _irregular(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The moves that are exchanges: [from, to]."""
        n = len(self.layouts)
        found = np.zeros((n, n), dtype=np.bool_)
        for (i, j), step in self.moves.items():
            found[i, j] = step.kind == "exchange"
        return found

    def each(self, size: int) -> Table:
        """The seconds of each single move, in its quickest form, for so many bytes."""
        latency, rate = self.costs
        return (latency + rate * size).min(axis=0)

    @cached_property
    def costs(self) -> tuple[Table, Table]:
        """The latencies and rates of the forms of moves: [form, from, to]."""
        n, many = len(self.index), max((len(f) for _, f in self._moves.values()), default=1)
        latency, rate = np.full((many, n, n), inf), np.zeros((many, n, n))
        for (i, j), (_, forms) in self._moves.items():
            every = [*forms, *[forms[-1]] * (many - len(forms))]
            latency[:, i, j] = [f.latency for f in every]
            rate[:, i, j] = [f.rate for f in every]
        return latency, rate

    @cached_property
    def moves(self) -> dict[tuple[int, int], CollectiveStep]:
        """The move between two layouts, if one leads from the first to the second."""
        return {ends: step for ends, (step, _) in self._moves.items()}

    @cached_property
    def _moves(self) -> dict[tuple[int, int], tuple[CollectiveStep, Forms]]:
        """The moves with their forms: an exchange where no named one leads there."""
        found: dict[tuple[int, int], tuple[CollectiveStep, Forms]] = {}
        for i, layout in enumerate(self.layouts):
            for step in (*self._named(layout), *self._exchanges(layout)):
                j = self.index.get(step.layout)
                if j is not None and (i, j) not in found:
                    found[i, j] = step, self._forms(layout, step)
        return found

    def _named(self, now: Layout) -> Iterator[CollectiveStep]:
        mesh = self.mesh
        for a in mesh.names:
            if a in now.used or mesh.extent((a,)) == 1:
                continue
            for dim in range(self.rank):
                yield move(REPLICATED, SHARDED, mesh, now, (a,), dim)
            if self.reduction == "sum":
                yield move(REPLICATED, PARTIAL, mesh, now, (a,))
        for n in range(1, len(now.partial) + 1):
            for axes in combinations(now.partial, n):
                yield move(PARTIAL, REPLICATED, mesh, now, axes)
                for dim in range(self.rank):
                    for order in permutations(axes):
                        yield move(PARTIAL, SHARDED, mesh, now, order, dim)
        for dim, have in enumerate(now.dims):
            for n in range(1, len(have) + 1):
                axes = have[-n:]
                yield move(SHARDED, REPLICATED, mesh, now, axes, dim)
                if self.reduction == "sum":
                    yield move(SHARDED, PARTIAL, mesh, now, axes, dim)
                for other in range(self.rank):
                    if other != dim:
                        yield move(SHARDED, SHARDED, mesh, now, axes, other, dim)

    def _exchanges(self, now: Layout) -> Iterator[CollectiveStep]:
        for layout in self.layouts:
            if layout.partial == now.partial and (axes := exchange_axes(now, layout)):
                yield CollectiveStep("exchange", axes, layout)

    def _forms(self, before: Layout, step: CollectiveStep) -> Forms:
        """The forms of a move. They are the same for all tensors and dimensions but the first, in
        which shards lie as they are packed: one tensor stands for all of as many split dimensions,
        the first in its place, the others in an order of their own, with so many rows that nothing
        is rounded."""
        ends = self._codes[before], self._codes[step.layout]
        split = [(d > 0, *both, d) for d, both in enumerate(zip(*ends, strict=True)) if any(both)]
        split.sort()
        dims = [d for *_, d in split]
        known = forms_known(self.mesh)
        key = (
            step.kind,
            step.axes,
            tuple([both[:-1] for both in split]),
            step.dim >= 0 and dims.index(step.dim),
        )
        if key not in known:
            size = self.mesh.size
            if self.rank and dims[:1] != [0]:
                dims = [0, *dims]
            shape = (*[2 * size] * len(dims), size**2)
            source, target = (
                Layout(l.mesh, (*(l.dims[d] for d in dims), ())).with_partial(
                    l.partial, l.reduction
                )
                for l in (before, step.layout)
            )
            dim, concat = (dims.index(d) if d >= 0 else -1 for d in (step.dim, step.concat))
            moved = CollectiveStep(step.kind, step.axes, target, dim, concat)
            known[key] = step_forms(self.mesh, shape, source, moved)
        return known[key]


@lru_cache(maxsize=16)
def codes(mesh: Mesh) -> dict[Axes, int]:
    """A number for what splits a dimension, 0 for nothing: it stands in keys for speed."""
    return {(): 0}


@lru_cache(maxsize=16)
def forms_known(mesh: Mesh) -> dict[tuple, Forms]:
    """The forms of a mesh's moves, by what they depend on."""
    return {}


def _dims(axes: Axes, dims: tuple[Axes, ...]) -> Iterator[tuple[Axes, ...]]:
    """All ways to split dimensions over some of the axes, besides what splits them."""
    if not axes:
        yield dims
        return
    yield from _dims(axes[1:], dims)
    for d, have in enumerate(dims):
        for i in range(len(have) + 1):
            split = (*have[:i], axes[0], *have[i:])
            yield from _dims(axes[1:], (*dims[:d], split, *dims[d + 1 :]))
