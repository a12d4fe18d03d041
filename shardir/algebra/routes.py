"""Shortest paths between all layouts over full axes, for evenly sharded tensors of one size.

    <a = 2, b = 4>, two dimensions: a and b each split dimension 0 or 1, are partial, or do neither:
    18 layouts, for both may split a dimension in either order. The edges are the single moves.

An axis whose size is composite and no power of two is cut into sub-axes of a power of two and of
primes: collectives over 2 and 3 devices, one after the other, wait for fewer messages than one over
6, a ring.

The forms of a move have a latency and a rate, which are equal for all shapes with even shards: they
are found once for a mesh and a number of dimensions. Between these layouts the planner
(redistribution.py) takes these paths, and the search counts their seconds.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, combinations, permutations
from math import inf, prod
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from shardir.algebra.collectives import AxisState, CollectiveStep, move
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.forms import Forms
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.steps import step_forms

REPLICATED, SHARDED, PARTIAL, _ = AxisState

Table = np.ndarray[Any, np.dtype[np.float64]]

Solved = tuple[Table, np.ndarray[Any, np.dtype[np.int64]]]
"""The lengths of the shortest paths, and the first layout of each: [from, to]."""

MAX_LAYOUTS, MAX_ORDERED_LAYOUTS = 400, 100
"""The maximum number of layouts in a table; and that with axes in all orders: where there would be
more, the axes of a dimension are in the mesh's order."""

PREFERENCE = 1e-9
"""The relative time that breaks ties: a path of one regular collective may exceed an exchange by
it, and a path of several collectives must be faster than one of fewer by some of it."""

MAX_ROUNDING = 1e-12
"""The largest relative rounding error of a path's time. Less than PREFERENCE, so that of paths of
equal time the preferred one is taken."""


@lru_cache(maxsize=256)
def routes(mesh: Mesh, rank: int, reduction: str = "sum") -> "Routes | None":
    """Return the paths between the layouts of tensors of `rank` dimensions; None where there are
    too many layouts."""
    full = tuple(a for a in mesh.names if mesh.extent((a,)) > 1)
    for axes in (_cut(mesh, full), full):
        if (rank + 2) ** len(axes) <= MAX_LAYOUTS and reduction != "any":
            return Routes(mesh, rank, reduction, axes)
    return None


def _cut(mesh: Mesh, axes: Axes) -> Axes:
    """Return the axes, those of a composite size cut into a power of two and odd primes."""
    found: list[Axis] = []
    for axis in axes:
        n = mesh.extent((axis,))
        sizes, odd, k = [n & -n] if n % 2 == 0 else [], n // (n & -n), 3
        while odd > 1:
            while odd % k:
                k += 2
            sizes, odd = [*sizes, k], odd // k
        ends = [1, *accumulate(sizes, mul)]
        cuts = (Axis(axis.name, pre, size) for pre, size in zip(ends, sizes, strict=False))
        found += cuts if len(sizes) > 1 else [axis]
    return tuple(found)


class Routes:
    """The `layouts`, spelled by their `axes`, the indices of their normal forms, and the single
    moves between them."""

    def __init__(self, mesh: Mesh, rank: int, reduction: str, axes: Axes):
        self.mesh, self.rank, self.reduction, self.axes = mesh, rank, reduction, axes
        self._is_cut = any(a.size for a in axes)
        every = [
            Layout(mesh.name, dims).with_partial(partial, reduction)
            for n in range(len(axes) + 1)
            for partial in combinations(axes, n)
            for dims in _dims(tuple(a for a in axes if a not in partial), ((),) * rank)
        ]
        if len(every) > MAX_ORDERED_LAYOUTS:
            every = [l for l in every if all(d == tuple(a for a in axes if a in d) for d in l.dims)]
        self.layouts = every
        self.index = {self._normal(l): i for i, l in enumerate(every)}
        self._known = known_forms(mesh)
        codes = self._known.codes
        self._codes = {l: [codes.setdefault(d, len(codes)) for d in l.dims] for l in every}
        self._solved: dict[tuple[Shape, int], Solved] = {}

    def _normal(self, layout: Layout) -> Layout:
        return layout.simplified(self.mesh) if self._is_cut else layout

    def seconds(self, shape: Shape, itemsize: int) -> Table:
        """Return the estimated time of each path for a tensor of this shape: [from, to]; infinite
        from or to layouts that do not split it evenly."""
        return self.paths(shape, itemsize)[0]

    def steps(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> list[CollectiveStep] | None:
        """Return the moves of the path from one layout to another; None where there is none."""
        if source not in self.index or target not in self.index:
            return None
        seconds, via = self.paths(shape, itemsize)
        i, j = self.index[source], self.index[target]
        if seconds[i, j] == inf:
            return None
        found = []
        while i != j:
            k = int(via[i, j])
            found.append(self.moves[i, k])
            i = k
        return found

    def paths(self, shape: Shape, itemsize: int) -> Solved:
        """Return the estimated time of all paths, and the first layout of each."""
        if (shape, itemsize) not in self._solved:
            even = tuple(i for i, l in enumerate(self.layouts) if l.even(self.mesh, shape))
            self._solved[shape, itemsize] = self._solve(even, prod(shape) * itemsize)
        return self._solved[shape, itemsize]

    def _solve(self, even: tuple[int, ...], size: int) -> Solved:
        """Find the shortest paths (Floyd and Warshall). Of equal ones that of fewer collectives is
        preferred, then that without an exchange, which is an irregular all-to-all in libraries."""
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
            better = path < weight * (1 - MAX_ROUNDING)
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
        """Return the seconds of each single move of `size` bytes in its fastest form."""
        latency, rate = self.costs
        return (latency + rate * size).min(axis=0)

    @cached_property
    def costs(self) -> tuple[Table, Table]:
        """The latencies and rates of the forms of moves: [form, from, to]."""
        n, count = len(self.index), max((len(f) for _, f in self._moves.values()), default=1)
        latency, rate = np.full((count, n, n), inf), np.zeros((count, n, n))
        for (i, j), (_, forms) in self._moves.items():
            padded = [*forms, *[forms[-1]] * (count - len(forms))]
            latency[:, i, j] = [f.latency for f in padded]
            rate[:, i, j] = [f.rate for f in padded]
        return latency, rate

    @cached_property
    def moves(self) -> dict[tuple[int, int], CollectiveStep]:
        """The move from one layout to another, where there is one: by both indices."""
        return {ends: step for ends, (step, _) in self._moves.items()}

    @cached_property
    def _moves(self) -> dict[tuple[int, int], tuple[CollectiveStep, Forms]]:
        """The moves with their forms: an exchange where no named collective does it."""
        found: dict[tuple[int, int], tuple[CollectiveStep, Forms]] = {}
        for i, layout in enumerate(self.layouts):
            for step in (*self._named(layout), *self._exchanges(layout)):
                end = self._normal(step.layout)
                j = self.index.get(end)
                if j is not None and (i, j) not in found:
                    forms = self._forms(layout, replace(step, layout=self.layouts[j]))
                    axes = self.mesh.simplify(step.axes) if self._is_cut else step.axes
                    found[i, j] = replace(step, axes=axes, layout=end), forms
        return found

    def _named(self, now: Layout) -> Iterator[CollectiveStep]:
        mesh = self.mesh
        for a in self.axes:
            if a in now.used:
                continue
            for dim in range(self.rank):
                yield move(REPLICATED, SHARDED, mesh, now, (a,), dim)
            yield move(REPLICATED, PARTIAL, mesh, now, (a,), reduction=self.reduction)
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
        """Return the forms of a move. They are equal for all tensors and dimensions but the first,
        along which shards are contiguous: one tensor stands for all that have as many split
        dimensions, the first one first, the others in a fixed order, so large that no shard is
        rounded."""
        ends = self._codes[before], self._codes[step.layout]
        split = [(d > 0, *both, d) for d, both in enumerate(zip(*ends, strict=True)) if any(both)]
        split.sort()
        dims = [d for *_, d in split]
        known = self._known.forms
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


class KnownForms(NamedTuple):
    """The forms of a mesh's moves by the key of `Routes._forms`, in which a number stands for the
    axes of a dimension, since it is hashed faster. A key is of use with its numbers only, so that
    whoever has one has both."""

    codes: dict[Axes, int]
    forms: dict[tuple, Forms]


@lru_cache(maxsize=16)
def known_forms(mesh: Mesh) -> KnownForms:
    """Return the forms of a mesh's moves that are known so far; no axes have the number 0."""
    return KnownForms({(): 0}, {})


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
