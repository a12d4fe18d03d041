"""The end of a function, which waits for values: the update of a training step, or the return."""

from collections.abc import Callable, Sequence

from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation

from shardir.dialects.blocks import of_kind
from shardir.dialects.dist import CollectiveOp
from shardir.dialects.nn import ConvertOp
from shardir.dialects.train import UpdateOp


def update_position(ops: Sequence[Operation]) -> int:
    """Return the position of the mark train.update among a function's ops; without one, of the
    return, for which the last collectives of a forward function run."""
    ends = (i for i, op in enumerate(ops) if isinstance(op, UpdateOp | ReturnOp))
    return next(ends, len(ops))


def after_update(ops: Sequence[Operation]) -> Callable[[Sequence[Operation]], bool]:
    """Return a predicate that tells whether a nonempty list of users runs only after the update:
    ops from the update on, and casts and collectives whose results only such ops use.
    fuse-communication fuses the collectives of such values first, and the search counts their
    buckets."""
    first = update_position(ops)
    late_ops = set(ops[first:])
    for op in reversed(of_kind(ops[:first], ConvertOp, CollectiveOp)):
        users = [use.operation for v in op.results for use in v.uses]
        if users and late_ops.issuperset(users):
            late_ops.add(op)
    return lambda users: bool(users) and late_ops.issuperset(users)
