"""The names of values and blocks, by region: definitions, forward uses, and lost definitions.

A definition is lost if its op has an error and was dropped. Its uses are not reported, and the ops
that use it are `incomplete`.
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
"""The maximum depth of nested regions, within Python's recursion limit."""

MAX_COUNT_DIGITS = 6
"""The maximum number of digits in a number of results."""


class LostError(Exception):
    """The definition of a value was dropped, so its type is unknown."""


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
        """Whether an operand since the last reset has no definition, or a wrong type."""

    # ---- values ----
    def operand(self, t: Token, type: Attribute | None) -> SSAValue:
        """Return the value of a name, or a placeholder if its definition follows or is lost. Where
        `type` is None, the definition must precede.

        Raises:
            MisfitError: the op that defines the name has fewer results; or there is neither a type
                nor a preceding definition.
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
        results, defined = entry
        i = int(index[:MAX_COUNT_DIGITS]) if index else 0
        if i >= len(results):
            raise MisfitError(
                f"expected one of the {len(results)} results of {name}, got {t.value}", t
            )
        value = results[i]
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
            message = f"expected a value that is defined before, got {t.value}"
            use = "; define it first, or write the types of the operands"
            raise MisfitError(message + (hint or use), t)
        if (forward := scope.forward.get(t.value)) is None:
            scope.forward[t.value] = forward = ForwardDeclaredValue(type), t
        elif forward[0].type != type:
            self.log.report_at(t, f"expected {t.value} of type {forward[0].type}, as used "
                               f"before, got {type}")  # fmt: skip
            return self._lost(type)
        return forward[0]

    def define(self, t: Token, values: Sequence[SSAValue]) -> None:
        """Define a name, and resolve its preceding uses."""
        name, scope = t.value, self.scope
        outer: RegionScope | None = scope
        while outer is not None:
            if (first := outer.values.get(name)) is not None:
                line = self.log.source.line_column(first[1].start)[0]
                self.log.report_at(t, f"expected a new name, got {name}", f"first on line {line}")
                return
            outer = None if outer.isolated else outer.parent
        scope.values[name] = values, t
        if (definitions := self.log.source.definitions) is not None:
            definitions[t.start] = values
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
                if (forward := self.scope.forward.pop(key, None)) is None:
                    continue
                placeholder, use = forward
                if placeholder.type != v.type:
                    self.log.report_at(use, f"expected {key} of type {v.type}, as defined later, "
                                       f"got {placeholder.type}")  # fmt: skip
                    self._incomplete(placeholder)
                else:
                    placeholder.replace_all_uses_with(v)

    def lose(self, names: Iterable[str]) -> None:
        """Mark names as lost: their definition was dropped, and uses are not reported."""
        for name in names:
            self.scope.values.setdefault(name, None)
            for key in [k for k in self.scope.forward if k.partition("#")[0] == name]:
                self._incomplete(self.scope.forward.pop(key)[0])

    def _incomplete(self, used: SSAValue | Block) -> None:
        """Mark the ops that use a value or block as incomplete."""
        self.log.incomplete.ops |= {u.operation for u in used.uses}

    # ---- blocks ----
    def successor(self, t: Token) -> Block:
        """Return the block of a name; its label may follow."""
        scope = self.scope
        if t.value in scope.blocks:
            return scope.blocks[t.value][0]
        if t.value not in scope.pending:
            scope.pending[t.value] = _new_block(t), t
        return scope.pending[t.value][0]

    def define_block(self, t: Token) -> Block:
        """Return the block of a label."""
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
        """Add arguments to a block, and define their names; an argument without a type is lost."""
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
        """Begin the scope of a region at its `{`. In a lenient scope, unknown names are not
        reported."""
        self.scope = RegionScope(self.scope, t, isolated, lenient)
        if self.scope.depth > MAX_NESTING:
            self.log.report_at(t, f"expected at most {MAX_NESTING} nested regions, got more")
            raise StopError

    def close(self) -> RegionScope:
        """End the current scope, and return it. Unresolved uses pass to the enclosing scope; they
        are errors if the scope is isolated or has none."""
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
