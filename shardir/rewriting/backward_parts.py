"""The backward part of a stage in two: the gradients of its inputs, and the gradients of its
weights.

    %d_h = nn.einsum %d_y, %w      I: the stage before waits for it
    %d_w = nn.einsum %x, %d_y      W: %x and %d_y are kept from I to W
    %d_b = nn.reduce <sum> %d_y    W: %d_y is kept in any case

W has the products of matrices on which no awaited value and no further product depends; I has the
remaining products. All remaining ops are in I or in W, so that the fewest bytes are kept in
between: a minimum cut over the storages that are live at the end of I and read by W.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf

from xdsl.ir import Operation, SSAValue

from shardir.algebra.cuts import minimum_cut
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import size_of

INPUT, WEIGHT = "I", "W"
"""The two parts, as the ends of a graph."""

CutNode = Operation | tuple[SSAValue, bool] | str
"""An op, a storage (paired with whether W reads it, or else live at the end of I), or an end."""


def ops_of_weights(
    ops: Sequence[Operation], awaited: Collection[SSAValue], storages: Mapping[SSAValue, SSAValue]
) -> list[Operation]:
    """Return the ops of W.

    Args:
        ops: of the backward part of a stage, in order.
        awaited: values that stages read before all microbatches are through.
        storages: the storage of each value, by the value that it is made for; without storages that
            stay live anyway, such as parameters.
    """
    inner_products, final_products = _products(ops)
    input_ops = _ops_before(ops, {*awaited, *(v for op in inner_products for v in op.results)})
    weight_ops = [op for op in final_products if op not in input_ops]
    if not weight_ops:
        return []
    cut = minimum_cut(_edges(ops, input_ops, weight_ops, storages), INPUT, WEIGHT)
    return [op for op in ops if op not in cut]


def _ops_before(ops: Sequence[Operation], values: Collection[SSAValue]) -> set[Operation]:
    """Return the ops on which values depend."""
    needed = set(values)
    makers = set[Operation]()
    for op in reversed(ops):
        if not needed.isdisjoint(op.results):
            makers.add(op)
            needed.update(op.operands)
    return makers


def _products(ops: Sequence[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Return the products of matrices on which further products depend, and the final ones.
    Products are the ops that mixed precision computes in the narrow type."""
    inner, final = list[Operation](), list[Operation]()
    needed = set[SSAValue]()
    for op in reversed(ops):
        feeds = not needed.isdisjoint(op.results)
        is_product = isinstance(op, TensorOp) and op.PRECISION == "narrow"
        if is_product:
            (inner if feeds else final).append(op)
        if feeds or is_product:
            needed.update(op.operands)
    return inner, final


def _edges(
    ops: Sequence[Operation],
    input_ops: Collection[Operation],
    weight_ops: Collection[Operation],
    storages: Mapping[SSAValue, SSAValue],
) -> Iterator[tuple[CutNode, CutNode, float]]:
    """Yield the edges of the graph, with the bytes kept. Its cuts are the splits of the ops."""
    own = set(ops)
    for op in input_ops:
        yield INPUT, op, inf
    for op in weight_ops:
        yield op, WEIGHT, inf
    read = dict[SSAValue, None]()
    for op in ops:
        for v in op.operands:
            if isinstance(v.owner, Operation) and v.owner in own:
                yield op, v.owner, inf  # in I, if the op is
            if (root := storages.get(v)) is not None:
                yield (root, True), op, inf
                read[root] = None
        for v in op.results:
            yield op, (storages.get(v, v), False), inf
    for root in read:
        yield (root, False), (root, True), size_of(root)
        if root.owner not in own:
            yield INPUT, (root, False), inf
