"""The functions that passes rewrite, and their types."""

from collections.abc import Iterator

from xdsl.dialects.builtin import FunctionType, ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block

from shardir.diagnostics import Failure
from shardir.rewriting.composites import adopt


def bodies(module: ModuleOp) -> Iterator[tuple[FuncOp, Block]]:
    """Yield the functions that have a body, after replacing ops without a definition by custom ops.
    Control flow between blocks is not part of the language."""
    for op in module.body.ops:
        if isinstance(op, FuncOp) and op.body.blocks:
            if len(op.body.blocks) > 1:
                message = "expected a function of one block, got several; write it without branches"
                raise Failure([(op, message)])
            adopt(op.body.block)
            yield op, op.body.block


def update_signature(f: FuncOp) -> None:
    """Update the type of a function to those of its arguments and returned values."""
    block = f.body.block
    last = block.last_op
    outs = [v.type for v in last.operands] if isinstance(last, ReturnOp) else []
    f.properties["function_type"] = FunctionType.from_lists([a.type for a in block.args], outs)
