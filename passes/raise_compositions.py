"""raise-compositions: ops that compute together what one op computes become this op.

    %m = nn.reduce <max> %x dims <1> keep
    %s = nn.sub %x, %m
    %e = nn.exp %s
    %t = nn.reduce <sum> %e dims <1> keep
    %y = nn.div %e, %t                       ->    %y = nn.softmax %x axis 1

`shardir/rewriting/compositions/table.py` is the table of compositions. Programs of StableHLO are
raised when they are imported, before all passes.

1. Values stay equal up to rounding, also where the maximum of a row, or the sum of exponentials, is
   infinite. Attention to no key by scores of -inf, and the loss of a one-hot label beside a
   probability of 0, are 0 where the ops have NaN. A variance by E[x^2] - E[x]^2 becomes a more
   precise one, so do weights by a saved log-sum-exp, and softmax in 16 bits rounds less.
2. A composition is raised where more ops die than are made. An inner value that other ops read
   stays, with the ops that compute it.
3. A value with a layout or a sharding is no inner value. So nothing is raised after propagation.
4. A second run changes nothing.
"""

from dataclasses import dataclass

from xdsl.ir import Block

from shardir.dialects import nn, train
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.bases import Function, GlobalPass
from shardir.rewriting.compositions.raising import raise_block
from shardir.rewriting.compositions.row_values import keep_dimensions
from shardir.rewriting.compositions.table import RULES
from shardir.rewriting.rewriter import Rewriter

SCALAR_OPS = Elementwise | nn.ReshapeOp


@dataclass(frozen=True)
class RaiseCompositions(GlobalPass):
    """Raises softmax, norms, attention and other compositions to the ops that compute them."""

    name = "raise-compositions"

    def rewrite(self, f: Function) -> None:
        keep_dimensions(f.block)
        raise_block(RULES, f.block)
        while keep_dimensions(f.block):
            raise_block(RULES, f.block)
        rewriter = Rewriter(block=f.block)
        rewriter.erase_unused(None, None)
        mark_update(f.block)


def mark_update(block: Block) -> None:
    """Mark the beginning of the update, if the block has updates and no mark. Arithmetic of scalars
    that is not needed before, such as that of the loss, moves behind the mark, so that the loss can
    be reduced with the gradients."""
    ops = ops_of(block)
    first = next(iter(of_kind(ops, train.Update)), None)
    if first is None or of_kind(ops, train.UpdateOp):
        return
    block.insert_op_before(train.UpdateOp.create(location=first.location), first)
    late = set(ops[ops.index(first) :])
    point = first
    for op in reversed(ops[: ops.index(first)]):
        if (
            isinstance(op, SCALAR_OPS)
            and all(unsharded_type(v).get_shape() == () for v in op.results)
            and all(use.operation in late for v in op.results for use in v.uses)
        ):
            op.detach()
            block.insert_op_before(op, point)
            late.add(op)
            point = op
