"""The assignment of values in a text to operands or results of an op.

%a, %b, %c      for an op with `x` and variadic `others`      x: %a, others: %b, %c

It depends on the op and the number of values only, but xDSL computes it for each op anew.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import xdsl.irdl.declarative_assembly_format as fmt
from xdsl.irdl import IRDLOperation
from xdsl.irdl.operations import VarIRConstruct, get_construct_defs

from shardir.compat.xdsl import share_indices


def share_out(
    d: fmt.OperandsOrResultDirective,
    op: type[IRDLOperation],
    field: list[Any],
    what: str,
    values: Sequence[Any],
) -> None:
    """Assign values to the operands or results of an op, in `field`. Raises VerifyException."""
    for i, part in enumerate(_parts(d, op, what, len(values))):
        field[i] = [values[k] for k in part]


@cache
def _parts(
    d: fmt.OperandsOrResultDirective, op: type[IRDLOperation], what: str, count: int
) -> list[Sequence[int]]:
    """Return the indices of the values of each operand or result, among `count` values. Raises
    VerifyException."""
    is_operand = isinstance(d, fmt.OperandsDirective)
    construct = VarIRConstruct.OPERAND if is_operand else VarIRConstruct.RESULT
    parts: list[Any] = [None] * len(get_construct_defs(op.get_irdl_definition(), construct))
    share_indices(d, op, parts, construct, what, count)
    return parts
