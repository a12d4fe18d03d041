"""The backward part of a stage in two: the gradients of its inputs, and those of its weights.

    %d_h = nn.einsum %d_y, %w      I: another stage waits for it
    %d_w = nn.einsum %x, %d_y      W: %x and %d_y are kept from I to W
    %d_b = nn.reduce <sum> %d_y    W: %d_y is kept in any case

W has the products of matrices on which neither what others wait for nor another product depends; I
has the other products. The remaining ops are in I or in W, so that the fewest bytes are kept in
between: a minimum cut, over the storages that are there at the end of I and that W reads.
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
"""An op, a storage (as it is there at the end of I, and as W reads it), or an end."""


def ops_of_weights(
    ops: Sequence[Operation], awaited: Collection[SSAValue], storages: Mapping[SSAValue, SSAValue]
) -> list[Operation]:
    """Return the ops of W.

    Args:
        ops: of the backward part of a stage, in their order.
        awaited: the values that others read before all microbatches are through.
        storages: of each value the storage, by the value that it is made for; without those that
            are there in any case, such as parameters.
    """
    inner, last = _products(ops)
    first = _makers(ops, {*awaited, *(v for op in inner for v in op.results)})
    second = [op for op in last if op not in first]
    if not second:
        return []
    cut = minimum_cut(_edges(ops, first, second, storages), INPUT, WEIGHT)
    return [op for op in ops if op not in cut]


def _makers(ops: Sequence[Operation], values: Collection[SSAValue]) -> set[Operation]:
    """Return the ops that some values depend on."""
    needed = set(values)
    found = set[Operation]()
    for op in reversed(ops):
        if not needed.isdisjoint(op.results):
            found.add(op)
            needed.update(op.operands)
    return found


def _products(ops: Sequence[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Return the products of matrices on which others depend, and those on which none does.
    Products are what mixed precision computes in the narrow type."""
    inner, last = list[Operation](), list[Operation]()
    needed = set[SSAValue]()
    for op in reversed(ops):
        feeds = not needed.isdisjoint(op.results)
        is_product = isinstance(op, TensorOp) and op.PRECISION == "narrow"
        if is_product:
            (inner if feeds else last).append(op)
        if feeds or is_product:
            needed.update(op.operands)
    return inner, last


def _edges(
    ops: Sequence[Operation],
    first: Collection[Operation],
    second: Collection[Operation],
    storages: Mapping[SSAValue, SSAValue],
) -> Iterator[tuple[CutNode, CutNode, float]]:
    """Yield the edges of the graph whose cuts are the splits of the ops, with the bytes kept."""
    own = set(ops)
    for op in first:
        yield INPUT, op, inf
    for op in second:
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
