"""xDSL's parser with the places of ops in the text, for ops whose syntax is a method of their
class: `shard-opt -f xdsl`. Our own parser reads those with an assembly_format, and generic ones."""

import re

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, UnknownLoc
from xdsl.ir import Operation
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError

from shardir.compat.xdsl import token_of
from shardir.diagnostics import ParseErrors
from shardir.syntax.source import Source

RESULTS = re.compile(r"(?:%[^=]*=\s*)?")


class LocatedParser(Parser):
    """Gives each op without `loc(...)` its place, as our parser does; and the arguments of its
    blocks that of the op."""

    def __init__(self, ctx: Context, source: Source):
        super().__init__(ctx, source.text, source.name)
        self.source = source

    def parse_operation(self) -> Operation:
        m = RESULTS.match(self.source.text, token_of(self).span.start)
        assert m is not None
        op = super().parse_operation()
        if isinstance(op.location, UnknownLoc):
            op.location = self.source.location(m.end())
        else:
            self.source.offsets[op] = m.end()
        for region in op.regions:
            for block in region.blocks:
                for arg in block.args:
                    if isinstance(arg.location, UnknownLoc):
                        arg.location = op.location
        return op


def parse_by_xdsl(ctx: Context, source: Source, *, implicit_module: bool = True) -> ModuleOp:
    """Return the module of a source. Raises ParseErrors with the first error."""
    try:
        return LocatedParser(ctx, source).parse_module(implicit_module)
    except ParseError as e:
        raise ParseErrors([source.at(e.span.start, e.span.end, e.msg)]) from None
