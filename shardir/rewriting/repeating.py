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
    """A detached copy from the host that replaces a value; among the repetitions it has the place
    of op `made`."""

    copy: Operation
    made: Operation


def repeat(
    block: Block,
    marked: Collection[Operation],
    after: Sequence[Operation],
    loads: Mapping[SSAValue, Load] = MappingProxyType({}),
) -> None:
    """Let the ops `after` a `train.backward` use repetitions of the marked ops before it.

    A repetition is placed right before the first op that uses it, directly or through repetitions.
    Repetitions at one place keep the order of the repeated ops. A repetition has the mark
    `recompute`, which the repeated op loses. A value with a load is copied from the host instead.
    """
    if not marked and not loads:
        return
    places = {op: i for i, op in enumerate(block.ops)}
    at = {op: places[op] for op in marked}
    at |= {load.copy: places[load.made] for load in loads.values()}
    of_load = {load.copy: v for v, load in loads.items()}
    repetitions: dict[SSAValue, SSAValue] = {}

    def missing(op: Operation) -> set[Operation]:
        """Return the marked ops and loads that an op needs and that are not inserted yet."""
        needed, pending = set[Operation](), [op]
        while pending:
            for v in pending.pop().operands:
                source = loads[v].copy if v in loads else v.owner
                if source in at and v not in repetitions and source not in needed:
                    assert isinstance(source, Operation)
                    needed.add(source)
                    pending.append(source)
        return needed

    for op in after:
        for source in sorted(missing(op), key=at.__getitem__):
            if source in of_load:
                block.insert_op_before(source, op)
                repetitions[of_load[source]] = source.results[0]
                continue
            copy = source.clone()
            copy.attributes[RECOMPUTE] = UnitAttr()
            copy.operands = [repetitions.get(v, v) for v in source.operands]
            for old, new in zip(source.results, copy.results, strict=True):
                new.name_hint = old.name_hint
                repetitions[old] = new
            block.insert_op_before(copy, op)
        for i, v in enumerate(op.operands):
            if v in repetitions:
                op.operands[i] = repetitions[v]
    for op in marked:
        op.attributes.pop(RECOMPUTE, None)
