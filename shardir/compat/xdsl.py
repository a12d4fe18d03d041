"""Private names of xDSL, and names that differ between its versions.

Reading a field of an op or a value in C takes a third of the time of xDSL's property. Fields are
set directly where xDSL's own way searches in vain, or copies the list that it changes.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from operator import attrgetter
from typing import Any

import xdsl.irdl.declarative_assembly_format as fmt
from xdsl.ir import (
    Attribute,
    Block,
    BlockArgument,
    Operation,
    OpResult,
    SSAValue,
    SSAValues,
    Use,
)
from xdsl.ir.core import IRWithName
from xdsl.irdl import IRDLOperation
from xdsl.parser import AttrParser, ParserState
from xdsl.printer import Printer
from xdsl.universe import Universe
from xdsl.utils.arg_spec import _convert_arg_to_type as converted_argument
from xdsl.utils.exceptions import ParseError
from xdsl.utils.lexer import Input, Span
from xdsl.utils.mlir_lexer import MLIRLexer, MLIRToken

__all__ = ["converted_argument"]


def universe_of(
    dialects: dict[str, Any], passes: dict[str, Any], targets: dict[str, Any],
    frontends: dict[str, Any],
) -> Universe:  # fmt: skip
    """Return a universe; those of xDSL before 0.75 have no frontends."""
    given: dict[str, Any] = {
        "all_dialects": dialects, "all_passes": passes, "all_targets": targets,
    }  # fmt: skip
    if "all_frontends" in signature(Universe.__init__).parameters:
        given["all_frontends"] = frontends
    return Universe(**given)


FIELDS = (
    (SSAValue, "type", "_type"),
    (OpResult, "owner", "op"),
    (BlockArgument, "owner", "block"),
    (Use, "operation", "_operation"),
    (Use, "index", "_index"),
    (Operation, "next_op", "_next_op"),
    (Operation, "prev_op", "_prev_op"),
)
"""Properties that only read a field: (class, property, field)."""

OPERANDS = "_operands"
"""The field of an op with its operands; the property makes a view of it."""

type_of: Callable[[SSAValue], Any] = attrgetter("_type")
name_of: Callable[[SSAValue], str | None] = attrgetter("_name")
operands_of: Callable[[Operation], SSAValues] = attrgetter(OPERANDS)
successors_of: Callable[[Operation], Sequence[Block]] = attrgetter("_successors")
next_of: Callable[[Operation], Operation | None] = attrgetter("_next_op")


# ---- operations and values ----


def set_type(value: SSAValue, type: Attribute) -> None:
    """Set the type of a value in place: a new op would take twenty times as long."""
    value._type = type


def set_name(value: IRWithName, name: str | None) -> None:
    """Set the exact name of a value: xDSL drops a trailing `_1`."""
    value._name = name


def give_operands(op: Operation, operands: Iterable[SSAValue]) -> None:
    """Set the operands of a new op, which has no old ones to detach."""
    op._operands = SSAValues(operands)
    op._operand_uses = tuple([Use(op, i) for i in range(len(op._operands))])
    for v, use in zip(op._operands, op._operand_uses, strict=True):
        v.add_use(use)


def add_arguments(block: Block, args: Iterable[BlockArgument]) -> None:
    """Add all arguments to a block at once: xDSL copies the list for each argument."""
    block._args += tuple(args)


ATTACH = "_attach_op"
"""The method of a block that attaches an op."""

# ---- parsers and printers ----

STRING = re.compile(r'"(?:[^"\\\n\v\f]++|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*+"')


class Lexer(MLIRLexer):
    """xDSL's lexer takes exponential time for a string that is not closed, or has an invalid
    escape."""

    def _lex_string_literal(self, start_pos: int) -> MLIRToken:
        if STRING.match(self.input.content, start_pos) is None:
            message = "expected a string with a closing '\"' and valid escapes, got none"
            raise ParseError(Span(start_pos, start_pos + 1, self.input), message)
        return super()._lex_string_literal(start_pos)


def state_at(text: str, offset: int) -> Any:
    """Return the state of a parser at an offset of a text. Raises ParseError."""
    lexer = Lexer(Input(text, ""))
    lexer.pos = offset
    return ParserState(lexer)


def token_of(parser: AttrParser) -> MLIRToken:
    """Return the current token of a parser."""
    return parser._current_token


def resume_from(parser: AttrParser, offset: int) -> None:
    """Continue a parser from an offset of its text."""
    parser._resume_from(offset)


def share_indices(
    d: fmt.OperandsOrResultDirective,
    op: type[IRDLOperation],
    parts: list[Any],
    construct: Any,
    what: str,
    count: int,
) -> None:
    """Set `parts` to the indices of the values of each operand or result of an op, out of `count`
    values. Raises VerifyException."""
    d._set_using_variadic_index(op, parts, construct, what, range(count))


class NamingPrinter(Printer):
    """A printer whose subclasses choose the names of values."""

    @property
    def names_of_values(self) -> dict[SSAValue, str]:
        """The names of the values printed so far."""
        return self._ssa_values

    def new_number(self) -> str:
        """Return the next free number as a name."""
        return self._get_new_valid_name_id()

    def print_results(self, op: Operation) -> None:
        """Print the results of an op, and ` = `."""
        self._print_results(op)


LISTS = (fmt.VariadicVariable, fmt.OperandsOrResultDirective)
"""The directives for any number of values. Their predicate is `is_variadic_like`, from xDSL 0.75 on
`is_comma_separated_list`."""
