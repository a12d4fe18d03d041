"""Copies of ops with their regions, in time linear in their size.

xDSL's `clone` adds the arguments of a block one by one, and copies those before for each: a
function of 30,000 parameters would take 10 seconds.
"""

from typing import TypeVar

from xdsl.ir import Block, Operation, SSAValue

OpT = TypeVar("OpT", bound=Operation)


def copied(op: OpT) -> OpT:
    """Return a copy of an op and of the ops in it, with their names and locations."""
    values: dict[SSAValue, SSAValue] = {}
    new = _copied(op, values, {})
    for old, copy in zip(op.walk(), new.walk(), strict=True):
        copy.operands = [values.get(v, v) for v in old.operands]
    return new


def _copied(op: OpT, values: dict[SSAValue, SSAValue], blocks: dict[Block, Block]) -> OpT:
    """Return a copy without operands; record the copies of values and blocks."""
    for block in (block for region in op.regions for block in region.blocks):
        blocks[block] = Block(arg_types=block.arg_types)
    new = op.clone_without_regions(values, blocks, clone_operands=False)
    for region, copy in zip(op.regions, new.regions, strict=True):
        for block in region.blocks:
            copy.add_block(blocks[block])
            for old, arg in zip(block.args, blocks[block].args, strict=True):
                arg.name_hint, arg.location, values[old] = old.name_hint, old.location, arg
        for block in region.blocks:
            for inner in block.ops:
                blocks[block].add_op(_copied(inner, values, blocks))
    return new
