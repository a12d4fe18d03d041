"""Copies of ops with their regions, in time linear in their size.

xDSL's `clone` adds the arguments of a block one by one, and copies all previous arguments each
time: a function of 30,000 parameters would take 10 seconds.
"""

from typing import TypeVar

from xdsl.ir import Block, Operation, SSAValue

from shardir.compat.xdsl import operands_of
from shardir.dialects.blocks import ops_of

OpT = TypeVar("OpT", bound=Operation)


def copied(op: OpT) -> OpT:
    """Return a copy of an op and of the ops in it, with their names and locations."""
    values: dict[SSAValue, SSAValue] = {}
    forward_uses: list[tuple[Operation, Operation]] = []
    new = _copy(op, values, {}, forward_uses)
    for old, copy in forward_uses:
        copy.operands = [values.get(v, v) for v in old.operands]
    return new


def _copy(
    op: OpT,
    values: dict[SSAValue, SSAValue],
    blocks: dict[Block, Block],
    forward_uses: list[tuple[Operation, Operation]],
) -> OpT:
    """Return a copy; record the copies of values and blocks, and pairs of op and copy where the op
    uses values that are not copied yet."""
    for block in (block for region in op.regions for block in region.blocks):
        blocks[block] = Block(arg_types=block.arg_types)
    uses_later = not values.keys() >= {*operands_of(op)}
    new = op.clone_without_regions(values, blocks)
    if uses_later:
        forward_uses.append((op, new))
    for region, copy in zip(op.regions, new.regions, strict=True):
        for block in region.blocks:
            copy.add_block(blocks[block])
            for old, arg in zip(block.args, blocks[block].args, strict=True):
                arg.name_hint, arg.location, values[old] = old.name_hint, old.location, arg
        for block in region.blocks:
            blocks[block].add_ops([_copy(o, values, blocks, forward_uses) for o in ops_of(block)])
    return new
