"""Leaf text (a type, an attribute, a dictionary, a location) -> Attribute, once per spelling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import DenseArrayBase
from xdsl.ir import Attribute, TypeAttribute

from shardir.diagnostics import one_of
from shardir.dialects.signatures import Memo
from shardir.dialects.text import TextAttr
from shardir.grammar.machine import Machine, Token, UnexpectedError
from shardir.syntax.aliases import Aliases
from shardir.syntax.leaf_reductions import LeafReductions, number
from shardir.syntax.lexer import (
    ANGLES,
    DENSE,
    STRING,
    SYMBOL,
    lark_regexes,
)
from shardir.syntax.spelling import LeafError, located

HERE = Path(__file__).parent
START = {
    "ATTR": "attr", "TYPE": "type", "FN_TYPE": "fn_type", "BRACES": "entries", "LOC": "loc",
    "ANGLES": "props",
}  # fmt: skip
"""The rule of leaves.lark for each kind of leaf token."""

DIALECT = r"[A-Za-z_$][\w$-]*"
BY_XDSL = "affine_map|affine_set|array|strided|opaque"
"""Builtin attributes that xDSL's parser reads."""

TERMINALS = lark_regexes(
    {
        "STRING": STRING,
        "SYMBOL": SYMBOL,
        "HEX.3": r"-?0x[0-9a-fA-F]+",
        "FLOAT.2": r"-?\d+\.\d*(?:[eE][-+]?\d+)?",
        "INT.1": r"-?\d+",
        "DIM.2": r"(?:\d+|\?)x",
        "DIALECT_ATTR": rf"#{DIALECT}(?:\.[\w.$-]+(?:{ANGLES})?|{ANGLES})",
        "DIALECT_TYPE": rf"!{DIALECT}(?:\.[\w.$-]+(?:{ANGLES})?|{ANGLES})",
        "HASH_ALIAS": r"#[A-Za-z_$][\w$-]*(?![\w.$<-])",
        "BANG_ALIAS": r"![A-Za-z_$][\w$-]*(?![\w.$<-])",
        "OPAQUE_ATTR.3": rf"(?:{BY_XDSL}){ANGLES}",
        "DENSE.3": DENSE,
        "OPAQUE_TYPE.3": rf'(?:vector|memref|complex){ANGLES}|tensor<\s*\*(?:[^<>"]|{ANGLES})*>',
        "SCALAR": r"[A-Za-z_]\w*",
        "KEY": r"[A-Za-z_][\w.$]*",
    }
)
"""The terminals of leaves.lark."""

MAX_RETAINED = 20_000
"""The maximum number of leaves cached between texts."""

MAX_LENGTH = 1_000
"""The maximum length of one of them: a constant may have millions of numbers."""

NAMES = {
    "STRING": "a string", "SYMBOL": "a symbol", "INT": "an integer", "FLOAT": "a float",
    "DIM": "a dimension", "DIALECT_ATTR": "an attribute", "HASH_ALIAS": "an alias",
    "SCALAR": "a type", "KEY": "a name", "$END": "the end", "DIALECT_TYPE": "a type",
}  # fmt: skip
"""The names of the terminals of leaves.lark in messages."""


class Leaves:
    """The parser of leaves. Leaves without aliases are cached between texts."""

    def __init__(self, ctx: Context):
        self.reductions = LeafReductions(ctx)
        grammar = (HERE / "leaves.lark").read_text() + TERMINALS
        self.machine = Machine(grammar, [*START.values()], self.reductions)
        self.retained = Memo()
        self.begin("")

    def begin(self, text: str) -> None:
        """Start a new text, with its own aliases."""
        self.text = text
        self.cache: dict[tuple[str, str], Any] = {}
        """The leaves of the current text, by kind and spelling."""
        self.aliases = self.reductions.aliases = Aliases(
            text, lambda value, start, end: self.read("ATTR", value, start, end)
        )

    def read(self, kind: str, value: str, start: int, end: int) -> Any:
        """Return the attribute of a leaf token. Raises LeafError or SilentError."""
        return self._cached((kind, value), start, end, lambda: self._parse(START[kind], start, end))

    def _cached(self, key: tuple[str, str], start: int, end: int, make: Callable[[], Any]) -> Any:
        value = self.cache.get(key)
        if value is None and (value := self.retained.get(key)) is None:
            aliases = self.aliases
            outer, aliases.used = aliases.used, False
            value = self.cache[key] = located(start, end, make)
            if not aliases.used and len(key[1]) <= MAX_LENGTH:
                if len(self.retained) > MAX_RETAINED:
                    self.retained.clear()
                self.retained[key] = value
            aliases.used |= outer
        return value

    # ---- short leaves: an op's format declares their class or type ----
    def body(self, base: type[Attribute], t: Token) -> Attribute:
        """Return the attribute of `<...>`."""

        def make() -> Attribute:
            if issubclass(base, TextAttr):
                read = base.read
                return located(t.start + 1, t.end, lambda: read(t.value[1:-1]))
            sign = "!" if issubclass(base, TypeAttribute) else "#"
            return self.reductions.by_xdsl(f"{sign}{base.name}{t.value}", t, len(base.name) + 1)

        return self._cached((base.name, t.value), t.start, t.end, make)

    def typed(self, base: type[Any], type: Attribute, t: Token) -> Attribute:
        """Return the attribute of a number or of `dense<...>`."""

        def make() -> Attribute:
            if t.value.startswith("dense"):
                return self.reductions.dense_attr([t, type])
            return number(type, t)

        return self._cached((str(type), t.value), t.start, t.end, make)

    def array(self, element: Any, t: Token) -> Attribute:
        """Return the dense array of `[1, 2]`."""

        def make() -> Attribute:
            values = t.value[1:-1].strip()
            text = f"array<{element}{': ' if values else ''}{values}>"
            array = self.reductions.by_xdsl(text, t)
            assert isinstance(array, DenseArrayBase)
            return array

        return self._cached((f"array {element}", t.value), t.start, t.end, make)

    # ---- errors ----
    def _parse(self, start: str, pos: int, end: int) -> Any:
        try:
            return self.machine.run(self.text, start, pos, end)
        except UnexpectedError as e:
            raise LeafError(*self._explain(e, end)) from None

    def _explain(self, e: UnexpectedError, end: int) -> tuple[int, int, str]:
        kinds = set(e.expected)
        names = {self._human(k) for k in kinds} - {""}
        if {"STRING", "INT", "SYMBOL"} <= kinds:
            names = {"an attribute"} | {n for n in names if n in ("']'", "'}'")}
        elif {"SCALAR", "DIALECT_TYPE"} <= kinds:
            names = {"a type"} | {n for n in names if n in ("')'", "'>'", "a dimension")}
        expected = one_of(names or {"nothing more"})
        got = repr(e.got) if e.start < end else "the end of it"
        return min(e.start, end - 1), e.end, f"expected {expected}, got {got}"

    def _human(self, kind: str) -> str:
        if kind in self.machine.literals:
            literal = self.machine.literals[kind]
            return f"'{literal}'" if not literal.isalpha() else ""
        return NAMES.get(kind, "")
