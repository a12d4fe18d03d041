"""Types that the text of an op may omit, since they follow from the definitions of its operands.

    %h = nn.matmul %x, %w : (tensor<8x4xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>
    %h = nn.matmul %x, %w -> tensor<8x16xf32>    # by the definitions of %x and %w
    %h = nn.matmul %x, %w                        # and by the op's own inference
    func.return %h

An assembly format that ends with `:` and types of operands, or of operands and results, has these
short forms without a declaration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import cast

import xdsl.irdl.declarative_assembly_format as fmt
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, Operation
from xdsl.irdl import IRDLOperation

from shardir.dialects.definition import format_of
from shardir.dialects.dist import is_local
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.signatures import SignatureMemo

Omissible = fmt.FunctionalTypeDirective | fmt.TypeDirective
Directives = Sequence[fmt.FormatDirective]

_inferred = SignatureMemo()
"""The result types of each signature."""


def split(directives: Directives) -> tuple[Directives, Omissible | None]:
    """Split directives into those before the optional `:` and types, and the types' directive."""
    *head, last = directives
    if not head or head[-1] != fmt.PunctuationDirective(":"):
        return directives, None
    match last:
        case fmt.FunctionalTypeDirective():
            return head[:-1], last
        case fmt.TypeDirective(fmt.OperandVariable() | fmt.VariadicOperandVariable()):
            return head[:-1], last
        case _:
            return directives, None


@cache
def short_form(op: type[Operation]) -> tuple[fmt.FormatProgram, Omissible] | None:
    """Return the format of an op without optional types, and the types' directive; None without
    optional types."""
    if not issubclass(op, IRDLOperation) or op.get_irdl_definition().assembly_format is None:
        return None
    stmts = format_of(op).stmts
    head, types = split(stmts)
    if types is not None:
        return fmt.FormatProgram(tuple(head)), types
    group = stmts[-1] if stmts else None
    if not isinstance(group, fmt.OptionalGroupDirective):
        return None
    head, types = split((group.then_first, *group.then_elements))
    if types is None:
        return None
    return fmt.FormatProgram((*stmts[:-1], replace(group, then_elements=tuple(head[1:])))), types


def infer_results(
    op: type[Operation], operands: Sequence[Attribute], props: Mapping[str, Attribute]
) -> Sequence[Attribute] | None:
    """Return the result types, without layouts; None if they do not follow from the operands.

    Raises:
        ShardirError: the operands do not fit.
    """
    if not issubclass(op, TensorOp) or not op.INFERRED:
        return None
    if any(not isinstance(t, TensorType) or is_local(t) for t in operands):
        return None
    return _inferred.get_or((op, *operands), props, lambda: op.infer(_unsharded(operands), props))


def _unsharded(types: Sequence[Attribute]) -> list[TensorType]:
    tensors = cast(Sequence[TensorType], types)
    return [TensorType(t.element_type, t.get_shape()) for t in tensors]
