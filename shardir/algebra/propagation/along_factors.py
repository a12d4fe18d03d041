"""Propagation of axes along the factors of one node.

    matmul (i, k), (k, j) -> (i, j)      x [{dp}, {}], w [{}, {tp}]: so y [{dp}, {tp}]

1. Each value proposes the axes of its dimensions for their factors.
2. Proposals of activations are granted before those of parameters, or after them; `conflicts.py`
   resolves conflicts.
3. Each value is refined by the axes of its factors. A merged dimension takes axes of its factors,
   major factors first, as far as a layout can express them.
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
    """The state of a node's operand or result.

    Attributes:
        itemsize: the bytes of an element.
        open: the dimensions that may be refined now.
        silent: the dimensions that propose no axes now.
        excluded: the axes that may not split a dimension.
    """

    shape: Shape
    itemsize: int
    dims: DimAxes
    open: frozenset[int]
    silent: frozenset[int] = frozenset()
    excluded: Axes = ()
    is_parameter: bool = False


class NodeUpdate(NamedTuple):
    """The refinement of a node's values.

    Attributes:
        dims: of each value, operands first; the object of its state if it is not refined.
        sources: by split factor, the value, the dimension and its axes that proposed the split.
        conflict: the alternatives if proposals conflict, the granted one first.
        refuses: a proposal of a parameter is refused.
    """

    dims: tuple[DimAxes, ...]
    sources: dict[str, tuple[int, int, Axes]]
    conflict: tuple[Alternative, ...]
    refuses: bool


@lru_cache(maxsize=65536)
def update(
    factors: Factors, states: tuple[OperandState, ...], mesh: Mesh, parameters_first: bool = False
) -> NodeUpdate:
    """Return the refinement of a node's values.

    Args:
        states: of the operands, then of the results.
    """
    names = (*factors.operands, *factors.results)
    proposed: tuple[dict[str, dict[Axes, tuple[int, int, Axes]]], ...] = ({}, {})
    for i, d, f, axes in factors.assignments([s.dims for s in states], mesh):
        if axes and d not in states[i].silent:
            proposed[states[i].is_parameter].setdefault(f, {}).setdefault(
                axes, (i, d, states[i].dims[d])
            )
    chosen: FactorAxes = {}
    conflict: tuple[Alternative, ...] = ()
    for proposals in reversed(proposed) if parameters_first else proposed:
        taken = tuple(a for axes in chosen.values() for a in axes)
        left = {f: proposals[f] for f, _ in factors.sizes if f in proposals and f not in chosen}

        def seconds(granted: FactorAxes) -> float:
            return _redistribution_seconds(factors, states, {**chosen, **granted}, mesh)

        granted, alternatives = resolve(left, taken, mesh, seconds)
        chosen.update(granted)
        conflict = alternatives or conflict
    sources = {f: next(p[f][a] for p in proposed if a in p.get(f, {})) for f, a in chosen.items()}
    new = tuple(
        _refine(factors, dims, s, chosen, mesh) for dims, s in zip(names, states, strict=True)
    )
    refuses = any(axes != chosen.get(f) for f, by in proposed[True].items() for axes in by)
    return NodeUpdate(new, sources, conflict, refuses)


def _refine(
    factors: Factors,
    dims: tuple[tuple[str, ...], ...],
    state: OperandState,
    chosen: FactorAxes,
    mesh: Mesh,
) -> DimAxes:
    """Return the dimensions of a value, refined by the axes of its factors."""
    proposed = tuple([_compose_major(factors, dim, chosen, mesh) for dim in dims])
    return refine(state.dims, proposed, state.open, state.excluded, mesh)


def _compose_major(factors: Factors, dim: tuple[str, ...], chosen: FactorAxes, mesh: Mesh) -> Axes:
    """Return the axes of a dimension, from as many of its major factors as a layout can
    express."""
    left = [f for f in dim if f in chosen]
    while (axes := factors.compose(dim, {f: chosen[f] for f in left}, mesh)) is None:
        left.pop()
    return axes


def _redistribution_seconds(
    factors: Factors, states: tuple[OperandState, ...], chosen: FactorAxes, mesh: Mesh
) -> float:
    """Return the estimated seconds of a node's redistributions; infinite if its factors cannot be
    split so."""
    sharding = try_op_sharding(
        factors, {f: a for f, a in chosen.items() if f not in factors.replicate}, mesh
    )
    if sharding is None:
        return inf
    times: list[float] = []
    names = (*factors.operands, *factors.results)
    n = len(factors.operands)
    layouts = (*sharding.operands, *sharding.results)
    for i, (s, layout) in enumerate(zip(states, layouts, strict=True)):
        have = Layout(mesh.name, _refine(factors, names[i], s, chosen, mesh))
        source, target = (have, layout) if i < n else (layout, have)
        if source != target:
            times.append(estimated_seconds(s.shape, mesh, source, target, s.itemsize))
    return fsum(times)
