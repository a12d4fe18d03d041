"""The body of a function in place of its call."""

from xdsl.dialects.func import ReturnOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.rewriting.rewriter import erase


def inline(call: Operation, body: Block) -> None:
    """Replace an op by the ops of a block with its operands as arguments, and erase it. Ops keep
    their locations, and values their names."""
    block = call.parent
    assert block is not None
    values: dict[SSAValue, SSAValue] = dict(zip(body.args, call.operands, strict=True))
    for op in body.ops:
        if isinstance(op, ReturnOp):
            for out, v in zip(call.results, op.operands, strict=True):
                out.replace_all_uses_with(values[v])
            break
        new = op.clone(values)
        new.location = op.location
        block.insert_op_before(new, call)
    erase(call)
