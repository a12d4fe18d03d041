"""What several passes do to functions: adopt unknown ops, set types, erase ops and markers."""

from collections.abc import Iterator

from xdsl.dialects.builtin import (
    DictionaryAttr,
    FloatAttr,
    FunctionType,
    ModuleOp,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects.builder import Builder
from shardir.dialects.composites import adopt
from shardir.dialects.dist import (
    PropagationBarrierOp,
    ShardingGroupOp,
    layout_of,
)
from shardir.syntax.diagnostics import Failure

FOUND = "search"
"""The attribute of a function in which a search says what it found."""


def found_by_search(f: FuncOp) -> dict[str, float]:
    """The numbers that a search said of a function: the seconds of its plan (`objective`), those
    that no plan takes less than (`bound`), and the gap between them; none where there was none."""
    said = f.attributes.get(FOUND)
    numbers = said.data.items() if isinstance(said, DictionaryAttr) else ()
    return {k: x.value.data for k, x in numbers if isinstance(x, FloatAttr)}


def bodies(module: ModuleOp) -> Iterator[tuple[FuncOp, Block]]:
    """The functions that have a body, from now on without ops that nobody described: those are
    custom ones. Control flow between blocks is not part of the language."""
    for op in module.body.ops:
        if isinstance(op, FuncOp) and op.body.blocks:
            if len(op.body.blocks) > 1:
                raise Failure([(op, "a function of the sharding passes has one block")])
            adopt(op.body.block)
            yield op, op.body.block


def settle(op: PropagationBarrierOp | ShardingGroupOp, builder: Builder) -> None:
    """Takes a barrier or a group out, where layouts are decided. A barrier between two layouts
    becomes a redistribution."""
    if isinstance(op, PropagationBarrierOp):
        layout = layout_of(op.out)
        value = op.value if layout is None else builder.redistribute(op.value, layout)
        op.out.replace_all_uses_with(value)
    erase(op)


def settle_all(block: Block, mesh: Mesh | None) -> None:
    """The same of all that there are; without a mesh there are no layouts either."""
    cursor: list[Operation] = []
    builder = Builder(mesh, lambda new: block.insert_op_before(new, cursor[0]))
    for op in list(block.ops):
        if isinstance(op, PropagationBarrierOp | ShardingGroupOp):
            cursor[:] = [op]
            builder.location = op.location
            settle(op, builder)


def set_type(value: SSAValue, type: Attribute) -> None:
    """Another type for a value, in place: building ops anew costs twenty times as much."""
    value._type = type


def erase(op: Operation) -> None:
    """Take an op that nobody uses out of its block, for good."""
    op.detach()
    op.erase()


def update_signature(f: FuncOp) -> None:
    """The function's type from its arguments and what it returns."""
    block = f.body.block
    last = block.last_op
    outs = [v.type for v in last.operands] if isinstance(last, ReturnOp) else []
    f.properties["function_type"] = FunctionType.from_lists([a.type for a in block.args], outs)
