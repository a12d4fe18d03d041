"""The base of the reductions of mlir.lark: the state of a text, and the values of leaf tokens."""

from collections.abc import Callable
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import LocationAttr
from xdsl.ir import Attribute, Block, SSAValue

from shardir.grammar.machine import Token
from shardir.syntax.errors import ErrorLog
from shardir.syntax.leaves import Leaves
from shardir.syntax.names import ScopedNames
from shardir.syntax.source import Source
from shardir.syntax.spelling import LeafError, SilentError, text_of

BlockArgs = list[tuple[Token, Attribute | None, LocationAttr | None]]
"""Arguments of a block: name, type (None if it has an error), and location."""


class Reductions:
    """The state of the current text. An error does not stop the parser: the current op is parsed to
    its end, and then dropped."""

    def __init__(self, ctx: Context, leaves: Leaves):
        self.ctx, self.leaves = ctx, leaves
        self.begin(Source(""))

    def begin(self, source: Source) -> None:
        """Start a text."""
        self.source = source
        self.leaves.begin(source.text)
        self.log = ErrorLog(source)
        self.names = ScopedNames(self.log)
        self.arguments: BlockArgs | None = None
        """The arguments of the next region's first block, from the head of its op."""
        self.isolated = False
        """Whether the next region belongs to an op that is isolated from above."""
        self.lenient = False
        """Whether the next region belongs to an op whose head has an error."""
        self.bad = False
        """Whether a leaf of the current statement has an error."""
        self.head_lost = False
        """Whether an argument of the current function's head has an error."""

    def leaf(self, kind: str) -> Callable[[str, int, int], Any]:
        """Return the converter of leaf tokens of a kind to values. It returns None and marks the op
        as bad for a leaf with an error."""
        leaves = self.leaves

        def convert(value: str, start: int, end: int) -> Any:
            if (leaf := leaves.cache.get((kind, value))) is not None:
                return leaf
            return self.guarded(lambda: leaves.read(kind, value, start, end))

        return convert

    def guarded(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make`; return None and mark the op as bad for an error of a
        leaf."""
        try:
            return make()
        except LeafError as e:
            self.bad = True
            self.log.report(e.start, e.end, e.message)
        except SilentError:
            self.bad = True
        return None

    # ---- the interface of formats.py ----
    def body(self, base: type[Attribute], t: Token) -> Any:
        return self.guarded(lambda: self.leaves.body(base, t))

    def typed(self, base: type[Any], type: Attribute, t: Token) -> Any:
        return self.guarded(lambda: self.leaves.typed(base, type, t))

    def array(self, element: Any, t: Token) -> Any:
        return self.guarded(lambda: self.leaves.array(element, t))

    def symbol(self, t: Token) -> Any:
        return self.guarded(lambda: text_of(t)) or ""

    def defined(self, t: Token) -> SSAValue:
        return self.names.operand(t, None)

    def block_named(self, t: Token) -> Block:
        return self.names.successor(t)
