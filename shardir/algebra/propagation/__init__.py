"""Propagation: annotations of some values, strategies of some nodes -> a layout of every value.

    values x 8x4 [{dp}, {}], w 4x6 [{}, {tp}], y 8x6
    node x, w -> y with factors (i, k), (k, j) -> (i, j)
 -> y [{dp}, {tp}]

A graph of plain values (`graph.py`) to a fixed point, by a worklist (`worklist.py`):

1. Closed dimensions are never changed; open ones are refined: split further, but over no axis that
   the annotation excludes, and over none that splits another dimension of the value. A node's
   strategy determines its results where they have no annotation.
2. Axes propagate along factors, forward and backward. First activations propose them, to a fixed
   point, then parameters too, so that a weight that is split over the batch's axis does not
   displace the batch; or the other way round. This is done for each priority in turn, with the
   dimensions up to it.
3. Where proposals conflict, at a node or for a value, the cheapest compatible ones are granted
   (`conflicts.py`).
4. Values of a group have one sharding. Values that are tied have one where they can: their shapes
   are equal, and their annotations don't contradict each other.
5. Inputs that nothing reaches are split along dimension 0 over the axes that nothing uses, one
   input after the other.
6. Results of strategies that are not annotated get the layout, of those in which they are made and
   needed, of minimum redistribution (`results.py`): what a user needs otherwise is not reduced or
   gathered first.
7. A value for which nothing proposes axes stays replicated.
8. The result is a fixed point: no node refines it further. It depends on which node uses which
   value, not on the order of nodes, and on that of values only by 5. Propagated again it is itself,
   if there are neither priorities nor parameters.

The result has the provenance of each dimension's axes, and the alternatives of each conflict.
"""

from shardir.algebra.propagation.annotations import annotate
from shardir.algebra.propagation.graph import PropagationGraph
from shardir.algebra.propagation.inputs import split_inputs
from shardir.algebra.propagation.results import place_results
from shardir.algebra.propagation.state import PropagationState
from shardir.algebra.propagation.worklist import Worklist


def propagate(graph: PropagationGraph, parameters_first: bool = False) -> PropagationState:
    """Propagate a graph's annotations and strategies to all of its values: those of activations
    first, or those of parameters.

    Raises:
        ContradictionError: annotations of a group's values contradict each other.
    """
    state = PropagationState(graph, parameters_first)
    annotate(state)
    worklist = Worklist(state)
    for priority in state.priorities():
        for first_alone in (True, False):
            state.priority, state.first_alone = priority, first_alone
            worklist.run(range(len(graph.nodes)))
    worklist.run(split_inputs(state))
    worklist.run(place_results(state))
    return state
