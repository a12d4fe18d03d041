"""Results of strategies: the layouts in which their users need them.

    %y = nn.matmul %x, %w strategy<(({}, {a, b}), ({a, b}, {}))>      partial sum {a, b}
    %z = nn.relu %y strategy<(({a}, {b}),)>
    %y in [{}, {}]: an all-reduce, two slices    ->    %y in [{a}, {b}]: two reduce-scatters

A strategy determines the layout in which its node makes a result. The result is redistributed from
that to its own layout, and from there to those in which its users need it. So its own is one of
these, or the one in which it is made, reduced: that with the minimum sum of estimated times; of
equal ones one in which a user needs it, if there is one. The order of nodes decides nothing.
"""

from collections.abc import Iterator
from itertools import groupby
from math import fsum
from typing import NamedTuple

from shardir.algebra.estimates import ranked
from shardir.algebra.factors import OpSharding
from shardir.algebra.layout import Layout
from shardir.algebra.op_sharding import choose_op_sharding
from shardir.algebra.propagation.state import PropagationState, Provenance, SourceDim
from shardir.algebra.redistribution import estimated_seconds
from shardir.algebra.sharding import DimAxes


class _Change(NamedTuple):
    """The dimensions of a value in another layout, and the provenance of those that differ."""

    value: int
    dims: DimAxes
    provenance: dict[int, Provenance]


def place_results(state: PropagationState) -> list[int]:
    """Give results of strategies the layouts of minimum redistribution; return the nodes that touch
    one whose layout changes. Those that are annotated, or in a group, stay.

    The nodes of a level find the same values, so it does not matter which of them stands first.
    """
    graph, affected = state.graph, list[int]()
    nodes = (n for n, node in enumerate(graph.nodes) if node.strategy is not None)
    level = graph.levels.__getitem__
    for _, together in groupby(sorted(nodes, key=level), level):
        for change in [c for n in together for c in _changes(state, n)]:
            state.assign(change.value, change.dims)
            for d, provenance in change.provenance.items():
                state.record(change.value, d, provenance)
            affected += graph.touching[change.value]
    return affected


def _changes(state: PropagationState, n: int) -> Iterator[_Change]:
    """Yield the results of a node with a strategy that are to have another layout."""
    node = state.graph.nodes[n]
    assert node.strategy is not None
    for v, made in zip(node.results, node.strategy.results, strict=True):
        if state.graph.values[v].annotation is not None or len(state.members[v]) > 1:
            continue
        present, needs = Layout(state.mesh.name, state.dims[v]), [*_needs(state, v)]
        found = _cheapest(state, v, made, present, [*dict(needs)])
        if found != present:
            user = next(user for layout, user in needs if layout.complete == found)
            changed = [d for d, axes in enumerate(found.dims) if axes != present.dims[d]]
            yield _Change(v, found.dims, {d: _origin(state, user, v, d) for d in changed})


def _placed(state: PropagationState, n: int) -> OpSharding | None:
    """Return the placement of a node; None if it takes its operands as they are."""
    node, mesh = state.graph.nodes[n], state.mesh
    if node.factors is None:
        return node.strategy
    operands, results = (
        tuple([Layout(mesh.name, state.dims[v]) for v in side])
        for side in (node.operands, node.results)
    )
    values = [state.graph.values[v] for v in (*node.operands, *node.results)]
    shapes, sizes = zip(*((value.shape, value.itemsize) for value in values), strict=True)
    return choose_op_sharding(node.factors, operands, results, mesh, shapes, sizes)


def _needs(state: PropagationState, v: int) -> Iterator[tuple[Layout, int]]:
    """Yield the layouts in which nodes need a value, each with the node."""
    for n in state.graph.touching[v]:
        operands = state.graph.nodes[n].operands
        if v in operands:
            placed = _placed(state, n)
            present = Layout(state.mesh.name, state.dims[v])
            layouts = placed.operands if placed else (present,) * len(operands)
            yield from ((l, n) for w, l in zip(operands, layouts, strict=True) if w == v)


def _cheapest(
    state: PropagationState, v: int, made: Layout, present: Layout, needs: list[Layout]
) -> Layout:
    value, mesh = state.graph.values[v], state.mesh

    def seconds(layout: Layout) -> float:
        moves = [(made, layout), *((layout, need) for need in needs)]
        return fsum(
            estimated_seconds(value.shape, mesh, source, target, value.itemsize)
            for source, target in moves if source != target
        )  # fmt: skip

    def preference(layout: Layout) -> tuple[bool, bool, str]:
        return layout not in needs, layout != present, str(layout)

    options = dict.fromkeys((present, *(need.complete for need in needs)))
    return ranked(options, seconds, preference)[0][1]


def _origin(state: PropagationState, n: int, v: int, d: int) -> Provenance:
    """Return the provenance of the axes of a dimension that a node needs."""
    node = state.graph.nodes[n]
    if node.factors is None:
        return Provenance("strategy", n)
    names = (*node.factors.operands, *node.factors.results)
    touched = [*zip((*node.operands, *node.results), names, strict=True)]
    mine = {f for w, dims in touched if w == v for f in dims[d]}
    sources = [
        SourceDim(w, e, state.dims[w][e]) for w, dims in touched for e, dim in enumerate(dims)
        if w != v and state.dims[w][e] and not mine.isdisjoint(dim)
    ]  # fmt: skip
    return Provenance("factors", n, tuple(dict.fromkeys(sources)))
