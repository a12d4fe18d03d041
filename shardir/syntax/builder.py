"""The reductions of mlir.lark: ops are created, and names resolved, while the text is parsed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lark import Transformer
from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FunctionType, ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.irdl import IRDLOperation
from xdsl.parser.core import ForwardDeclaredValue

from shardir.diagnostics import Diagnostic, ShardirError, did_you_mean
from shardir.syntax.formats import MisfitError, OpFormat, Parts
from shardir.syntax.leaves import LeafError, Leaves, SilentError, text_of
from shardir.syntax.lexer import Token
from shardir.syntax.source import Source
from shardir.syntax.verify import Incomplete

MAX_ERRORS = 50
"""The number of errors after which parsing stops."""

MAX_NESTING = 100
"""The depth of nested regions; more would exceed Python's recursion limit."""

MAX_COUNT_DIGITS = 6
"""The digits that are read of a number of results."""


class StopError(Exception):
    """Parsing stops: too many errors, or the end of the text."""


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


class ModuleBuilder(Transformer[Any, Any]):
    """The reductions of mlir.lark; `c` is the list of a rule's children."""

    def __init__(self, ctx: Context, leaves: Leaves):
        super().__init__(visit_tokens=False)
        self.ctx, self.leaves = ctx, leaves
        self.formats: dict[str, OpFormat] = {}
        self.known: list[str] = []
        self.begin(Source(""))

    def begin(self, source: Source) -> None:
        self.source = source
        self.leaves.begin(source.text)
        self.errors: list[Diagnostic] = []
        self.incomplete = Incomplete()
        self.scope = RegionScope()
        self.arguments: list[tuple[Token, Attribute | None, Any]] | None = None
        self.head_lost = False
        self.lenient = False
        self.bad = False
        self.tainted = False

    # ---- errors ----
    def report(self, start: int, end: int, message: str, *notes: str) -> None:
        """Report an error. The current op is parsed to its end, and then dropped."""
        found = self.source.at(start, end, message, notes)
        if found in self.errors:
            return
        self.errors.append(found)
        if len(self.errors) == MAX_ERRORS:
            self.errors.append(
                Diagnostic("too many errors; the rest is not shown", self.source.name)
            )
            raise StopError

    def blame(self, t: Token, message: str, *notes: str) -> None:
        self.report(t.start, t.end, message, *notes)

    def leaf(self, kind: str) -> Callable[[str, int, int], Any]:
        """Return the value of a leaf token; None, and a bad op, when it has an error."""
        read = self.leaves.read
        cache_of = self.leaves

        def convert(value: str, start: int, end: int) -> Any:
            if (found := cache_of.cache.get((kind, value))) is not None:
                return found
            return self.guarded(lambda: read(kind, value, start, end))

        return convert

    def guarded(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except LeafError as e:
            self.bad = True
            self.report(e.start, e.end, e.message)
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

    def block_named(self, t: Token) -> Block:
        """Return a successor, which may occur before its block."""
        scope = self.scope
        if t.value in scope.blocks:
            return scope.blocks[t.value][0]
        if t.value not in scope.pending:
            scope.pending[t.value] = self.new_block(t), t
        return scope.pending[t.value][0]

    def new_block(self, t: Token) -> Block:
        block, name = Block(), t.value[1:]
        if Block.is_valid_name(name) and not Block.is_default_block_name(name):
            block.name_hint = name
        return block

    # ---- values ----
    def operand(self, t: Token, type: Attribute) -> SSAValue:
        name, _, index = t.value.partition("#")
        scope = self.scope
        while name not in scope.values:
            if scope.isolated or scope.parent is None:
                return self.forward(t, type)
            scope = scope.parent
        entry = scope.values[name]
        if entry is None:
            self.tainted = True
            return ForwardDeclaredValue(type)
        found, defined = entry
        i = int(index[:MAX_COUNT_DIGITS]) if index else 0
        if i >= len(found):
            raise MisfitError(f"{name} has {len(found)} results, so there is no {t.value}", t)
        value = found[i]
        if value.type is not type and value.type != type:
            line = self.source.line_column(defined.start)[0]
            self.blame(
                t, f"{t.value} has type {value.type}, but is used here with type {type}",
                f"{name} is defined on line {line}",
            )  # fmt: skip
            self.tainted = True
            return ForwardDeclaredValue(type)
        return value

    def forward(self, t: Token, type: Attribute) -> SSAValue:
        scope = self.scope
        if scope.lenient:
            self.tainted = True
            return ForwardDeclaredValue(type)
        if (found := scope.forward.get(t.value)) is None:
            scope.forward[t.value] = found = ForwardDeclaredValue(type), t
        elif found[0].type != type:
            self.blame(t, f"{t.value} is used here with type {type}, "
                       f"but earlier with type {found[0].type}")  # fmt: skip
            self.tainted = True
            return ForwardDeclaredValue(type)
        return found[0]

    def define(self, t: Token, values: Sequence[SSAValue]) -> None:
        name, scope = t.value, self.scope
        outer: RegionScope | None = scope
        while outer is not None:
            if (first := outer.values.get(name)) is not None:
                line = self.source.line_column(first[1].start)[0]
                self.blame(t, f"{name} is already defined", f"first on line {line}")
                return
            outer = None if outer.isolated else outer.parent
        scope.values[name] = values, t
        hint = name[1:]
        if not hint[0].isdigit():
            for v in values:
                v._name = hint  # not the setter: it drops a trailing `_1`
        if scope.forward:
            self.resolve(name, values)

    def resolve(self, name: str, values: Sequence[SSAValue]) -> None:
        for i, v in enumerate(values):
            for key in (f"{name}#{i}", *([name] if i == 0 else [])):
                if (found := self.scope.forward.pop(key, None)) is None:
                    continue
                placeholder, use = found
                if placeholder.type != v.type:
                    self.blame(use, f"{key} is used with type {placeholder.type}, "
                               f"but its definition has type {v.type}")  # fmt: skip
                    self.incomplete.ops |= {u.operation for u in placeholder.uses}
                else:
                    placeholder.replace_all_uses_with(v)

    def poison(self, names: Iterable[str]) -> None:
        """Do not report uses of these names: their definition was dropped."""
        for name in names:
            self.scope.values.setdefault(name, None)
            for key in [k for k in self.scope.forward if k.partition("#")[0] == name]:
                placeholder, _ = self.scope.forward.pop(key)
                self.incomplete.ops |= {u.operation for u in placeholder.uses}

    # ---- operations ----
    def op(self, c: list[Any]) -> Operation | None:
        results, op, loc = c
        bad, self.bad = self.bad, False
        if op is None or bad:
            self.lose(results)
            if op is not None:
                self.lose_symbol(op)
            return None
        if loc is not None:
            self.source.offsets[op] = self.source_pos(op)
            op.location = loc
        if results is not None:
            have = op.results
            i = sum(n for _, n in results)
            if i != len(have):
                self.blame(results[0][0], f"{op.name} has {len(have)} results, but {i} are named")
                self.lose(results)
                return None
            i = 0
            for t, n in results:
                self.define(t, have[i : i + n] if n != 1 else (have[i],))
                i += n
        return op

    def source_pos(self, op: Operation) -> int:
        loc: Any = op.location
        return self.source.starts[loc.line.data - 1] + loc.column.data - 1

    def lose(self, results: list[tuple[Token, int]] | None) -> None:
        self.scope.lost = True
        if results is not None:
            self.poison(t.value for t, _ in results)

    def lose_symbol(self, op: Operation) -> None:
        name = op.get_attr_or_prop("sym_name")
        if isinstance(name, StringAttr):
            self.incomplete.symbols.add(name.data)

    def recovered(self, c: list[Any]) -> None:
        """The body of an op whose head has an error: it was parsed for its own errors only."""
        self.bad = False
        self.scope.lost = True

    def result(self, c: list[Any]) -> tuple[Token, int]:
        t, n = c
        if "#" in t.value:
            self.blame(
                t, f"{t.value} names one of several results; write {t.value.split('#')[0]}:N"
            )
            self.bad = True
        return t, 1 if n is None else int(n.value[:MAX_COUNT_DIGITS])

    def generic(self, c: list[Any]) -> Operation | None:
        name, operands, successors, props, regions, attrs, type = c
        word = name.value[1:-1]
        op_type = self.ctx.get_optional_op(word)
        if op_type is None:
            self.unregistered(name, word)
            return None
        properties = {}
        if props is not None:
            properties = self.guarded(
                lambda: self.leaves.read("ANGLES", props.value, props.start, props.end)
            )
        if type is None or self.bad:
            return None
        operands, types, attrs = operands or (), type.inputs.data, dict(attrs or {})
        if len(operands) != len(types):
            self.blame(name, f"{len(operands)} operands, but {len(types)} operand types")
            return None
        if issubclass(op_type, IRDLOperation) and attrs:
            known = op_type.get_irdl_definition().properties
            properties = dict(properties)
            for k in [k for k in attrs if k in known and k not in properties]:
                properties[k] = attrs.pop(k)
        return self.finish(name, lambda: op_type.create(
            operands=[self.operand(t, ty) for t, ty in zip(operands, types, strict=True)],
            result_types=type.outputs.data, properties=properties, attributes=attrs,
            location=self.source.location(name.start), successors=successors or (),
            regions=regions or (),
        ))  # fmt: skip

    def declared(self, c: list[Any]) -> Operation | None:
        """Return an op in the syntax of its assembly_format."""
        name = c[0]
        f = self.formats[name.value]
        return None if self.bad else self.finish(name, lambda: self.make(f, name, c))

    def make(self, f: OpFormat, name: Token, c: list[Any]) -> Operation | None:
        parts = Parts(f)
        for i, put in enumerate(f.setters, 1):
            put(parts, c[i])
        if self.bad:
            return None
        types, results = f.types(parts)
        operands: list[SSAValue] = []
        given: list[Sequence[Any]] = [tokens or () for tokens in parts.operands]
        for tokens, kinds in zip(given, types, strict=True):
            if len(tokens) != len(kinds):
                raise MisfitError(f"{f.op.name}: {len(tokens)} operands, but {len(kinds)} types")
            operands += [self.operand(t, k) for t, k in zip(tokens, kinds, strict=True)]
        flat = [t for ts in results for t in ts]
        return f.make(parts, operands, flat, self.source.location(name.start))

    def finish(self, name: Token, make: Callable[[], Operation | None]) -> Operation | None:
        self.tainted = False
        try:
            op = make()
        except MisfitError as e:
            self.blame(e.at or name, str(e))
            return None
        except (ShardirError, ValueError) as e:
            self.blame(name, str(e).split("\n")[0])
            return None
        if self.tainted and op is not None:
            self.incomplete.ops.add(op)
        return op

    def pretty(self, c: list[Any]) -> Operation | None:
        return c[0]

    def unregistered(self, t: Token, word: str) -> None:
        self.blame(t, self.unregistered_text(word))

    def unregistered_text(self, word: str) -> str:
        dialect, dot, _ = word.partition(".")
        if dot and self.ctx.get_optional_op(word) is not None:
            return f'{word} is not an op of shardir; use the generic form "{word}"(...)'
        hint = did_you_mean(word, self.known)
        if not hint and dot:
            dialects = sorted({name.split(".")[0] for name in self.known})
            if dialect not in dialects:
                near = did_you_mean(dialect, dialects)
                return f"operation {word} is not registered: there is no dialect {dialect}{near}"
        return f"operation {word} is not registered{hint}"

    def children(self, c: list[Any]) -> list[Any]:
        return c

    results = operands = types = block_args = params = func_result_list = children
    visibility = children

    def successors(self, c: list[Token]) -> list[Block]:
        return [self.block_named(t) for t in c]

    def regions(self, c: list[Any]) -> list[Region]:
        return c

    # ---- regions ----
    def open(self, c: list[Token]) -> Block | None:
        """`{`: a mid-rule action, so that the names of a region exist before its ops are made."""
        params, self.arguments = self.arguments, None
        self.scope = RegionScope(self.scope, c[0], params is not None, self.lenient)
        self.lenient = False
        if self.scope.depth > MAX_NESTING:
            self.blame(c[0], f"regions nest more than {MAX_NESTING} deep")
            raise StopError
        if params is None:
            return None
        block = Block()
        self.define_args(block, params)
        return block

    def define_args(self, block: Block, args: list[tuple[Token, Attribute | None, Any]]) -> None:
        for t, type, loc in args:
            if type is None:
                self.poison([t.value])
                self.scope.lost = True
                continue
            arg = block.insert_arg(type, len(block.args), loc or self.source.location(t.start))
            self.define(t, (arg,))

    def region(self, c: list[Any]) -> Region:
        scope = self.close()
        entry, *rest = c
        first = next((i for i, x in enumerate(rest) if isinstance(x, Block)), len(rest))
        blocks = rest[first:]
        ops = [x for x in rest[:first] if x is not None]
        if ops or entry is not None or (scope.lost and not blocks):
            block = entry or Block()
            block.add_ops(ops)
            blocks.insert(0, block)
        if scope.lost:
            self.incomplete.blocks |= set(blocks)
        return Region(blocks)

    def close(self) -> RegionScope:
        """Ends a scope: what it used and never defined belongs to the next one, or to nobody."""
        scope = self.scope
        for name, (block, t) in scope.pending.items():
            if name not in scope.blocks:
                self.incomplete.ops |= {u.operation for u in block.uses}
                if not scope.lost:
                    self.blame(t, f"{name} is not a block of this region")
        if scope.parent is None or scope.isolated:
            for name, (value, use) in scope.forward.items():
                self.incomplete.ops |= {u.operation for u in value.uses}
                if name not in scope.values:
                    known = [n for n, v in scope.values.items() if v is not None]
                    hint = did_you_mean(name, known)
                    self.blame(use, f"{name} is used, but not defined{hint}")
        else:
            for name, (value, use) in scope.forward.items():
                kept = scope.parent.forward.setdefault(name, (value, use))
                if kept[0] is not value:
                    value.replace_all_uses_with(kept[0])
        self.scope = scope.parent or scope
        return scope

    def block(self, c: list[Any]) -> Block:
        block, *ops = c
        block.add_ops([x for x in ops if x is not None])
        return block

    def label(self, c: list[Any]) -> Block:
        t, args = c
        scope = self.scope
        if t.value in scope.blocks:
            self.blame(t, f"block {t.value} is already defined")
            block = Block()
        else:
            block = scope.pending[t.value][0] if t.value in scope.pending else self.new_block(t)
            scope.blocks[t.value] = block, t
        self.define_args(block, args or [])
        self.bad = False
        return block

    def block_arg(self, c: list[Any]) -> tuple[Token, Attribute | None, Any]:
        self.bad = False
        return c[0], c[1], c[2]

    # ---- syntax that no assembly_format can declare ----
    def builtin_module(self, c: list[Any]) -> Operation | None:
        name, symbol, attrs, region = c
        if not region.blocks:
            region.add_block(Block())
        if self.bad:
            return None
        op = ModuleOp(region, attrs or {}, None if symbol is None else StringAttr(text_of(symbol)))
        op.location = self.source.location(name.start)
        return op

    def param(self, c: list[Any]) -> tuple[Token, Attribute | None, Any, Any]:
        """Return (name, type, location, attributes): a bad type drops the argument only."""
        t, type, attrs, loc = c
        if self.bad:
            self.head_lost = True
        self.bad = False
        return t, type, loc, attrs

    def unnamed(self, c: list[Any]) -> tuple[None, Attribute | None, Any, Any]:
        type, attrs, loc = c
        return None, type, loc, attrs

    def func_result(self, c: list[Any]) -> list[tuple[Attribute, None]]:
        return [(c[0], None)]

    def listed_result(self, c: list[Any]) -> tuple[Attribute, Any]:
        return c[0], c[1]

    def func_results(self, c: list[Any]) -> list[Any]:
        return c[0] or []

    def func_head(self, c: list[Any]) -> tuple[Any, ...]:
        name, visibility, symbol, params, results, attrs = c
        params = params or []
        named = [p for p in params if p[0] is not None]
        if named and len(named) != len(params):
            self.blame(symbol, "expected all arguments to be named, or none")
            self.bad = True
        bad, self.bad = self.bad or self.head_lost, False
        self.head_lost = False
        if bad:
            self.incomplete.symbols.add(self.symbol(symbol))
        self.arguments = [(t, type, loc) for t, type, loc, _ in named]
        return bad, name, visibility, symbol, params, results or [], attrs or {}

    def func_func(self, c: list[Any]) -> Operation | None:
        (bad, name, visibility, symbol, params, results, attrs), region = c
        self.arguments = None
        if bad or self.bad:
            return None
        type = FunctionType.from_lists([p[1] for p in params], [t for t, _ in results])
        op = FuncOp(
            self.symbol(symbol), type, region or Region(),
            None if visibility is None else visibility[0].value,
            arg_attrs=dictionaries([p[3] for p in params]) if region is not None else None,
            res_attrs=dictionaries([a for _, a in results]),
        )  # fmt: skip
        if reserved := sorted(attrs.keys() & {"sym_name", "function_type", "sym_visibility"}):
            self.blame(
                name, f"attribute {reserved[0]} has its own place in the syntax of func.func"
            )
            return None
        op.attributes.update(attrs)
        op.location = self.source.location(name.start)
        return op

    # ---- the module ----
    def alias_def(self, c: list[Any]) -> None:
        if (e := self.leaves.unsaid.pop(c[0].value, None)) is not None:
            self.report(e.start, e.end, e.message)
        self.bad = False

    def module(self, c: list[Any]) -> ModuleOp:
        scope = self.close()
        ops = [x for x in c if isinstance(x, Operation)]
        if len(ops) == 1 and isinstance(ops[0], ModuleOp) and not scope.lost:
            return ops[0]
        found = ModuleOp(ops)
        if scope.lost:
            self.incomplete.blocks.add(found.body.block)
        return found


def dictionaries(entries: Sequence[dict[str, Attribute] | None]) -> ArrayAttr[Any] | None:
    if not any(entries):
        return None
    return ArrayAttr([DictionaryAttr(e or {}) for e in entries])
