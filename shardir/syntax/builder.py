"""The reductions of mlir.lark: ops are created, and names resolved, while the text is parsed."""

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr, UnregisteredOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.irdl import IRDLOperation

from shardir.diagnostics import ShardirError, did_you_mean
from shardir.grammar.machine import Token
from shardir.syntax.formats import MisfitError, OpFormat, OpFormats, OpParts
from shardir.syntax.functions import FunctionReductions
from shardir.syntax.leaves import Leaves
from shardir.syntax.names import MAX_COUNT_DIGITS, LostError


class ModuleBuilder(FunctionReductions):
    """The reductions of mlir.lark; `c` is the list of a rule's children. An op with an error is
    None."""

    def __init__(self, ctx: Context, leaves: Leaves):
        super().__init__(ctx, leaves)
        self.formats = OpFormats({}, self)
        """The formats of ops with an assembly_format, by name."""
        self.known: list[str] = []
        """The names of our ops with a syntax of their own."""
        self.read_region: Callable[[str, int], tuple[Region, int]]
        """Reads a region from an offset of a text; returns it and its end."""

    # ---- operations ----
    def op(self, c: list[Any]) -> Operation | None:
        results, op, loc = c
        bad, self.bad = self.bad, False
        if op is None or bad:
            self._drop(results)
            if op is not None:
                self._lose_symbol(op)
            return None
        if loc is not None:
            self.source.offsets[op] = self.source_pos(op)
            op.location = loc
        if results is not None:
            have = op.results
            i = sum(n for _, n in results)
            if i != len(have):
                self.log.report_at(
                    results[0][0], f"{op.name} has {len(have)} results, but {i} are named"
                )
                self._drop(results)
                return None
            i = 0
            for t, n in results:
                self.names.define(t, have[i : i + n] if n != 1 else (have[i],))
                i += n
        return op

    def source_pos(self, op: Operation) -> int:
        loc: Any = op.location
        return self.source.starts[loc.line.data - 1] + loc.column.data - 1

    def _drop(self, results: list[tuple[Token, int]] | None) -> None:
        """Mark the results of an op with an error as lost."""
        self.names.scope.lost = True
        if results is not None:
            self.names.lose(t.value for t, _ in results)

    def _lose_symbol(self, op: Operation) -> None:
        name = op.get_attr_or_prop("sym_name")
        if isinstance(name, StringAttr):
            self.log.incomplete.symbols.add(name.data)

    def recovered(self, c: list[Any]) -> None:
        """The body of an op whose head has an error; it is parsed for the body's errors only."""
        self.bad = False
        self.names.scope.lost = True

    def result(self, c: list[Any]) -> tuple[Token, int]:
        t, n = c
        if "#" in t.value:
            self.log.report_at(
                t, f"expected a name of results, got {t.value}; write {t.value.split('#')[0]}:N"
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
            self.log.report_at(
                name, f"expected {len(types)} operands, one for each type, got {len(operands)}"
            )
            return None
        if issubclass(op_type, IRDLOperation) and attrs:
            known = op_type.get_irdl_definition().properties
            properties = dict(properties)
            for k in [k for k in attrs if k in known and k not in properties]:
                properties[k] = attrs.pop(k)
        return self.finish(name, lambda: op_type.create(
            operands=[self.names.operand(t, ty) for t, ty in zip(operands, types, strict=True)],
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
        parts = OpParts(f)
        for i, put in enumerate(f.setters, 1):
            put(parts, c[i])
        if self.bad:
            return None
        if parts.untyped:
            f.complete(parts, self)
        types, results = f.types(parts)
        operands: list[SSAValue] = []
        operand_tokens: list[Sequence[Any]] = [tokens or () for tokens in parts.operands]
        for tokens, kinds in zip(operand_tokens, types, strict=True):
            if len(tokens) != len(kinds):
                raise MisfitError(
                    f"expected {len(kinds)} operands, one for each type, got {len(tokens)}"
                )
            operands += [self.names.operand(t, k) for t, k in zip(tokens, kinds, strict=True)]
        flat = [t for ts in results for t in ts]
        return f.make(parts, operands, flat, self.source.location(name.start))

    def finish(self, name: Token, make: Callable[[], Operation | None]) -> Operation | None:
        self.names.uses_lost = False
        try:
            op = make()
        except LostError:
            return None
        except MisfitError as e:
            self.log.report_at(e.at or name, str(e))
            return None
        except (ShardirError, ValueError) as e:
            self.log.report_at(name, str(e).split("\n")[0])
            return None
        if self.names.uses_lost and op is not None:
            self.log.incomplete.ops.add(op)
        return op

    def other(self, c: list[Any]) -> Operation | None:
        return c[0]

    def pretty(self, c: list[Any]) -> Operation | None:
        return c[0]

    def unregistered(self, t: Token, word: str) -> None:
        self.log.report_at(t, self.unregistered_text(word))

    def unregistered_text(self, word: str) -> str:
        dialect, dot, _ = word.partition(".")
        known = self.known
        if dot and (op := self.ctx.get_optional_op(word)) and not issubclass(op, UnregisteredOp):
            return f'expected "{word}"(...), the only form of this operation, got {word}'
        if dialect in self.ctx.registered_dialect_names:
            known = [*known, *(op.name for op in self.ctx.get_dialect(dialect).operations)]
        hint = did_you_mean(word, known)
        if not hint and dot:
            dialects = sorted({name.split(".")[0] for name in known})
            if dialect not in dialects:
                near = did_you_mean(dialect, dialects)
                return f"expected an operation of a registered dialect, got {word}{near}"
        return f"expected a registered operation, got {word}{hint}"

    def children(self, c: list[Any]) -> list[Any]:
        return c

    results = operands = types = block_args = params = func_result_list = children
    visibility = children

    def arrow_types(self, c: list[Any]) -> list[Any]:
        return c

    def arrow_list(self, c: list[Any]) -> list[Any]:
        """Return the types of results in parentheses."""
        return c[0] or []

    def no_types(self, c: list[Any]) -> None:
        """Types that are omitted in the text."""

    def then_part(self, c: list[Any]) -> tuple[bool, Any]:
        """Return the first alternative of an optional group."""
        return True, c[0]

    def else_part(self, c: list[Any]) -> tuple[bool, Any]:
        return False, c[0]

    def successors(self, c: list[Token]) -> list[Block]:
        return [self.names.successor(t) for t in c]

    def regions(self, c: list[Any]) -> list[Region]:
        return c

    # ---- regions ----
    def open(self, c: list[Token]) -> Block | None:
        """`{`: a mid-rule action that opens the scope of a region before its ops are made."""
        arguments, self.arguments = self.arguments, None
        isolated, self.isolated = self.isolated, False
        lenient, self.lenient = self.lenient, False
        self.names.open(c[0], isolated=isolated, lenient=lenient)
        if arguments is None:
            return None
        block = Block()
        self.names.define_arguments(block, arguments)
        return block

    def region(self, c: list[Any]) -> Region:
        scope = self.names.close()
        entry, *body = c
        first = next((i for i, x in enumerate(body) if isinstance(x, Block)), len(body))
        blocks = body[first:]
        ops = [x for x in body[:first] if x is not None]
        if entry is not None and not (ops or entry.args) and blocks and not scope.lost:
            entry = None  # the first block has a label
        if ops or entry is not None or (scope.lost and not blocks):
            block = entry or Block()
            block.add_ops(ops)
            blocks.insert(0, block)
        if scope.lost:
            self.log.incomplete.blocks |= set(blocks)
        return Region(blocks)

    def block(self, c: list[Any]) -> Block:
        block, *ops = c
        block.add_ops([x for x in ops if x is not None])
        return block

    def label(self, c: list[Any]) -> Block:
        t, args = c
        block = self.names.define_block(t)
        self.names.define_arguments(block, args or [])
        self.bad = False
        return block

    def block_arg(self, c: list[Any]) -> tuple[Token, Attribute | None, Any]:
        self.bad = False
        return c[0], c[1], c[2]

    # ---- the module ----
    def alias_def(self, c: list[Any]) -> None:
        if (e := self.leaves.aliases.errors.pop(c[0].value, None)) is not None:
            self.log.report(e.start, e.end, e.message)
        self.bad = False

    def module(self, c: list[Any]) -> ModuleOp:
        scope = self.names.close()
        ops = [x for x in c if isinstance(x, Operation)]
        if len(ops) == 1 and isinstance(ops[0], ModuleOp) and not scope.lost:
            return ops[0]
        module = ModuleOp(ops)
        if scope.lost:
            self.log.incomplete.blocks.add(module.body.block)
        return module
