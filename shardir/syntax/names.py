"""The names of values and blocks, by region: definitions, uses before them, and lost definitions.

A lost definition is one whose op has an error and was dropped. Its uses are no errors of their own,
and the ops that use it are `incomplete`.
"""

from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import LocationAttr
from xdsl.ir import Attribute, Block, BlockArgument, SSAValue
from xdsl.parser.core import ForwardDeclaredValue

from shardir.compat.xdsl import add_arguments, set_name
from shardir.diagnostics import did_you_mean
from shardir.grammar.machine import Token
from shardir.syntax.errors import ErrorLog, StopError
from shardir.syntax.formats import MisfitError

MAX_NESTING = 100
"""The depth of nested regions; more would exceed Python's recursion limit."""

MAX_COUNT_DIGITS = 6
"""The digits that are read of a number of results."""


class LostError(Exception):
    """The definition of a value was dropped, so that its type is not known."""


class RegionScope:
    """The names of one region. Lookups continue in the enclosing region, unless it is isolated."""

    __slots__ = (
        "blocks", "depth", "forward", "isolated", "lenient", "lost", "opened", "parent", "pending",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        parent: "RegionScope | None" = None,
        opened: Token | None = None,
        isolated: bool = False,
        lenient: bool = False,
    ):
        self.parent, self.opened, self.isolated = parent, opened, isolated
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.lenient = lenient or (parent is not None and parent.lenient and not isolated)
        self.values: dict[str, tuple[Sequence[SSAValue], Token] | None] = {}
        self.blocks: dict[str, tuple[Block, Token]] = {}
        self.pending: dict[str, tuple[Block, Token]] = {}
        self.forward: dict[str, tuple[ForwardDeclaredValue[Attribute], Token]] = {}
        self.lost = False


class ScopedNames:
    """The names that are visible at the current position of a text."""

    def __init__(self, log: ErrorLog):
        self.log = log
        self.scope = RegionScope()
        self.uses_lost = False
        """Whether an operand since the last reset has no definition, or one of another type."""

    # ---- values ----
    def operand(self, t: Token, type: Attribute | None) -> SSAValue:
        """Return the value of a name; a placeholder where its definition is to come, or is lost.
        Without a type there is none: the type is that of the definition.

        Raises:
            MisfitError: the op that defines the name has fewer results; there is neither a type
                nor a definition before.
            LostError: there is no type, and the definition is lost.
        """
        name, _, index = t.value.partition("#")
        scope = self.scope
        while name not in scope.values:
            if scope.isolated or scope.parent is None:
                return self._forward(t, type)
            scope = scope.parent
        entry = scope.values[name]
        if entry is None:
            return self._lost(type)
        found, defined = entry
        i = int(index[:MAX_COUNT_DIGITS]) if index else 0
        if i >= len(found):
            raise MisfitError(
                f"expected one of the {len(found)} results of {name}, got {t.value}", t
            )
        value = found[i]
        if value.type is not type and type is not None and value.type != type:
            line = self.log.source.line_column(defined.start)[0]
            self.log.report_at(
                t, f"expected {t.value} of type {value.type}, got {type}",
                f"{name} is defined on line {line}",
            )  # fmt: skip
            return self._lost(type)
        return value

    def _lost(self, type: Attribute | None) -> SSAValue:
        if type is None:
            raise LostError
        self.uses_lost = True
        return ForwardDeclaredValue(type)

    def _forward(self, t: Token, type: Attribute | None) -> SSAValue:
        scope = self.scope
        if scope.lenient:
            return self._lost(type)
        if type is None:
            known = [n for n, v in scope.values.items() if v is not None]
            hint = did_you_mean(t.value, known)
            found = f"expected a value that is defined before, got {t.value}"
            use = "; define it first, or write the types of the operands"
            raise MisfitError(found + (hint or use), t)
        if (found := scope.forward.get(t.value)) is None:
            scope.forward[t.value] = found = ForwardDeclaredValue(type), t
        elif found[0].type != type:
            self.log.report_at(t, f"expected {t.value} of type {found[0].type}, as used "
                               f"before, got {type}")  # fmt: skip
            return self._lost(type)
        return found[0]

    def define(self, t: Token, values: Sequence[SSAValue]) -> None:
        """Define a name, whose uses so far get its values."""
        name, scope = t.value, self.scope
        outer: RegionScope | None = scope
        while outer is not None:
            if (first := outer.values.get(name)) is not None:
                line = self.log.source.line_column(first[1].start)[0]
                self.log.report_at(t, f"expected a new name, got {name}", f"first on line {line}")
                return
            outer = None if outer.isolated else outer.parent
        scope.values[name] = values, t
        hint = name[1:]
        if not hint[0].isdigit():
            for v in values:
                set_name(v, hint)
        if scope.forward:
            self._resolve(name, values)

    def _resolve(self, name: str, values: Sequence[SSAValue]) -> None:
        """Replace the placeholders of a name by its values."""
        for i, v in enumerate(values):
            for key in (f"{name}#{i}", *([name] if i == 0 else [])):
                if (found := self.scope.forward.pop(key, None)) is None:
                    continue
                placeholder, use = found
                if placeholder.type != v.type:
                    self.log.report_at(use, f"expected {key} of type {v.type}, as defined later, "
                                       f"got {placeholder.type}")  # fmt: skip
                    self._incomplete(placeholder)
                else:
                    placeholder.replace_all_uses_with(v)

    def lose(self, names: Iterable[str]) -> None:
        """Do not report uses of these names: their definition was dropped."""
        for name in names:
            self.scope.values.setdefault(name, None)
            for key in [k for k in self.scope.forward if k.partition("#")[0] == name]:
                self._incomplete(self.scope.forward.pop(key)[0])

    def _incomplete(self, used: SSAValue | Block) -> None:
        """Note that the ops that use a value or block lack it."""
        self.log.incomplete.ops |= {u.operation for u in used.uses}

    # ---- blocks ----
    def successor(self, t: Token) -> Block:
        """Return the block of a name, which may occur before the block."""
        scope = self.scope
        if t.value in scope.blocks:
            return scope.blocks[t.value][0]
        if t.value not in scope.pending:
            scope.pending[t.value] = _new_block(t), t
        return scope.pending[t.value][0]

    def define_block(self, t: Token) -> Block:
        """Return the block whose label this is."""
        scope = self.scope
        if t.value in scope.blocks:
            self.log.report_at(t, f"expected a new name of a block, got {t.value}")
            return Block()
        block = scope.pending[t.value][0] if t.value in scope.pending else _new_block(t)
        scope.blocks[t.value] = block, t
        return block

    def define_arguments(
        self, block: Block, args: Iterable[tuple[Token, Attribute | None, LocationAttr | None]]
    ) -> None:
        """Add arguments to a block, and define their names; one without a type is lost."""
        added: list[tuple[Token, BlockArgument]] = []
        for t, type, loc in args:
            if type is None:
                self.lose([t.value])
                self.scope.lost = True
                continue
            index = len(block.args) + len(added)
            location = loc or self.log.source.location(t.start)
            added.append((t, BlockArgument(type, block, index, location)))
        add_arguments(block, [v for _, v in added])
        for t, v in added:
            self.define(t, (v,))

    # ---- regions ----
    def open(self, t: Token, isolated: bool, lenient: bool) -> None:
        """Begin the scope of a region at its `{`. Uses of unknown names are no errors in a lenient
        one."""
        self.scope = RegionScope(self.scope, t, isolated, lenient)
        if self.scope.depth > MAX_NESTING:
            self.log.report_at(t, f"expected at most {MAX_NESTING} nested regions, got more")
            raise StopError

    def close(self) -> RegionScope:
        """End the current scope, and return it. The enclosing one gets its unresolved uses; where
        there is none, or the scope is isolated, they are errors."""
        scope = self.scope
        for name, (block, t) in scope.pending.items():
            if name not in scope.blocks:
                self._incomplete(block)
                if not scope.lost:
                    self.log.report_at(t, f"expected a block of this region, got {name}")
        if scope.parent is None or scope.isolated:
            for name, (value, use) in scope.forward.items():
                self._incomplete(value)
                if name not in scope.values:
                    known = [n for n, v in scope.values.items() if v is not None]
                    hint = did_you_mean(name, known)
                    self.log.report_at(use, f"expected a defined value, got {name}{hint}")
        else:
            for name, (value, use) in scope.forward.items():
                first, _ = scope.parent.forward.setdefault(name, (value, use))
                if first is not value:
                    value.replace_all_uses_with(first)
        self.scope = scope.parent or scope
        return scope


def _new_block(t: Token) -> Block:
    block, name = Block(), t.value[1:]
    if Block.is_valid_name(name) and not Block.is_default_block_name(name):
        block.name_hint = name
    return block
