"""The emission of regions: their ops as statements of the function around them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Region, SSAValue

from shardir.backend.torch.emit.variables import Variable
from shardir.rewriting.functions import update_signature

if TYPE_CHECKING:
    from shardir.backend.torch.emit.scope import EmissionScope


def region_text(
    s: "EmissionScope", region: Region, arguments: Sequence[tuple[str, SSAValue]]
) -> tuple[list[str], list[str]]:
    """Return the lines of a region in a loop, and the texts of what it yields.

    Args:
        arguments: of each argument its variable, and the value around the region from which it
            begins, whose number it has if that is folded and the variable is "".
    """
    f = FuncOp("region", ((), ()), region.clone())
    block = f.body.block
    end = block.last_op
    assert end is not None
    block.add_op(ReturnOp(*end.operands))
    end.detach()
    update_signature(f)
    scope = type(s)(s.program, f, s.name, within=s)
    scope.source_line = s.source_line
    for v, (name, around) in zip(block.args, arguments, strict=True):
        if name:
            variable = Variable(name)
            scope.hold(variable, v)
        elif (number := s.number(around)) is not None:
            scope.numbers[v] = number
    for op in scope.ops:
        if isinstance(op, ReturnOp):
            texts = [scope.operand(v) for v in op.operands]
            # Plain text instead of lines of ops: all of them are lines of the op around.
            return [f"{line}" for line in scope.lines], texts
        scope.emit(op)
    raise AssertionError("a region ends with nn.yield")
