"""Move redistributions out of loops.

train.microbatches 4                                %w_1 = dist.redistribute %w
%w_1 = dist.redistribute %w                 ->      train.microbatches 4
%y = nn.matmul %x, %w_1                             %y = nn.matmul %x, %w_1
"""

from xdsl.ir import Block, Operation

from shardir.analysis.loops import Loops
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import RedistributeOp
from shardir.dialects.train import CarriedOp
from shardir.rewriting.marks import RECOMPUTE


def hoist_redistributions(block: Block) -> None:
    """Move each redistribution of a value from before a loop out of the loop; except
    redistributions with the mark `recompute` whose uses are all in the loop."""
    ops = ops_of(block)
    loops = Loops(ops)
    for op in ops if loops else ():
        loop = loops.around(op)
        if loop is None or not isinstance(op, RedistributeOp):
            continue
        maker = op.value.owner
        if isinstance(maker, CarriedOp) or (
            isinstance(maker, Operation) and loops.around(maker) is loop
        ):
            continue
        if RECOMPUTE in op.attributes and all(
            loops.around(use.operation) is loop for use in op.out.uses
        ):
            continue
        op.detach()
        block.insert_op_before(op, loop)
        loops.forget(op)
