"""The functions that passes rewrite, and their types."""

from collections.abc import Iterator, Sequence

from xdsl.dialects.builtin import FunctionType, ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation

from shardir.diagnostics import Failure
from shardir.dialects.symbols import find_symbol
from shardir.dialects.train import is_rule
from shardir.rewriting.composites import adopt_unknown


def bodies(module: ModuleOp) -> Iterator[tuple[FuncOp, Block]]:
    """Yield the functions that have a body, like `ops_of_bodies`."""
    return ((f, f.body.block) for f, _ in ops_of_bodies(module))


def ops_of_bodies(module: ModuleOp) -> Iterator[tuple[FuncOp, Sequence[Operation]]]:
    """Yield the functions that have a body, each with its ops, except rules of optimizers. Ops
    without a definition become custom ops first.

    Raises:
        Failure: functions have branches, which are not part of the language.
    """
    functions = [
        op
        for op in module.body.ops
        if isinstance(op, FuncOp) and op.body.blocks and not is_rule(op)
    ]
    message = "expected a function of one block, got several; write it without branches"
    if branching := [(f, message) for f in functions if len(f.body.blocks) > 1]:
        raise Failure(branching)
    for f in functions:
        yield f, adopt_unknown(f.body.block)


def update_signature(f: FuncOp) -> None:
    """Update the type of a function to the types of its arguments and returned values."""
    block = f.body.block
    last = block.last_op
    outs = [v.type for v in last.operands] if isinstance(last, ReturnOp) else []
    f.properties["function_type"] = FunctionType.from_lists([a.type for a in block.args], outs)


def is_public(module: ModuleOp, name: str) -> bool:
    """Whether a function is public, unlike the function of a stage."""
    f = find_symbol(module, FuncOp, name)
    visibility = None if f is None else f.sym_visibility
    return visibility is None or visibility.data != "private"
