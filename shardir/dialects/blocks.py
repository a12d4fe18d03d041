"""The ops of a block, and the hashes of ops and values: what a compilation asks for most.

xDSL's own are methods in Python. Its ops and values hash and compare by identity, as those of
`object` do, in C. Its list of a block's ops counts them first, by a second walk.
"""

from xdsl.ir import Block, Operation, SSAValue
from xdsl.irdl import IRDLOperation

for _class in (SSAValue, Operation, IRDLOperation):
    _class.__hash__ = object.__hash__
    _class.__eq__ = object.__eq__


def ops_of(block: Block) -> list[Operation]:
    """Return the ops of a block, in order; the block may change while the list is read."""
    ops, op = list[Operation](), block.first_op
    while op is not None:
        ops.append(op)
        op = op._next_op
    return ops
