"""Propagation of axes along the factors of one node.

    matmul (i, k), (k, j) -> (i, j)      x [{dp}, {}], w [{}, {tp}]: so y [{dp}, {tp}]

Each value proposes the axes of its dimensions for their factors. Activations' proposals are granted
before parameters', or after them; `conflicts.py` resolves conflicts. Then each value is refined by
what its factors were granted; a merged dimension takes as many of them, major ones first, as a
layout can express.
"""

from functools import lru_cache
from math import fsum, inf
from typing import NamedTuple

from shardir.algebra.factors import FactorAxes, Factors, try_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.propagation.conflicts import Alternative, resolve
from shardir.algebra.redistribution import estimated_seconds
from shardir.algebra.sharding import DimAxes, refine


class OperandState(NamedTuple):
    """The state of one of a node's values, operand or result."""

    shape: Shape
    itemsize: int
    """The bytes of an element."""
    dims: DimAxes
    open: frozenset[int]
    """The dimensions that may be refined now."""
    silent: frozenset[int] = frozenset()
    """The dimensions that propose nothing now."""
    excluded: Axes = ()
    """The axes that may split no dimension."""
    is_parameter: bool = False


class NodeUpdate(NamedTuple):
    """The refinement of a node's values."""

    dims: tuple[DimAxes, ...]
    """Per value, operands first: the same object where nothing is refined."""
    sources: dict[str, tuple[int, int, Axes]]
    """Per factor that is split, the value, and its dimension with its axes, that proposed it."""
    conflict: tuple[Alternative, ...]
    """Where proposals conflict, the alternatives, the granted one first."""
    refuses: bool
    """Whether proposals of parameters are refused."""


@lru_cache(maxsize=65536)
def update(
    factors: Factors, states: tuple[OperandState, ...], mesh: Mesh, parameters_first: bool = False
) -> NodeUpdate:
    """Return the refinement of the values of a node with these factors, operands first."""
    names = (*factors.operands, *factors.results)
    proposed: tuple[dict[str, dict[Axes, tuple[int, int, Axes]]], ...] = ({}, {})
    for i, d, f, axes in factors.assignments([s.dims for s in states], mesh):
        if axes and d not in states[i].silent:
            proposed[states[i].is_parameter].setdefault(f, {}).setdefault(
                axes, (i, d, states[i].dims[d])
            )
    chosen: FactorAxes = {}
    conflict: tuple[Alternative, ...] = ()
    for found in reversed(proposed) if parameters_first else proposed:
        taken = tuple(a for axes in chosen.values() for a in axes)
        left = {f: found[f] for f, _ in factors.sizes if f in found and f not in chosen}

        def seconds(granted: FactorAxes) -> float:
            return _redistributions(factors, states, {**chosen, **granted}, mesh)

        granted, alternatives = resolve(left, taken, mesh, seconds)
        chosen.update(granted)
        conflict = alternatives or conflict
    sources = {f: next(p[f][a] for p in proposed if a in p.get(f, {})) for f, a in chosen.items()}
    new = tuple(
        _refined(factors, dims, s, chosen, mesh) for dims, s in zip(names, states, strict=True)
    )
    refuses = any(axes != chosen.get(f) for f, by in proposed[True].items() for axes in by)
    return NodeUpdate(new, sources, conflict, refuses)


def _refined(
    factors: Factors,
    dims: tuple[tuple[str, ...], ...],
    state: OperandState,
    chosen: FactorAxes,
    mesh: Mesh,
) -> DimAxes:
    proposed = tuple([_composed(factors, dim, chosen, mesh) for dim in dims])
    return refine(state.dims, proposed, state.open, state.excluded, mesh)


def _composed(factors: Factors, dim: tuple[str, ...], chosen: FactorAxes, mesh: Mesh) -> Axes:
    """Return the axes of a dimension; where no layout has the axes of all of its factors, those of
    the major ones."""
    left = [f for f in dim if f in chosen]
    while (axes := factors.compose(dim, {f: chosen[f] for f in left}, mesh)) is None:
        left.pop()
    return axes


def _redistributions(
    factors: Factors, states: tuple[OperandState, ...], chosen: FactorAxes, mesh: Mesh
) -> float:
    """Return the estimated time of the redistributions of a node with these axes."""
    found = try_op_sharding(
        factors, {f: a for f, a in chosen.items() if f not in factors.replicate}, mesh
    )
    if found is None:
        return inf
    times: list[float] = []
    names = (*factors.operands, *factors.results)
    n = len(factors.operands)
    for i, (s, layout) in enumerate(zip(states, (*found.operands, *found.results), strict=True)):
        have = Layout(mesh.name, _refined(factors, names[i], s, chosen, mesh))
        source, target = (have, layout) if i < n else (layout, have)
        if source != target:
            times.append(estimated_seconds(s.shape, mesh, source, target, s.itemsize))
    return fsum(times)
