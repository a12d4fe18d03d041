"""The start of a propagation: annotations, groups, ties and strategies."""

from collections.abc import Mapping
from typing import NamedTuple

from shardir.algebra.factors import OpSharding
from shardir.algebra.layout import Layout
from shardir.algebra.propagation.state import PropagationState, Provenance, SourceDim
from shardir.algebra.sharding import DimAxes, Sharding
from shardir.diagnostics import ShardirError

Given = dict[int, tuple[Sharding, Provenance]]
"""The annotations of values, with their provenance."""


class Contradiction(NamedTuple):
    """Two values of a group whose annotations contradict each other.

    Attributes:
        node: the node that puts `value` into the group.
    """

    node: int
    value: int
    annotation: Sharding
    other: int
    other_annotation: Sharding


class ContradictionError(ShardirError):
    """Annotations of a group's values contradict each other."""

    def __init__(self, contradictions: list[Contradiction]):
        super().__init__("annotations contradict each other")
        self.contradictions = contradictions


def annotate(state: PropagationState) -> None:
    """Set the axes that annotations and strategies determine.

    Raises:
        ContradictionError: annotations of a group's values contradict each other.
    """
    graph = state.graph
    strategies = [(n, node.strategy) for n, node in enumerate(graph.nodes) if node.strategy]
    given: Given = {
        v: (value.annotation.simplified(state.mesh), Provenance("annotation"))
        for v, value in enumerate(graph.values)
        if value.annotation is not None
    }
    for n, op_sharding in strategies:  # they determine results without an annotation
        for v, layout in zip(graph.nodes[n].results, op_sharding.results, strict=True):
            sharding = Sharding(Layout(state.mesh.name, layout.dims))
            given.setdefault(v, (sharding, Provenance("strategy", n)))
    contradictions = []
    for members in graph.groups:
        first, *others = members
        for w in others:
            state.join(first, w, members[w])
        state.grouped_by.update(members)
        of_members = {v: given.pop(v) for v in members if v in given}
        if of_members:
            common = _meet_group(state, members, of_members)
            if isinstance(common, Contradiction):
                contradictions.append(common)
            else:
                _set_annotation(state, first, common, of_members)
    if contradictions:
        raise ContradictionError(contradictions)
    for v, (sharding, provenance) in given.items():
        _set_annotation(state, v, sharding, {v: (sharding, provenance)})
    _tie(state)
    _propose(state, strategies)


def _meet_group(
    state: PropagationState, members: Mapping[int, int], given: Given
) -> Sharding | Contradiction:
    """Return the annotation of a group, or the first contradiction of its members'."""
    first, *others = given
    common = given[first][0]
    for i, v in enumerate(others):
        sharding = given[v][0]
        met = common.meet(sharding, state.mesh)
        if met is None:
            before = [first, *others[:i]]
            contradicting = (w for w in before if given[w][0].meet(sharding, state.mesh) is None)
            w = next(contradicting, before[-1])
            return Contradiction(members[v], v, sharding, w, given[w][0])
        common = met
    return common


def _set_annotation(state: PropagationState, v: int, sharding: Sharding, given: Given) -> None:
    """Annotate a value and its group.

    Args:
        given: the annotations from which `sharding` follows.
    """
    members, dims = state.members[v], sharding.layout.dims
    for w in members:
        state.annotations[w] = sharding
    state.assign(v, dims)
    for w, (annotation, provenance) in given.items():
        for d, axes in enumerate(annotation.layout.dims):
            if axes and axes == dims[d]:
                state.provenance[w, d] = provenance
    for d, axes in enumerate(dims):
        others = [w for w in members if axes and (w, d) not in state.provenance]
        for w in others:
            source = next(x for x in members if x not in others)
            sources = (SourceDim(source, d, axes),)
            state.provenance[w, d] = Provenance("group", state.grouped_by[w], sources)


def _tie(state: PropagationState) -> None:
    """Group tied values if their shapes and annotations allow it."""
    values = state.graph.values
    for v, w, node in state.graph.ties:
        if w in state.members[v] or values[v].shape != values[w].shape:
            continue
        a, b = state.annotations[v], state.annotations[w]
        both = a.meet(b, state.mesh) if a is not None and b is not None else a or b
        if both is None and a is not None:
            continue
        state.join(v, w, node)
        for x in state.members[v]:
            state.is_parameter[x] = True
        if both is not None:
            _set_annotation(state, v, both, {})


def _propose(state: PropagationState, strategies: list[tuple[int, OpSharding]]) -> None:
    """Propose the axes in which strategies need operands that are not closed."""
    proposals: dict[int, dict[DimAxes, tuple[int, int]]] = {}
    for n, op_sharding in strategies:
        for v, layout in zip(state.graph.nodes[n].operands, op_sharding.operands, strict=True):
            if not state.is_closed(v):
                proposals.setdefault(state.members[v][0], {}).setdefault(layout.dims, (v, n))
    for first, by in proposals.items():
        state.assign(first, state.grant(first, [*by]))
        for dims, (v, n) in by.items():
            for d, axes in enumerate(dims):
                if axes and axes == state.dims[v][d] and (v, d) not in state.provenance:
                    state.record(v, d, Provenance("strategy", n))
