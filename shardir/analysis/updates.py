"""The ops that belong to the update of a training step."""

from collections.abc import Callable, Sequence

from xdsl.ir import Operation

from shardir.dialects.blocks import of_kind
from shardir.dialects.dist import CollectiveOp
from shardir.dialects.nn import ConvertOp
from shardir.dialects.train import UpdateOp


def after_update(ops: Sequence[Operation]) -> Callable[[Sequence[Operation]], bool]:
    """Return a predicate of some of a training step's ops: that there are some, all after its mark
    train.update, or casts and collectives whose results only such ops use. fuse-communication fuses
    the collectives of values for these ops first, and the search counts their buckets."""
    first = next((i for i, op in enumerate(ops) if isinstance(op, UpdateOp)), len(ops))
    late = set(ops[first:])
    for op in reversed(of_kind(ops[:first], ConvertOp, CollectiveOp)):
        users = [use.operation for v in op.results for use in v.uses]
        if users and late.issuperset(users):
            late.add(op)
    return lambda users: bool(users) and late.issuperset(users)
