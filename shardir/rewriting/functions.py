"""The functions that passes rewrite, and their types."""

from collections.abc import Iterator

from xdsl.dialects.builtin import FunctionType, ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block

from shardir.diagnostics import Failure
from shardir.rewriting.composites import adopt


def bodies(module: ModuleOp) -> Iterator[tuple[FuncOp, Block]]:
    """The functions that have a body. Ops without a definition become custom ops. Control flow
    between blocks is not part of the language."""
    for op in module.body.ops:
        if isinstance(op, FuncOp) and op.body.blocks:
            if len(op.body.blocks) > 1:
                raise Failure([(op, "a function of the sharding passes has one block")])
            adopt(op.body.block)
            yield op, op.body.block


def update_signature(f: FuncOp) -> None:
    """Make the function's type that of its arguments and of what it returns."""
    block = f.body.block
    last = block.last_op
    outs = [v.type for v in last.operands] if isinstance(last, ReturnOp) else []
    f.properties["function_type"] = FunctionType.from_lists([a.type for a in block.args], outs)
