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
    """A dimension of a value, with the axes that it proposed."""

    value: int
    dim: int
    axes: Axes


class Provenance(NamedTuple):
    """The origin of the axes of a dimension of a value.

    Attributes:
        kind: "annotation", "strategy", "input" (that no axes reached), "group" or "factors".
        node: with the strategy or the factors, or that puts the value into its group.
        sources: the dimensions that proposed the axes.
    """

    kind: str
    node: int | None = None
    sources: tuple[SourceDim, ...] = ()


class PropagationState:
    """The axes, groups, provenance and conflicts of a propagation so far.

    Attributes:
        dims: by value, the axes of its dimensions.
        annotations: by value, its annotation, its group's, or the sharding of its strategy.
        members: by value, the values of its group, or the value itself.
        grouped_by: by value of a group, the node that puts it there.
        priority: up to which dimensions take part.
        first_alone: only activations propose axes so far (parameters if `parameters_first`).
        provenance: by value and dimension that is split.
        node_conflicts, value_conflicts: the alternatives of conflicts, the granted one first.
        refusing: the nodes at which proposals of parameters are refused.
    """

    def __init__(self, graph: PropagationGraph, parameters_first: bool = False):
        self.graph, self.mesh = graph, graph.mesh
        self.parameters_first = parameters_first
        self.dims: list[DimAxes] = [((),) * len(v.shape) for v in graph.values]
        self.annotations: list[Sharding | None] = [None] * len(graph.values)
        self.is_parameter = [v.is_parameter for v in graph.values]
        self.members: list[tuple[int, ...]] = [(v,) for v in range(len(graph.values))]
        self.grouped_by: dict[int, int] = {}
        self.priority = 0
        self.first_alone = True
        self.provenance: dict[tuple[int, int], Provenance] = {}
        self.node_conflicts: dict[int, tuple[Alternative, ...]] = {}
        self.refusing: set[int] = set()
        self.value_conflicts: dict[int, tuple[Alternative, ...]] = {}

    def priorities(self) -> list[int]:
        """Return all priorities in order."""
        given = (p for s in self.annotations if s is not None for p in s.priorities)
        return sorted({0, *given})

    def is_closed(self, v: int) -> bool:
        """Whether no dimension of a value may be refined."""
        annotation = self.annotations[v]
        return annotation is not None and not annotation.open

    def join(self, v: int, w: int, node: int) -> None:
        """Merge the groups of two values."""
        for x in (v, w):
            self.grouped_by.setdefault(x, node)
        union = tuple(dict.fromkeys((*self.members[v], *self.members[w])))
        for x in union:
            self.members[x] = union

    def assign(self, v: int, dims: DimAxes) -> None:
        """Set the axes of a value and of its group."""
        for w in self.members[v]:
            self.dims[w] = dims

    def record(self, v: int, d: int, provenance: Provenance) -> None:
        """Record the provenance of the axes of a dimension, and of its group's. Sources that
        proposed none of the axes are dropped."""
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
        """Return the merge of this propagation with another one of the same graph, from which the
        values, and their groups, have their axes."""
        merged = copy(self)
        merged.dims, merged.provenance = [*self.dims], dict(self.provenance)
        for v in values:
            merged.assign(v, other.dims[v])
            for w in self.members[v]:
                for d in range(len(self.dims[w])):
                    merged.provenance.pop((w, d), None)
                    if (w, d) in other.provenance:
                        merged.provenance[w, d] = other.provenance[w, d]
        return merged

    def origin(self, v: int, d: int) -> Provenance:
        """Return the provenance of the axes of a dimension, with the sources that still have the
        axes that they proposed. Other sources have got a faster layout since."""
        provenance = self.provenance[v, d]
        kept = [
            s for s in provenance.sources if refines(self.dims[s.value][s.dim], s.axes, self.mesh)
        ]
        return provenance._replace(sources=tuple(kept))

    def path(self, v: int, d: int) -> list[tuple[int, int, Provenance]]:
        """Return the dimensions from which the axes of a dimension come: the dimension itself, its
        sources, and so on, back to annotations, strategies and inputs; each once."""
        path, seen, todo = [], {(v, d)}, [(v, d)]
        while todo:
            w, e = todo.pop()
            if not self.dims[w][e]:
                continue
            path.append((w, e, self.origin(w, e)))
            sources = [s[:2] for s in path[-1][2].sources if s[:2] not in seen]
            seen.update(sources)
            todo += reversed(sources)
        return path

    def operand_state(self, v: int) -> OperandState:
        """Return the current state of a value, for `along_factors.update`."""
        dims = self.dims[v]
        all_dims, later, excluded = _all_dims(len(dims)), _NONE, ()
        open = all_dims
        if (annotation := self.annotations[v]) is not None:
            if annotation.priorities:
                later = frozenset(d for d in all_dims if annotation.priority(d) > self.priority)
            open, excluded = annotation.open - later, annotation.replicated
        parameter = self.is_parameter[v]
        waits = self.first_alone and parameter != self.parameters_first
        silent = all_dims if waits else later
        value = self.graph.values[v]
        return _operand_state(
            (value.shape, value.itemsize, dims, open, silent, excluded, parameter)
        )

    def grant(self, v: int, proposals: list[DimAxes]) -> DimAxes:
        """Return the axes of a value from the proposals of nodes. Conflicts are resolved by the
        seconds of the redistributions to all proposals."""
        dims, state = self.dims[v], self.operand_state(v)
        if len(proposals) == 1:
            return refine(dims, proposals[0], state.open, state.excluded, self.mesh)
        new = {
            d: choices
            for d, axes in enumerate(dims)
            if (choices := {p[d]: None for p in proposals if p[d] not in ((), axes)})
        }

        def refine_by(granted: dict[int, Axes]) -> DimAxes:
            proposed = tuple(granted.get(d, ()) for d in range(len(dims)))
            return refine(dims, proposed, state.open, state.excluded, self.mesh)

        def seconds(granted: dict[int, Axes]) -> float:
            have, size = Layout(self.mesh.name, refine_by(granted)), state.itemsize
            wanted = [Layout(self.mesh.name, dims) for dims in proposals]
            return fsum(estimated_seconds(state.shape, self.mesh, have, l, size) for l in wanted)

        granted, alternatives = resolve(new, (), self.mesh, seconds)
        if alternatives:
            self.value_conflicts.update(dict.fromkeys(self.members[v], alternatives))
        return refine_by(granted)


_NONE: frozenset[int] = frozenset()

_operand_state = partial(tuple.__new__, OperandState)
"""Half the time of OperandState()."""


@cache
def _all_dims(rank: int) -> frozenset[int]:
    return frozenset(range(rank))
