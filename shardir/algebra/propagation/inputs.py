"""Inputs that no axes reach: data parallel along dimension 0."""

from shardir.algebra.propagation.state import PropagationState, Provenance


def split_inputs(state: PropagationState) -> list[int]:
    """Split the inputs that no axes have reached, and return the nodes that touch them.

    1. An input is split over the unused axes, or, if all axes are used and no node at the input has
       a split value, over all axes. Minor axes are dropped until the rest divides the dimension.
    2. Operands of a node with a strategy count as reached, even if the strategy keeps them
       unsharded.
    """
    mesh, values = state.mesh, state.graph.values
    used = [a for dims in state.dims for axes in dims for a in axes]
    all_axes = mesh.simplify(mesh.names)  # without axes of size 1
    free = tuple(a for a in all_axes if not any(mesh.overlap(a, b) for b in used))
    affected: list[int] = []
    for v, value in enumerate(values):
        members = state.members[v]
        if not value.is_input or not value.shape or state.annotations[v] is not None:
            continue
        if any(state.dims[v]) or any(state.is_parameter[w] for w in members):
            continue
        touching = [n for w in members for n in state.graph.touching[w]]
        if any(state.graph.nodes[n].strategy is not None for n in touching):
            continue
        axes = free if any(_is_reached(state, n) for n in touching) else free or all_axes
        while axes and value.shape[0] % mesh.extent(axes):
            axes = axes[:-1]
        if axes:
            state.assign(v, (axes, *state.dims[v][1:]))
            state.record(v, 0, Provenance("input"))
            affected += touching
    return affected


def _is_reached(state: PropagationState, n: int) -> bool:
    """Whether a value of a node is split."""
    node = state.graph.nodes[n]
    return any(any(state.dims[v]) for v in (*node.operands, *node.results))
