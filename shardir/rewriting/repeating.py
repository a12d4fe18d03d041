"""Ops of the forward part that are repeated in the backward part.

%h = nn.gelu %x          %h   = nn.gelu %x
train.backward           train.backward
%d = nn.mul %g, %h   ->  %h_0 = nn.gelu %x {recompute}
                         %d   = nn.mul %g, %h_0
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from xdsl.dialects.builtin import UnitAttr
from xdsl.ir import Block, Operation, SSAValue

from shardir.rewriting.marks import RECOMPUTE


class Load(NamedTuple):
    """A copy from the host in place of a value, in no block; its place among the repetitions is
    that of op `made`."""

    copy: Operation
    made: Operation


def repeat(
    block: Block,
    marked: Collection[Operation],
    after: Sequence[Operation],
    loads: Mapping[SSAValue, Load] = MappingProxyType({}),
) -> None:
    """Let the ops `after` a `train.backward` use repetitions of the marked ops before it.

    A repetition is placed right before the first op that uses it, or that uses what is made of it;
    those at one place are in the order of the ops that they repeat. It has the mark `recompute`,
    which the ops themselves lose. A value with a load is not repeated, but copied there.
    """
    if not marked and not loads:
        return
    places = {op: i for i, op in enumerate(block.ops)}
    at = {op: places[op] for op in marked}
    at |= {load.copy: places[load.made] for load in loads.values()}
    of_load = {load.copy: v for v, load in loads.items()}
    again: dict[SSAValue, SSAValue] = {}

    def missing(op: Operation) -> set[Operation]:
        """Return the marked ops and loads that an op needs and that are not there yet."""
        found, todo = set[Operation](), [op]
        while todo:
            for v in todo.pop().operands:
                source = loads[v].copy if v in loads else v.owner
                if source in at and v not in again and source not in found:
                    assert isinstance(source, Operation)
                    found.add(source)
                    todo.append(source)
        return found

    for op in after:
        for source in sorted(missing(op), key=at.__getitem__):
            if source in of_load:
                block.insert_op_before(source, op)
                again[of_load[source]] = source.results[0]
                continue
            copy = source.clone()
            copy.attributes[RECOMPUTE] = UnitAttr()
            copy.operands = [again.get(v, v) for v in source.operands]
            for old, new in zip(source.results, copy.results, strict=True):
                new.name_hint = old.name_hint
                again[old] = new
            block.insert_op_before(copy, op)
        for i, v in enumerate(op.operands):
            if v in again:
                op.operands[i] = again[v]
    for op in marked:
        op.attributes.pop(RECOMPUTE, None)
