"""Redistributions of arguments to the layout in which they are used: `uses` in plans.

   %w_1 = dist.redistribute %w {recompute} : ... [{dp}, {tp}] -> ... [{}, {tp}]
<- "w" : [{dp}, {tp}], uses [{}, {tp}], recompute
"""

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue

from shardir.dialects.dist import RedistributeOp
from shardir.dialects.nn import ConvertOp
from shardir.rewriting.parts import is_cut, parts
from shardir.syntax.printer import value_names


def redistribution_of(v: SSAValue) -> RedistributeOp | None:
    """Return the op that redistributes a value, directly or after a conversion, if it is the only
    user."""
    users = [use.operation for use in v.uses]
    match users:
        case [RedistributeOp() as op]:
            return op
        case [ConvertOp() as op]:
            return redistribution_of(op.out)
    return None


def names_in_plans(block: Block) -> dict[SSAValue, str]:
    """Return the names of arguments and values in plans: the names of the printed text without the
    redistributions that `uses` stands for, so that applying a plan does not change names."""
    skipped = set[Operation]()
    for v in block.args:
        if isinstance(v.type, TensorType):
            values = parts(v) if is_cut(v) else [v]
            skipped |= {op for u in (v, *values) if (op := redistribution_of(u)) is not None}
    return value_names(block, skipped)
