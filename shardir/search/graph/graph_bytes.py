"""The bytes that the values of a cost graph hold, as sums over its variables.

argument_bytes    those of arguments, which every program holds
value_bytes       those of all values, of a graph that counts memory
live_bytes        these, and those that live while one op runs (transients.py)

Values that may be in host memory do not count.
"""

from collections.abc import Collection, Iterator

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.arrays import Table
from shardir.analysis.storages import Span
from shardir.dialects.nn.types import unsharded_type
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.graph.edges import times
from shardir.search.graph.live_bytes import shard_bytes
from shardir.search.graph.stage_bytes import RankBytes
from shardir.search.graph.transients import in_turn
from shardir.search.graph.value_layouts import ValueLayouts, result_index
from shardir.search.problem.memory import LiveBytes


def argument_bytes(graph: CostGraph, hosted: Collection[SSAValue] = ()) -> list[LiveBytes]:
    """Return the live bytes of the arguments, which every program holds; of a step in stages those
    of each rank.

    Args:
        hosted: those that may be in host memory.
    """
    found, ranks = list[LiveBytes](), RankBytes.of(graph.block)
    for v, i in graph.value_variable.items():
        if isinstance(v.owner, Block) and v not in hosted:
            table = _shard_bytes(graph, unsharded_type(v), graph.layouts[v])
            held = [LiveBytes((i,), table, Span(-1, -1))]
            found += held if ranks is None else ranks.of_value(v, held)
    return found


def live_bytes(graph: CostGraph, hosted: Collection[SSAValue] = ()) -> list[LiveBytes]:
    """Return the live bytes of all values, of redistributed copies, and of what redistributions
    need while they run; of a step in stages those of each rank.

    Args:
        hosted: the arguments that may be in host memory.
    """
    assert graph.transients is not None
    ranks = RankBytes.of(graph.block)
    copies, buffers = graph.transients.copies, graph.transients.buffers
    if ranks is not None:
        copies = [ranks.at_op(h) for h in copies]
        buffers = [(number, ranks.at_op(h)) for number, h in buffers]
    return in_turn([*copies, *value_bytes(graph, hosted, ranks)], buffers)


def value_bytes(
    graph: CostGraph, hosted: Collection[SSAValue] = (), ranks: RankBytes | None = None
) -> list[LiveBytes]:
    """Return the live bytes of all values but `hosted`; of a step in stages those of each rank."""
    assert graph.spans is not None
    found = list[LiveBytes]()
    for v, span in graph.spans.items():
        if isinstance(v.type, TensorType) and v not in hosted:
            held = _of_value(graph, v, span)
            found += held if ranks is None else ranks.of_value(v, held)
    return found


def _of_value(graph: CostGraph, v: SSAValue, span: Span) -> Iterator[LiveBytes]:
    """Yield the live bytes of a value: not where it is not saved, since it is made again."""
    op = v.owner
    if v in graph.value_variable:
        i, layouts = graph.value_variable[v], graph.layouts[v]
    elif isinstance(op, Operation) and op in graph.op_variable:
        i, layouts = graph.op_variable[op], graph.made_in(graph.candidates[op], result_index(v))
    else:
        return
    table, pin = _shard_bytes(graph, unsharded_type(v), layouts), graph.pin_of(v)
    gap = graph.unsaved.gaps.get(v) if pin is None else pin.unsaved
    if gap is None or v not in graph.value_variable:
        yield LiveBytes((i,), table, span)
        return
    yield LiveBytes((i,), table, Span(span.start, gap.start - 1))
    if pin is None:  # it is saved, or made again: that is chosen
        assert isinstance(op, Operation)
        makers = graph.candidates[op]
        saved = graph.table(
            (id(table), id(makers), "saved"), lambda: (2 - times(makers))[:, None] * table
        )
        yield LiveBytes((graph.op_variable[op], i), saved, gap)
    yield LiveBytes((i,), table, Span(gap.end + 1, span.end))


def _shard_bytes(graph: CostGraph, t: TensorType, layouts: ValueLayouts) -> Table:
    """Return the bytes of a value on a device, in each of its layouts."""
    return graph.table(
        (id(layouts), "holds", t),
        lambda: np.array([float(shard_bytes(t, l, graph.mesh)) for l in layouts]),
    )
