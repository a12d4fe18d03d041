"""The positions at which the ops of a block make values and use them. By these it is known which
redistributions may be fused (buckets.py)."""

from collections.abc import Sequence

from xdsl.ir import Block, Operation, SSAValue

from shardir.analysis.updates import after_update, update_position
from shardir.dialects.nn import ConvertOp
from shardir.search.graph.buckets import Positions


class UsePositions:
    """The positions of the ops of a block.

    Attributes:
        at: of each op.
        last: of the last one.
        late: whether all of some ops are of the update, or are moved there (analysis/updates.py).
        before_update: of the op before the update, or before the return, if there is none.
    """

    def __init__(self, block: Block):
        self.at = {op: i for i, op in enumerate(block.ops)}
        self.last, self.late = len(self.at) - 1, after_update([*self.at])
        self.before_update = update_position([*self.at]) - 1

    def made(self, v: SSAValue) -> int:
        """Return the position of the op that makes a value; -1 of an argument."""
        return -1 if isinstance(v.owner, Block) else self.at[v.owner]

    def first_use(self, users: Sequence[Operation]) -> int:
        """Return the position of the first op that needs a value which is redistributed for some
        ops: fuse-communication moves casts to their own first uses."""
        at = [
            self.first_use([use.operation for use in op.out.uses])
            if isinstance(op, ConvertOp)
            else self.at[op]
            for op in users
        ]
        return min(at, default=len(self.at))

    def between(self, made: int, here: int, last: int) -> Positions:
        """Return the positions of a redistribution of a value that is there after `made`, for an op
        right after `here`, which needs the result after `last`."""
        is_for_update = made <= self.before_update <= here
        return Positions(made, self.before_update if is_for_update else here, here, last)
