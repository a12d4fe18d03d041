"""The live ranges of values, as the search counts memory.

It counts the shards of values from the op that makes them to the last that uses them or a view of
them: arguments throughout, an updated value in the storage of the old one; and for one op the
redistributed copies of its operands and of its result. It does not count what redistributions and
decomposed ops need while they run: the memory of a plan is that of its lowered program.
"""

from collections.abc import Mapping
from math import prod

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.aliasing import views
from shardir.analysis.storages import Span, Storages
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import itemsize
from shardir.dialects.train import BackwardOp, Update

LONG_LIVED_OPS = 20
"""The number of ops above which a live range is long: then the value may have a layout of its own,
or be computed again."""


def live_spans(block: Block, ties: Mapping[SSAValue, SSAValue]) -> dict[SSAValue, Span]:
    """Return the live range of each storage of a block in the global view. Views are in the storage
    of their operand, and the new value of an update in that of the old one."""
    ops = list(block.ops)
    storages = Storages(block.args, ops)
    for op in ops:
        for v, operand in views(op, None):
            storages.join(v, operand)
        if isinstance(op, Update):
            for v in op.results:
                if v in ties:
                    storages.join(v, ties[v])
    return dict(storages.spans())


def unsaved_spans(block: Block, spans: Mapping[SSAValue, Span]) -> dict[SSAValue, Span]:
    """Return the values of the forward part that may be computed again in the backward part: their
    operands are live anyway at their first use there. For each, the ops at which it is not live
    then: from after its last use in the forward part to before the first later one."""
    ops = list(block.ops)
    border = next((i for i, op in enumerate(ops) if isinstance(op, BackwardOp)), len(ops))
    at = {op: i for i, op in enumerate(ops)}
    found: dict[SSAValue, Span] = {}
    for op in ops[:border]:
        if not isinstance(op, TensorOp) or len(op.results) != 1 or not op.operands:
            continue
        (v,) = op.results
        uses = sorted(at[use.operation] for use in v.uses)
        last = max((i for i in uses if i < border), default=at[op])
        first = next((i for i in uses if i > border), None)
        if v not in spans or first is None or first - last <= LONG_LIVED_OPS:
            continue
        if all(x in spans and spans[x].end >= first for x in op.operands):
            found[v] = Span(last + 1, first - 1)
    return found


def shard_bytes(t: TensorType, layout: Layout, mesh: Mesh) -> int:
    """Return the bytes of a value on a device."""
    return prod(layout.local_shape(mesh, t.get_shape())) * itemsize(t)
