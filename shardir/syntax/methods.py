"""Ops whose syntax is the method `parse` of their class, or a directive that our grammar lacks.

    %s = scf.for %i = %a to %b step %c iter_args(%x = %y) -> (f32) {     xDSL's parser
      %z = nn.mul %x, %x                                                 ours
    }                                                                    xDSL's parser

xDSL's parser reads such an op from the end of its name. It asks our parser for values, blocks and
aliases, and hands its regions back.
"""

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.context import Context
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.irdl import IRDLOperation
from xdsl.parser import Parser, UnresolvedOperand
from xdsl.utils.mlir_lexer import MLIRTokenKind

from shardir.compat.xdsl import resume_from, state_at, token_of
from shardir.grammar.machine import Token
from shardir.syntax.aliases import Aliases
from shardir.syntax.names import ScopedNames
from shardir.syntax.reductions import BlockArgs


def has_method(op: type[Operation]) -> bool:
    """Whether the class of an op has a method that reads its syntax."""
    inherited = (Operation.parse.__func__, IRDLOperation.parse.__func__)
    return op.parse.__func__ not in inherited


class KnownAliases(dict[str, Attribute]):
    """The aliases of a text, for xDSL's parser; `end` returns an offset after the use."""

    def __init__(self, aliases: Aliases, end: Callable[[], int]):
        super().__init__()
        self.aliases, self.end = aliases, end

    def __contains__(self, name: object) -> bool:
        return True  # so that an unknown one is our error

    def __missing__(self, name: str) -> Attribute:
        start = self.aliases.text.rfind(name, 0, self.end())
        return self.aliases.value(name, Token(name, start, start + len(name)))


class MethodParser(Parser):
    """xDSL's parser, from an offset of a text, with the names and regions of ours.

    Args:
        region: reads a region from an offset, given the arguments of its first block; returns it
            and its end.
    """

    def __init__(
        self,
        ctx: Context,
        text: str,
        at: int,
        names: ScopedNames,
        aliases: Aliases,
        region: Callable[[int, BlockArgs | None], tuple[Region, int]],
    ):
        super(Parser, self).__init__(state_at(text, at), ctx)
        self.names, self.region = names, region
        self.uses_lost = False
        """Whether an operand has no definition, or a wrong type."""
        self.attribute_aliases = KnownAliases(aliases, lambda: self.pos)

    def _value(self, operand: UnresolvedOperand, type: Attribute | None) -> SSAValue:
        text = operand.span.text + (f"#{operand.index}" if operand.index else "")
        names = self.names
        names.uses_lost = False
        value = names.operand(Token(text, operand.span.start, operand.span.end), type)
        self.uses_lost |= names.uses_lost
        return value

    def resolve_operand(self, operand: UnresolvedOperand, type: Attribute) -> Any:
        return self._value(operand, type)

    def parse_optional_operand(self, type: Attribute | None = None) -> Any:
        operand = self.parse_optional_unresolved_operand()
        return None if operand is None else self._value(operand, type)

    def parse_operand(
        self, type: Attribute | str | None = None, *, msg: str = "operand expected"
    ) -> Any:
        operand = self.parse_unresolved_operand(type if isinstance(type, str) else msg)
        return self._value(operand, type if isinstance(type, Attribute) else None)

    def parse_optional_successor(self) -> Block | None:
        token = token_of(self)
        if token.kind != MLIRTokenKind.CARET_IDENT:
            return None
        resume_from(self, token.span.end)
        return self.names.successor(_token(token.span))

    def parse_optional_region(
        self, arguments: Sequence[Parser.Argument] | None = None
    ) -> Region | None:
        if token_of(self).kind != MLIRTokenKind.L_BRACE:
            return None
        args: BlockArgs | None = None
        if arguments is not None:
            args = [(_token(a.name), a.type, a.location) for a in arguments]
        region, end = self.region(self.pos, args)
        resume_from(self, end)
        return region


def _token(span: Any) -> Token:
    return Token(span.text, span.start, span.end)
