"""The state of a propagation: the axes of each value's dimensions, and their provenance."""

from collections.abc import Iterable
from copy import copy
from functools import cache, partial
from math import fsum
from typing import NamedTuple

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.algebra.propagation.along_factors import OperandState
from shardir.algebra.propagation.conflicts import Alternative, resolve
from shardir.algebra.propagation.graph import PropagationGraph
from shardir.algebra.redistribution import estimated_seconds
from shardir.algebra.sharding import DimAxes, Sharding, refine, refines


class SourceDim(NamedTuple):
    """A dimension of a value, and the axes that it had when it proposed them."""

    value: int
    dim: int
    axes: Axes


class Provenance(NamedTuple):
    """The origin of the axes of a dimension of a value."""

    kind: str
    """"annotation", "strategy", "input" (one that nothing reached), "group", or "factors"."""
    node: int | None = None
    """The node with the strategy or the factors, or that which puts the value into its group."""
    sources: tuple[SourceDim, ...] = ()
    """The dimensions that proposed them."""


class PropagationState:
    """The axes, groups, provenance and conflicts of a propagation so far."""

    def __init__(self, graph: PropagationGraph, parameters_first: bool = False):
        self.graph, self.mesh = graph, graph.mesh
        self.parameters_first = parameters_first
        self.dims: list[DimAxes] = [((),) * len(v.shape) for v in graph.values]
        self.annotations: list[Sharding | None] = [None] * len(graph.values)
        """Of each value, its annotation, or that of its group, or its node's strategy's."""
        self.is_parameter = [v.is_parameter for v in graph.values]
        self.members: list[tuple[int, ...]] = [(v,) for v in range(len(graph.values))]
        """Per value, those of its group; of no group, the value itself."""
        self.grouped_by: dict[int, int] = {}
        """Of each value that is in a group, the node that puts it there."""
        self.priority = 0
        """The priority up to which dimensions take part."""
        self.first_alone = True
        """Whether only activations propose axes so far; or only parameters, if they are first."""
        self.provenance: dict[tuple[int, int], Provenance] = {}
        """Per dimension of a value that is split."""
        self.node_conflicts: dict[int, tuple[Alternative, ...]] = {}
        self.refusing: set[int] = set()
        """The nodes at which proposals of parameters are refused."""
        self.value_conflicts: dict[int, tuple[Alternative, ...]] = {}
        """Where proposals conflicted: the alternatives, the granted one first."""

    def priorities(self) -> list[int]:
        """Return all priorities in order."""
        given = (p for s in self.annotations if s is not None for p in s.priorities)
        return sorted({0, *given})

    def is_closed(self, v: int) -> bool:
        """Whether no dimension of a value may be refined."""
        annotation = self.annotations[v]
        return annotation is not None and not annotation.open

    def join(self, v: int, w: int, node: int) -> None:
        """Make the groups of two values one."""
        for x in (v, w):
            self.grouped_by.setdefault(x, node)
        together = tuple(dict.fromkeys((*self.members[v], *self.members[w])))
        for x in together:
            self.members[x] = together

    def assign(self, v: int, dims: DimAxes) -> None:
        """Set the axes of a value, and so of its group."""
        for w in self.members[v]:
            self.dims[w] = dims

    def record(self, v: int, d: int, provenance: Provenance) -> None:
        """Record the provenance of the axes that a dimension has been given, and of those of its
        group: of the sources those that proposed one of them."""
        axes, overlap = self.dims[v][d], self.mesh.overlap
        sources = [
            s for s in provenance.sources if any(overlap(a, b) for a in axes for b in s.axes)
        ]
        self.provenance[v, d] = provenance._replace(sources=tuple(sources))
        for w in self.members[v]:
            if w != v:
                source = SourceDim(v, d, axes)
                self.provenance[w, d] = Provenance("group", self.grouped_by[w], (source,))

    def mixed(self, other: "PropagationState", values: Iterable[int]) -> "PropagationState":
        """Return this propagation, in which values, and their groups, have the axes of another one
        of the same graph."""
        mixture = copy(self)
        mixture.dims, mixture.provenance = [*self.dims], dict(self.provenance)
        for v in values:
            mixture.assign(v, other.dims[v])
            for w in self.members[v]:
                for d in range(len(self.dims[w])):
                    mixture.provenance.pop((w, d), None)
                    if (w, d) in other.provenance:
                        mixture.provenance[w, d] = other.provenance[w, d]
        return mixture

    def origin(self, v: int, d: int) -> Provenance:
        """Return the provenance of the axes of a dimension, with the sources that still have the
        axes that they proposed: others have a layout that was found to be faster since."""
        found = self.provenance[v, d]
        kept = [s for s in found.sources if refines(self.dims[s.value][s.dim], s.axes, self.mesh)]
        return found._replace(sources=tuple(kept))

    def path(self, v: int, d: int) -> list[tuple[int, int, Provenance]]:
        """Return the path of the axes of a dimension: the dimension itself, then the ones that
        they come from, back to annotations, strategies and inputs; each once."""
        found, seen, todo = [], {(v, d)}, [(v, d)]
        while todo:
            w, e = todo.pop()
            if not self.dims[w][e]:
                continue
            found.append((w, e, self.origin(w, e)))
            sources = [s[:2] for s in found[-1][2].sources if s[:2] not in seen]
            seen.update(sources)
            todo += reversed(sources)
        return found

    def operand_state(self, v: int) -> OperandState:
        """Return the current state of a value, as nodes use it."""
        dims = self.dims[v]
        every, late, excluded = _every(len(dims)), _NONE, ()
        open = every
        if (annotation := self.annotations[v]) is not None:
            if annotation.priorities:
                late = frozenset(d for d in every if annotation.priority(d) > self.priority)
            open, excluded = annotation.open - late, annotation.replicated
        parameter = self.is_parameter[v]
        waits = self.first_alone and parameter != self.parameters_first
        silent = every if waits else late
        value = self.graph.values[v]
        return _operand_state(
            (value.shape, value.itemsize, dims, open, silent, excluded, parameter)
        )

    def granted(self, v: int, proposals: list[DimAxes]) -> DimAxes:
        """Return the axes of a value for which several nodes propose some. Conflicts are resolved
        by the cost of the redistributions to each of the proposals."""
        mine, state = self.dims[v], self.operand_state(v)
        if len(proposals) == 1:
            return refine(mine, proposals[0], state.open, state.excluded, self.mesh)
        new = {
            d: found
            for d, axes in enumerate(mine)
            if (found := {p[d]: None for p in proposals if p[d] not in ((), axes)})
        }

        def refined(granted: dict[int, Axes]) -> DimAxes:
            dims = tuple(granted.get(d, ()) for d in range(len(mine)))
            return refine(mine, dims, state.open, state.excluded, self.mesh)

        def seconds(granted: dict[int, Axes]) -> float:
            have, size = Layout(self.mesh.name, refined(granted)), state.itemsize
            wanted = [Layout(self.mesh.name, dims) for dims in proposals]
            return fsum(estimated_seconds(state.shape, self.mesh, have, l, size) for l in wanted)

        granted, alternatives = resolve(new, (), self.mesh, seconds)
        if alternatives:
            self.value_conflicts.update(dict.fromkeys(self.members[v], alternatives))
        return refined(granted)


_NONE: frozenset[int] = frozenset()

_operand_state = partial(tuple.__new__, OperandState)
"""Half the time of OperandState()."""


@cache
def _every(rank: int) -> frozenset[int]:
    return frozenset(range(rank))
