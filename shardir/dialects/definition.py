"""Definitions of ops whose assembly format is parsed where it is first used.

xDSL parses the formats of all ops when their classes are defined: a tenth of the time in which a
small program is compiled. A program has few of them.
"""

from functools import cache
from typing import TypeVar

from xdsl.irdl import IRDLOperation, OpDef
from xdsl.irdl.declarative_assembly_format import FormatProgram
from xdsl.irdl.operations import get_accessors_from_op_def
from xdsl.parser import Parser
from xdsl.printer import Printer

Op = TypeVar("Op", bound=type[IRDLOperation])


def op_definition(op: Op) -> Op:
    """Define an op by its class, as xDSL's `irdl_op_definition` does."""
    definition = OpDef.from_pyrdl(op)
    text, definition.assembly_format = definition.assembly_format, None
    members = get_accessors_from_op_def(definition, op.verify_)
    definition.assembly_format = text
    if text is not None:
        members |= {"parse": classmethod(_parse), "print": _print}
    for name, member in members.items():
        setattr(op, name, member)
    return op


@cache
def format_of(op: type[IRDLOperation]) -> FormatProgram:
    """Return the parsed assembly format of an op that has one.

    Raises:
        ParseError: it is not a format.
    """
    definition = op.get_irdl_definition()
    assert definition.assembly_format is not None
    return FormatProgram.from_str(definition.assembly_format, definition)


def _parse(op: type[IRDLOperation], parser: Parser) -> IRDLOperation:
    return format_of(op).parse(parser, op)


def _print(self: IRDLOperation, printer: Printer) -> None:
    format_of(type(self)).print(printer, self)
