"""Propagation: annotations of some values, strategies of some nodes -> a layout of every value.

    values x 8x4 [{dp}, {}], w 4x6 [{}, {tp}], y 8x6
    node x, w -> y with factors (i, k), (k, j) -> (i, j)
 -> y [{dp}, {tp}]

A graph of plain values (`graph.py`) to a fixed point, by a worklist (`worklist.py`):

1. Closed dimensions never change. Open dimensions are refined: split further, except over axes that
   the annotation excludes or that split another dimension of the value. A node's strategy
   determines its results unless they are annotated.
2. Axes propagate along factors, forward and backward. First activations propose axes, to a fixed
   point, then parameters too: so a weight that is split over the batch's axis does not displace the
   batch. With `parameters_first` the order is reversed. This is repeated for each priority in turn,
   with the dimensions up to it.
3. If proposals conflict, at a node or for a value, the cheapest compatible ones are granted
   (`conflicts.py`).
4. Values of a group have one sharding. Tied values have one if their shapes are equal and their
   annotations do not contradict each other.
5. Inputs that no axes reach are split along dimension 0 over unused axes, one input after the
   other (`inputs.py`).
6. Results of strategies without an annotation get the layout of minimum redistribution among the
   layouts in which they are computed and used (`results.py`).
7. Values for which no node proposes axes stay replicated.
8. The result is a fixed point: no node refines it further. It does not depend on the order of
   nodes; it depends on the order of values only by 5. Without priorities and parameters, to
   propagate it again changes nothing.

The result has the provenance of the axes of each dimension, and the alternatives of each conflict.
"""

from shardir.algebra.propagation.annotations import annotate
from shardir.algebra.propagation.graph import PropagationGraph
from shardir.algebra.propagation.inputs import split_inputs
from shardir.algebra.propagation.results import place_results
from shardir.algebra.propagation.state import PropagationState
from shardir.algebra.propagation.worklist import Worklist


def propagate(graph: PropagationGraph, parameters_first: bool = False) -> PropagationState:
    """Propagate a graph's annotations and strategies to all of its values.

    Args:
        parameters_first: parameters propose axes before activations do.

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
