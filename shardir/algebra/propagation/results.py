"""Results of strategies: the choice of their layouts by their users.

    %y = nn.matmul %x, %w strategy<(({}, {a, b}), ({a, b}, {}))>      partial sum {a, b}
    %z = nn.relu %y strategy<(({a}, {b}),)>
    %y in [{}, {}]: an all-reduce, two slices    ->    %y in [{a}, {b}]: two reduce-scatters

A strategy determines the layout in which its node computes a result. The result is redistributed
from there to its own layout, and then to the layouts that its users need. So its own layout is the
computed one, reduced, or one that a user needs: the one with the minimum sum of estimated seconds.
Among equal sums a user's layout wins. The order of nodes does not matter.
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
    """A new layout of a value, and the provenance of each dimension that changes."""

    value: int
    dims: DimAxes
    provenance: dict[int, Provenance]


def place_results(state: PropagationState) -> list[int]:
    """Give results of strategies their layouts of minimum redistribution, and return the nodes at
    values that change. Results with an annotation or in a group stay.

    The nodes of a level see one state, so their order does not matter.
    """
    graph, affected = state.graph, list[int]()
    nodes = (n for n, node in enumerate(graph.nodes) if node.strategy is not None)
    level = graph.levels.__getitem__
    for _, batch in groupby(sorted(nodes, key=level), level):
        for change in [c for n in batch for c in _changes(state, n)]:
            state.assign(change.value, change.dims)
            for d, provenance in change.provenance.items():
                state.record(change.value, d, provenance)
            affected += graph.touching[change.value]
    return affected


def _changes(state: PropagationState, n: int) -> Iterator[_Change]:
    """Yield the changes of the results of a node with a strategy."""
    node = state.graph.nodes[n]
    assert node.strategy is not None
    for v, computed in zip(node.results, node.strategy.results, strict=True):
        if state.graph.values[v].annotation is not None or len(state.members[v]) > 1:
            continue
        present, needs = Layout(state.mesh.name, state.dims[v]), [*_needs(state, v)]
        best = _cheapest_layout(state, v, computed, present, [*dict(needs)])
        if best != present:
            user = next(user for layout, user in needs if layout.complete == best)
            changed = [d for d, axes in enumerate(best.dims) if axes != present.dims[d]]
            yield _Change(v, best.dims, {d: _origin(state, user, v, d) for d in changed})


def _placement(state: PropagationState, n: int) -> OpSharding | None:
    """Return the placement of a node; None if it takes its operands in any layout."""
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
    """Yield the layout in which each user needs a value, and the user. None passes a barrier."""
    for n in state.graph.touching[v]:
        node = state.graph.nodes[n]
        operands = node.operands
        if v in operands and (node.strategy is not None or node.backward):
            placement = _placement(state, n)
            present = Layout(state.mesh.name, state.dims[v])
            layouts = placement.operands if placement else (present,) * len(operands)
            yield from ((l, n) for w, l in zip(operands, layouts, strict=True) if w == v)


def _cheapest_layout(
    state: PropagationState, v: int, computed: Layout, present: Layout, needs: list[Layout]
) -> Layout:
    """Return the layout of a value with the minimum seconds of redistributions."""
    value, mesh = state.graph.values[v], state.mesh

    def seconds(layout: Layout) -> float:
        moves = [(computed, layout), *((layout, need) for need in needs)]
        return fsum(
            estimated_seconds(value.shape, mesh, source, target, value.itemsize)
            for source, target in moves if source != target
        )  # fmt: skip

    def preference(layout: Layout) -> tuple[bool, bool, str]:
        return layout not in needs, layout != present, str(layout)

    options = dict.fromkeys((present, *(need.complete for need in needs)))
    return ranked(options, seconds, preference)[0][1]


def _origin(state: PropagationState, n: int, v: int, d: int) -> Provenance:
    """Return the provenance of axes of a dimension that a node needs."""
    node = state.graph.nodes[n]
    if node.factors is None:
        return Provenance("strategy", n)
    names = (*node.factors.operands, *node.factors.results)
    touched = [*zip((*node.operands, *node.results), names, strict=True)]
    own = {f for w, dims in touched if w == v for f in dims[d]}
    sources = [
        SourceDim(w, e, state.dims[w][e]) for w, dims in touched for e, dim in enumerate(dims)
        if w != v and state.dims[w][e] and not own.isdisjoint(dim)
    ]  # fmt: skip
    return Provenance("factors", n, tuple(dict.fromkeys(sources)))
