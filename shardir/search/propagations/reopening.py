"""Reopening: of two propagations of a graph, the faster one, or a mixture of them.

    activations first   %h = %x %w1, %y = %h %w2 keep the batch's axis: %w1 and %w2 are gathered
    parameters first    they have the weights' axis: %x is redistributed, and %y back
    a mixture           each value has its layout in the one or in the other

The mixture is that of minimum estimated time (mixture_costs.py); of equal times that of the first
propagation is chosen, value by value. Annotations and barriers hold in both propagations, and so in
each mixture of them.

The estimate is not the time of the lowered program. So where much is gained by it, and the times of
the programs are known, these decide: the mixture, or parameters first, is chosen if its program is
not slower than with activations first.
"""

from collections.abc import Callable, Sequence

from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.propagation import PropagationState, propagate
from shardir.algebra.propagation.graph import PropagationGraph
from shardir.search.propagations.mixture_costs import MixtureCosts

Price = Callable[[PropagationState], Sequence[float] | None]
"""Returns times of the lowered program, with overlap and without; None where they are not known."""


def reopened(graph: PropagationGraph, price: Price) -> PropagationState:
    """Propagate a graph; where proposals of parameters are refused, at minimum time.

    Raises:
        ContradictionError: annotations of a group's values contradict each other.
    """
    first = propagate(graph)
    if not first.refusing:
        return first
    other = propagate(graph, parameters_first=True)
    changed = MixtureCosts(first, other).cheapest()
    if not changed:
        return first
    mixture = first.mixed(other, changed)
    times = price(first)
    if times is None:
        return mixture
    best = first
    options = {tuple(state.dims): state for state in (first, mixture, other)}
    for option in [*options.values()][1:]:
        found = price(option)
        if found is not None and _is_faster(found, times):
            best, times = option, found
    return best


def _is_faster(after: Sequence[float], before: Sequence[float]) -> bool:
    """Whether one of these times is less than before, and none is more."""
    pairs = list(zip(after, before, strict=True))
    return any(a < b * IMPROVEMENT for a, b in pairs) and not any(
        b < a * IMPROVEMENT for a, b in pairs
    )
