"""`.ir` text -> module, by LALR(1) tables; the IR is built during the reductions.

    module = parse(text, "digits.ir")        # raises ParseErrors with all errors

    mlir.lark     grammar of statements             builder.py, functions.py   reductions
                                                    names.py                   scopes
    leaves.lark   grammar of types and attributes   leaf_reductions.py         reductions
                                                    leaves.py, aliases.py      cache, aliases
    lexer.py      terminals of both
    formats.py    one rule for each assembly_format, cached by op_rules.py
    others.py     ops of installed dialects, methods.py those with a syntax that is a method
    recovery.py   resumption after a syntax error

An error does not stop the parser. A wrong leaf or operand drops its op only; a syntax error skips
to the next line that starts a statement; and the body of an op with an error in its head is still
parsed. Uses of dropped definitions are not reported, and the remaining ops are verified, so that
one run reports all errors.
"""

import threading
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp, UnregisteredAttr, UnregisteredOp
from xdsl.dialects.func import Func
from xdsl.ir import Attribute, Dialect, Operation, TypeAttribute
from xdsl.irdl import IRDLOperation

from shardir.algebra.garbage import no_gc
from shardir.diagnostics import Diagnostic, ParseErrors
from shardir.dialects import DIALECTS
from shardir.dialects.installed import installed
from shardir.grammar.machine import Machine
from shardir.syntax.builder import ModuleBuilder
from shardir.syntax.errors import StopError
from shardir.syntax.formats import HANDWRITTEN, has_format
from shardir.syntax.leaves import Leaves
from shardir.syntax.lexer import TERMINALS, lark_regexes
from shardir.syntax.op_rules import rules_of
from shardir.syntax.others import OtherOps
from shardir.syntax.recovery import Recovery
from shardir.syntax.source import Source
from shardir.syntax.verify import verify_all

HERE = Path(__file__).parent
LEAVES = ("TYPE", "FN_TYPE", "ATTR", "BRACES", "LOC")
SHORT = {"module": "builtin.module", "return": "func.return", "call": "func.call"}


class IRParser:
    """A parser for the ops of given dialects. Construction takes about 0.02 s if its tables and
    rules are cached on disk (grammar/retained.py), else 1 s: reuse it."""

    def __init__(self, dialects: Sequence[Dialect], ctx: Context | None = None):
        self.ctx = ctx or context_of(dialects)
        self.leaves = Leaves(self.ctx)
        self.builder = builder = ModuleBuilder(self.ctx, self.leaves)
        self.recovery = Recovery(builder)
        self.others = OtherOps(builder, self.recovery, self._machine_of)
        self.readers: dict[str, tuple[Machine, dict[str, str]] | None] = {}
        """By dialect the machine of its grammar, and the names of ops there."""
        self.machine, words = main = self._reader(dialects)
        self.readers |= dict.fromkeys((d.name for d in dialects), main)
        builder.known = [name for name in words if name not in SHORT]
        builder.read_region = lambda text, at: self.machine.run_part(
            text, "region", at, self.recovery.recover
        )
        self.lock = threading.Lock()  # the builder holds one text at a time

    def _reader(self, dialects: Sequence[Dialect]) -> tuple[Machine, dict[str, str]]:
        """Return the machine of the grammar of dialects, and its terminal for each name of an
        op."""
        builder = self.builder
        ops = {
            op.name: op for d in dialects for op in d.operations
            if op.name not in HANDWRITTEN and issubclass(op, IRDLOperation) and has_format(op)
        }  # fmt: skip
        rules = rules_of([*ops.values()], builder)
        groups: dict[str, str] = {}
        words: dict[str, str] = dict(HANDWRITTEN)
        for name, rule in rules.of.items():
            words[name] = groups.setdefault(rule, f"OPS{len(groups)}")
        for short, name in SHORT.items():
            if name in words:
                words[short] = words[name]
                if name in ops:
                    ops[short] = ops[name]
        builder.formats.ops |= {n: op for n, op in ops.items() if n in words}
        for name in rules.shared.values():
            setattr(builder, name, builder.children)
        grammar = "\n".join(
            [
                (HERE / "mlir.lark").read_text(),
                lark_regexes(TERMINALS),
                "pretty: builtin_module | func_func | other | unknown"
                + "".join(f" | {t.lower()}" for t in groups.values()),
                *(f"{t.lower()}: {t} {rhs}" for rhs, t in groups.items()),
                *(f"%declare {t}" for t in groups.values()),
                *rules.lines(),
            ]
        )
        for t in groups.values():
            setattr(builder, t.lower(), builder.declared)
        machine = Machine(
            grammar, ["module", "region", "pretty"], builder,
            {k: builder.leaf(k) for k in LEAVES}, {"OP_NAME": words},
            others={"OP_NAME": self.others},
        )  # fmt: skip
        return machine, words

    def _machine_of(self, op: str) -> Machine | None:
        """Return the machine of a dialect's grammar, if an op is in it. The first in a new
        environment takes 0.2 s for its tables."""
        name = op.partition(".")[0]
        if name not in self.readers:
            dialect = self.ctx.get_dialect(name)
            has_grammar = any(map(has_format, dialect.operations))
            self.readers[name] = self._reader([dialect]) if has_grammar else None
        reader = self.readers[name]
        return reader[0] if reader is not None and op in reader[1] else None

    def parse(self, text: str, name: str = "<input>", *, verify: bool = False) -> ModuleOp:
        """Return the module. Raises ParseErrors, with `verify` also for errors of verification."""
        return self.parse_source(Source(text, name), verify=verify)

    def parse_source(self, source: Source, *, verify: bool = False) -> ModuleOp:
        """Return the module of a source; the caller may use the source for later diagnostics."""
        with self.lock:
            return self._parse(source, verify)

    def check(self, source: Source) -> tuple[ModuleOp | None, list[Diagnostic]]:
        """Return the module of a source, without the parts that have errors, and all errors, those
        of verification too, in the order of the text."""
        with self.lock:
            return self._check(source, verify=True)

    def parse_attribute(self, text: str) -> Attribute:
        """Return the attribute of a text. Raises LeafError."""
        with self.lock:
            self.leaves.begin(text)
            return self.leaves.read("ATTR", text, 0, len(text))

    def _parse(self, source: Source, verify: bool) -> ModuleOp:
        module, errors = self._check(source, verify)
        if errors:
            raise ParseErrors(errors)
        assert module is not None
        return module

    def _check(self, source: Source, verify: bool) -> tuple[ModuleOp | None, list[Diagnostic]]:
        builder = self.builder
        builder.begin(source)
        self.recovery.unopened = 0
        module: ModuleOp | None = None
        with no_gc():
            try:
                for start, end, message in self.leaves.aliases.redefined:
                    builder.log.report(start, end, message)
                module = self.machine.run(source.text, "module", recover=self.recovery.recover)
            except StopError:
                pass
            errors, incomplete = builder.log.errors, builder.log.incomplete
            if module is not None and (verify or errors):
                errors = errors + verify_all(module, source, incomplete if errors else None)
        builder.begin(Source(""))
        return module, sorted(errors, key=lambda d: (d.line or 1 << 30, d.column))


class KnownContext(Context):
    """Allows what is not registered only of dialects that are not registered: a name that is
    misspelt has no other meaning."""

    def get_optional_op(
        self, name: str, *, dialect_stack: Sequence[str] = ()
    ) -> type[Operation] | None:
        op = super().get_optional_op(name, dialect_stack=dialect_stack)
        return None if op and issubclass(op, UnregisteredOp) and self._has(name) else op

    def get_optional_attr(self, name: str) -> type[Attribute] | None:
        base = super().get_optional_attr(name)
        return None if base and issubclass(base, UnregisteredAttr) and self._has(name) else base

    def get_optional_type(self, name: str) -> type[TypeAttribute] | None:
        base = super().get_optional_type(name)
        return None if base and issubclass(base, UnregisteredAttr) and self._has(name) else base

    def _has(self, name: str) -> bool:
        """Whether the dialect of a name is registered."""
        return name.partition(".")[0] in self.registered_dialect_names


def context_of(dialects: Iterable[Dialect], *, allow_unregistered: bool = False) -> Context:
    """Return a context with `dialects` loaded, and all installed dialects registered."""
    ctx = KnownContext(allow_unregistered=allow_unregistered)
    loaded = {d.name: d for d in dialects}
    for name, make in installed().tables["dialects"].items():
        if name not in loaded:
            ctx.register_dialect(name, make)
    for d in loaded.values():
        ctx.load_dialect(d)
    return ctx


def default_parser(*, allow_unregistered: bool = False) -> IRParser:
    """Return the parser of shardir's dialects, one per process. Ops of the installed ones are read
    by their own grammars (others.py)."""
    return _parser(allow_unregistered, installed().version)


@cache
def _parser(allow_unregistered: bool, version: int) -> IRParser:
    """Return a parser; `version`: of the registry of dialects."""
    dialects = [Builtin, Func, *(make() for make in DIALECTS.values())]
    return IRParser(dialects, context_of(dialects, allow_unregistered=allow_unregistered))


def parse(text: str, name: str = "<input>", *, verify: bool = False) -> ModuleOp:
    """Return the module of a text. Raises ParseErrors with all errors of the text."""
    return default_parser().parse(text, name, verify=verify)
