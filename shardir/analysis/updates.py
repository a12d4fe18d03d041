"""The ops that belong to the update of a training step."""

from collections.abc import Callable, Sequence
from itertools import dropwhile

from xdsl.ir import Block, Operation

from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import CollectiveOp
from shardir.dialects.nn import ConvertOp
from shardir.dialects.train import UpdateOp


def after_update(block: Block) -> Callable[[Sequence[Operation]], bool]:
    """Return a predicate of ops: that there are some, all after the mark train.update of a training
    step, or casts and collectives whose results only such ops use. fuse-communication fuses the
    collectives of values for these ops first, and the search counts their buckets."""
    every = ops_of(block)
    ops = set(dropwhile(lambda op: not isinstance(op, UpdateOp), every))
    for op in reversed(every):
        if op not in ops and isinstance(op, ConvertOp | CollectiveOp):
            users = [use.operation for v in op.results for use in v.uses]
            if users and ops.issuperset(users):
                ops.add(op)
    return lambda users: bool(users) and ops.issuperset(users)
