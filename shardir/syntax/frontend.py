"""The parser of `.ir` for the tools of xDSL, which choose it by the ending of a file."""

from dataclasses import dataclass
from typing import IO, ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.frontend import Frontend

from shardir.syntax.parser import default_parser
from shardir.syntax.source import Source


@dataclass(frozen=True)
class IrFrontend(Frontend):
    """Reads a program of shardir."""

    name: ClassVar[str] = "ir"

    def parse(self, ctx: Context, input: IO[bytes], input_name: str) -> ModuleOp:
        source = Source(input.read().decode(), input_name)
        return default_parser(allow_unregistered=ctx.allow_unregistered).parse_source(source)
