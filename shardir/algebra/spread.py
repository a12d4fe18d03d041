"""How the split of one value's dimensions spreads to those of others, and what wins.

    matmul (i, k), (k, j) -> (i, j)      x knows i over dp, w knows j over tp: so y is [{dp}, {tp}]

Along an op each value proposes the axes of its dimensions for their factors. Proposals compete
where they differ for one factor, or give one axis to two. Then the ways to grant as many as fit
are compared:

1. What activations propose is granted before what parameters do.
2. The least time for the bytes that redistributions at the op's edges move, then for their
   collectives, as `algebra.factors.place` counts them.
3. Ties go to what splits more, then to the factor that appears first, then to the axes that stand
   first in the mesh.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeVar

from shardir.algebra.factors import MAX_CHOICES, FactorAxes, Factors, placed
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, sizes_of
from shardir.algebra.redistribution import seconds
from shardir.algebra.sharding import Sharding

Split = tuple[Axes, ...]
"""Per dimension the axes that are known to split it."""

K = TypeVar("K", bound=str | int)


class Limits(NamedTuple):
    """What may be done with a value's dimensions now."""

    open: frozenset[int]
    """Those that may be split, or split further."""
    silent: frozenset[int] = frozenset()
    """Those that propose nothing."""
    barred: Axes = ()
    """Axes that may split none: the value is partial over them, or to stay replicated."""


class Seen(NamedTuple):
    """What an op sees of one of its values."""

    shape: Shape
    dims: Split
    limits: Limits
    parameter: bool = False


class Option(NamedTuple):
    """One way to grant what was proposed, by factor or by dimension, and the seconds that it takes:
    for bytes, and for collectives."""

    granted: tuple[tuple[str | int, Axes], ...]
    moved: float
    started: float


class Spread(NamedTuple):
    """What one op does to its values."""

    dims: tuple[Split, ...]
    """Per value: the same object where nothing is new."""
    sources: dict[str, tuple[int, int]]
    """For each factor that is split: the value, and its dimension, that proposed it."""
    options: tuple[Option, ...]
    """Where proposals compete, the ways to grant them, that which is taken first."""


@lru_cache(maxsize=65536)
def spread(factors: Factors, values: tuple[Seen, ...], mesh: Mesh) -> Spread:
    """What each of an op's values, operands first, learns from the others."""
    dims = (*factors.operands, *factors.results)
    proposed: tuple[dict[str, dict[Axes, tuple[int, int]]], ...] = ({}, {})
    for i, (v, names_of) in enumerate(zip(values, dims, strict=True)):
        for d, (names, axes) in enumerate(zip(names_of, v.dims, strict=True)):
            if axes and d not in v.limits.silent:
                mine, _ = factors.assign(names, axes, mesh)
                for f, a in mine.items():
                    if a:
                        proposed[v.parameter].setdefault(f, {}).setdefault(a, (i, d))
    chosen: FactorAxes = {}
    options: tuple[Option, ...] = ()
    for found in proposed:
        taken = tuple(a for axes in chosen.values() for a in axes)
        left = {f: found[f] for f, _ in factors.sizes if f in found and f not in chosen}
        all_ways = ways(left, taken, mesh)
        compared: tuple[Option, ...] = ()
        if len(all_ways) > 1:

            def cost(way: FactorAxes) -> tuple[float, float]:
                return _edges(factors, values, {**chosen, **way}, mesh)

            all_ways, compared = best_first(all_ways, cost, mesh)
        chosen.update(all_ways[0])
        options = compared or options
    sources = {f: next(p[f][a] for p in proposed if a in p.get(f, {})) for f, a in chosen.items()}
    new = tuple(_granted(factors, d, v, chosen, mesh) for d, v in zip(dims, values, strict=True))
    return Spread(new, sources, options)


def ways(proposed: Mapping[K, Collection[Axes]], taken: Axes, mesh: Mesh) -> list[dict[K, Axes]]:
    """The ways to grant each key one of its proposals: no axis to two, none of `taken`, and none
    refused that would fit. Finest first, in the order of the keys."""
    choices: dict[K, list[Axes]] = {}
    count = 1
    for key, axes in proposed.items():
        fits = [a for a in axes if mesh.clash((*taken, *a)) is None]
        fits.sort(key=lambda a: (-mesh.extent(a), [mesh.order(b) for b in a], sizes_of(a)))
        choices[key] = fits if count * (len(fits) + 1) <= MAX_CHOICES else fits[:1]
        count *= len(choices[key]) + 1
    if all(len(c) <= 1 for c in choices.values()):
        only = {key: c[0] for key, c in choices.items() if c}
        if mesh.clash(tuple(a for axes in only.values() for a in axes)) is None:
            return [only]
    found = []
    for combo in product(*[(*c, ()) for c in choices.values()]):
        used = tuple(a for axes in combo for a in axes)
        refused = [
            a for axes, c in zip(combo, choices.values(), strict=True) if not axes for a in c
        ]
        if mesh.clash(used) is None and all(mesh.clash((*used, *a)) for a in refused):
            found.append({key: a for key, a in zip(choices, combo, strict=True) if a})
    return found


def best_first(
    all_ways: list[dict[K, Axes]], cost: Callable[[dict[K, Axes]], tuple[float, float]], mesh: Mesh
) -> tuple[list[dict[K, Axes]], tuple[Option, ...]]:
    """The ways by their cost; among equals what splits more, then as they stood."""
    priced = [(cost(way), way) for way in all_ways]
    priced.sort(key=lambda p: (*p[0], -mesh.extent(tuple(a for x in p[1].values() for a in x))))
    options = tuple(Option(tuple(way.items()), *c) for c, way in priced)
    return [way for _, way in priced], options


def widened(mine: Split, wanted: Split, limits: Limits, mesh: Mesh) -> Split:
    """`mine` with what `wanted` adds to its open dimensions; the same object when it adds none."""
    new = list(mine)
    for d, axes in enumerate(wanted):
        if d not in limits.open or not axes or axes == new[d]:
            continue
        others = tuple(a for e, other in enumerate(new) if e != d for a in other)
        if mesh.clash((*others, *limits.barred, *axes)) is None and begins(axes, new[d], mesh):
            new[d] = axes
    return mine if tuple(new) == mine else tuple(new)


def allows(stated: Sharding, layout: Layout, mesh: Mesh) -> bool:
    """Whether a value of which this is stated may lie so."""
    stated, layout = stated.simplified(mesh), layout.simplified(mesh)
    limits = Limits(stated.open, barred=stated.replicated)
    split = widened(stated.layout.dims, layout.dims, limits, mesh)
    return replace(stated.layout, dims=split) == layout


def begins(axes: Axes, first: Axes, mesh: Mesh) -> bool:
    """Whether a dimension over `first` is split further over `axes`."""
    if not first:
        return True
    if sizes_of(axes) or sizes_of(first):
        return False
    start = mesh.cut(first, axes)
    return mesh.cut(axes, first)[: len(start)] == start


def meet(a: Sharding, b: Sharding, mesh: Mesh) -> Sharding | None:
    """What both say of one value: a dimension is open where both have it open, and takes part when
    both do. None where they contradict each other."""
    dims = []
    for d, (x, y) in enumerate(zip(a.layout.dims, b.layout.dims, strict=True)):
        if x == y or (d in b.open and begins(x, y, mesh)):
            dims.append(x)
        elif d in a.open and begins(y, x, mesh):
            dims.append(y)
        else:
            return None
    late = tuple(max(a.priority(d), b.priority(d)) for d in range(len(dims)))
    pinned = (*mesh.cut(a.replicated, b.replicated), *mesh.cut(b.replicated, a.replicated))
    both = Sharding(
        Layout(mesh.name, tuple(dims)), a.open & b.open, late, tuple(dict.fromkeys(pinned))
    ).simplified(mesh)
    return both if mesh.clash((*both.layout.used, *both.replicated)) is None else None


def _granted(
    factors: Factors, names_of: tuple[tuple[str, ...], ...], v: Seen, chosen: FactorAxes, mesh: Mesh
) -> Split:
    wanted = tuple([_composed(factors, names, chosen, mesh) for names in names_of])
    return widened(v.dims, wanted, v.limits, mesh)


def _composed(factors: Factors, names: tuple[str, ...], chosen: FactorAxes, mesh: Mesh) -> Axes:
    """The axes of a dimension; where no layout says how all of its factors are split, those of the
    major ones."""
    left = [f for f in names if f in chosen]
    while (axes := factors.compose(names, {f: chosen[f] for f in left}, mesh)) is None:
        left.pop()
    return axes


def _edges(
    factors: Factors, values: tuple[Seen, ...], chosen: FactorAxes, mesh: Mesh
) -> tuple[float, float]:
    """The seconds of the redistributions at the edges of an op that is split so: for their bytes,
    and for their collectives."""
    found = placed(factors, {f: a for f, a in chosen.items() if f not in factors.replicate}, mesh)
    if found is None:
        return float("inf"), float("inf")
    moved = started = 0.0
    names = (*factors.operands, *factors.results)
    n = len(factors.operands)
    for i, (v, layout) in enumerate(zip(values, (*found.operands, *found.results), strict=True)):
        have = Layout(mesh.name, _granted(factors, names[i], v, chosen, mesh))
        source, target = (have, layout) if i < n else (layout, have)
        if source != target:
            a, b = seconds(v.shape, mesh, source, target)
            moved, started = moved + a, started + b
    return moved, started
