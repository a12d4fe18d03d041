"""Leaf text (a type, an attribute, a dictionary, a location) -> Attribute, once per spelling.

leaves.lark covers what training programs use. Other builtin syntax (`vector`, `memref`, `dense`,
`affine_map`, ...) goes to xDSL's own attribute parser, whose errors get their source location.
"""

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lark import Transformer
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.dialects.builtin import (
    UNKNOWN_LOC,
    ArrayAttr,
    BytesAttr,
    DenseArrayBase,
    DictionaryAttr,
    FileLineColLoc,
    FloatAttr,
    FunctionType,
    IntAttr,
    IntegerAttr,
    IntegerType,
    NoneAttr,
    Signedness,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    TupleType,
    UnitAttr,
)
from xdsl.ir import Attribute, TypeAttribute
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError, VerifyException
from xdsl.utils.mlir_lexer import MLIRTokenKind

from shardir.diagnostics import NotationError, ShardirError, did_you_mean, one_of
from shardir.dialects.text import TextAttr
from shardir.syntax.lexer import (
    ANGLES,
    DENSE,
    STRING,
    SYMBOL,
    TYPE,
    Machine,
    Token,
    UnexpectedError,
    lark_regexes,
)
from shardir.syntax.lexer import TERMINALS as STATEMENT_TERMINALS

HERE = Path(__file__).parent
START = {
    "ATTR": "attr", "TYPE": "type", "FN_TYPE": "fn_type", "BRACES": "entries", "LOC": "loc",
    "ANGLES": "props",
}  # fmt: skip
ATTR = re.compile(STATEMENT_TERMINALS["ATTR"], re.ASCII)
ALIAS = re.compile(r"^[^\S\n]*([#!][A-Za-z_$][\w$-]*)\s*=[^\S\n]*", re.M | re.ASCII)
DIALECT = r"[A-Za-z_$][\w$-]*\.[\w.$-]+"
BY_XDSL = "affine_map|affine_set|array|strided|opaque"
TERMINALS = lark_regexes(
    {
        "STRING": STRING,
        "SYMBOL": SYMBOL,
        "HEX.3": r"-?0x[0-9a-fA-F]+",
        "FLOAT.2": r"-?\d+\.\d*(?:[eE][-+]?\d+)?",
        "INT.1": r"-?\d+",
        "DIM.2": r"(?:\d+|\?)x",
        "DIALECT_ATTR": rf"#{DIALECT}(?:{ANGLES})?",
        "DIALECT_TYPE": rf"!{DIALECT}(?:{ANGLES})?",
        "HASH_ALIAS": r"#[A-Za-z_$][\w$-]*(?![\w.$<-])",
        "BANG_ALIAS": r"![A-Za-z_$][\w$-]*(?![\w.$<-])",
        "OPAQUE_ATTR.3": rf"{DENSE}\s*:\s*{TYPE}|(?:{BY_XDSL}){ANGLES}",
        "OPAQUE_TYPE.3": rf'(?:vector|memref|complex){ANGLES}|tensor<\s*\*(?:[^<>"]|{ANGLES})*>',
        "SCALAR": r"[A-Za-z_]\w*",
        "KEY": r"[A-Za-z_][\w.$]*",
    }
)
FLOATS: dict[str, Attribute] = {
    name: getattr(builtin, name)
    for name in [
        "bf16",
        "f16",
        "f32",
        "f64",
        "f80",
        "f128",
        "tf32",
        "f8E5M2",
        "f8E4M3",
        "f8E4M3FN",
        "f8E5M2FNUZ",
        "f8E4M3FNUZ",
        "f8E4M3B11FNUZ",
        "f8E3M4",
        "f8E8M0FNU",
        "f6E2M3FN",
        "f6E3M2FN",
        "f4E2M1FN",
    ]
}
SCALARS = FLOATS | {"index": builtin.IndexType(), "none": builtin.NoneType()}
SIGNS = {"i": Signedness.SIGNLESS, "si": Signedness.SIGNED, "ui": Signedness.UNSIGNED}
ESCAPE = re.compile(r"\\(?:([0-9a-fA-F]{2})|(.))", re.S)
KNOWN_ESCAPES = {"n": b"\n", "t": b"\t", "\\": b"\\", '"': b'"'}
CACHE_LIMIT = 20_000


class LeafError(Exception):
    """An error within a leaf, with its range in the source text."""

    def __init__(self, start: int, end: int, message: str):
        super().__init__(message)
        self.start, self.end, self.message = start, end, message


class SilentError(Exception):
    """A use of a definition whose error has been reported."""


def string_bytes(t: Token) -> bytes:
    """Return the text that the quoted part of a token spells."""
    text = t.value[t.value.index('"') + 1 : -1]
    if "\\" not in text:
        return text.encode()
    out, last = bytearray(), 0
    for m in ESCAPE.finditer(text):
        out += text[last : m.start()].encode()
        if m[1]:
            out.append(int(m[1], 16))
        elif m[2] in KNOWN_ESCAPES:
            out += KNOWN_ESCAPES[m[2]]
        else:
            at = t.start + t.value.index('"') + 1 + m.start()
            raise LeafError(at, at + 2, f"unknown escape {m[0]!r} in a string")
        last = m.end()
    return bytes(out + text[last:].encode())


def text_of(t: Token) -> str:
    """Return the text that a string, a symbol or a bare word spells."""
    value = t.value.removeprefix("@")
    if not value.startswith('"'):
        return value
    try:
        return string_bytes(t).decode()
    except UnicodeDecodeError:
        raise LeafError(t.start, t.end, "this string is not UTF-8 text") from None


def decimal(text: str, t: Token) -> int:
    try:
        return int(text, 0) if "x" in text else int(text)
    except ValueError:  # Python reads no more than 4300 digits
        raise LeafError(t.start, t.end, "this number is too long") from None


class Leaves(Transformer[Any, Any]):
    """The reductions of leaves.lark; `c` is the list of a rule's children."""

    def __init__(self, ctx: Context):
        super().__init__(visit_tokens=False)
        self.ctx = ctx
        self.machine = Machine(
            (HERE / "leaves.lark").read_text() + TERMINALS, [*START.values()], self
        )
        self.kept: dict[tuple[str, str], Any] = {}
        self.begin("")

    def begin(self, text: str) -> None:
        """Start a new text, which has aliases of its own."""
        self.text = text
        self.cache: dict[tuple[str, str], Any] = {}
        self.alias_at: dict[str, int] = {}
        self.aliases: dict[str, Attribute] = {}
        self.pending: set[str] = set()
        self.failed: set[str] = set()
        self.unsaid: dict[str, LeafError] = {}
        self.twice: list[tuple[int, int, str]] = []
        self.used_alias = False
        if "=" in text and ("#" in text or "!" in text):
            for m in ALIAS.finditer(text):
                if m[1] in self.alias_at:
                    self.twice.append((m.start(1), m.end(1), f"{m[1]} is already defined"))
                else:
                    self.alias_at[m[1]] = m.end()

    def read(self, kind: str, value: str, start: int, end: int) -> Any:
        """Return the attribute of a leaf token. Raises LeafError or SilentError."""
        key = (kind, value)
        found = self.cache.get(key)
        if found is None and (found := self.kept.get(key)) is None:
            outer, self.used_alias = self.used_alias, False
            found = self.guarded(start, end, lambda: self.parse(START[kind], start, end))
            self.cache[key] = found
            if not self.used_alias:
                if len(self.kept) > CACHE_LIMIT:
                    self.kept.clear()
                self.kept[key] = found
            self.used_alias |= outer
        return found

    def parse(self, start: str, pos: int, end: int) -> Any:
        try:
            return self.machine.run(self.text, start, pos, end)
        except UnexpectedError as e:
            raise LeafError(*self.explain(e, end)) from None

    def explain(self, e: UnexpectedError, end: int) -> tuple[int, int, str]:
        kinds = set(e.expected)
        names = {self.human(k) for k in kinds} - {""}
        if {"STRING", "INT", "SYMBOL"} <= kinds:
            names = {"an attribute"} | {n for n in names if n in ("']'", "'}'")}
        elif {"SCALAR", "DIALECT_TYPE"} <= kinds:
            names = {"a type"} | {n for n in names if n in ("')'", "'>'", "a dimension")}
        expected = one_of(names or {"nothing more"})
        got = repr(e.got) if e.start < end else "the end of it"
        return min(e.start, end - 1), e.end, f"expected {expected}, got {got}"

    def human(self, kind: str) -> str:
        if kind in self.machine.literals:
            literal = self.machine.literals[kind]
            return f"'{literal}'" if not literal.isalpha() else ""
        return NAMES.get(kind, "")

    def guarded(self, start: int, end: int, make: Callable[[], Any]) -> Any:
        """Turn errors of a constructor into errors of the leaf."""
        try:
            return make()
        except (LeafError, SilentError):
            raise
        except NotationError as e:
            at = min(start + e.offset, end - 1)
            raise LeafError(at, at + 1, e.message) from None
        except ParseError as e:
            raise LeafError(start, end, e.msg) from None
        except (VerifyException, ShardirError, ValueError, OverflowError, TypeError) as e:
            raise LeafError(start, end, str(e).split("\n")[0]) from None
        except RecursionError:
            raise LeafError(start, end, "this nests too deeply") from None

    # ---- leaves that stand without their usual syntax in an op ----
    def body(self, base: type[Attribute], t: Token) -> Attribute:
        """Return the attribute of `<...>`, whose class the op's format declares."""
        key = (base.name, t.value)
        if (found := self.kept.get(key)) is None:
            if issubclass(base, TextAttr):
                found = self.guarded(t.start + 1, t.end, lambda: base.read(t.value[1:-1]))
            else:
                sign = "!" if issubclass(base, TypeAttribute) else "#"
                found = self.by_xdsl(f"{sign}{base.name}{t.value}", t, len(base.name) + 1)
            self.kept[key] = found
        return found

    def typed(self, base: type[Any], type: Attribute, t: Token) -> Attribute:
        """Return the attribute of a number or `dense<...>`, whose type the op's format declares."""
        key = (str(type), t.value)
        if (found := self.kept.get(key)) is None:
            if t.value.startswith("dense"):
                found = self.by_xdsl(f"{t.value} : {type}", t)
            else:
                found = self.guarded(t.start, t.end, lambda: self.number(type, t))
            self.kept[key] = found
        return found

    def number(self, type: Any, t: Token) -> Attribute:
        if isinstance(type, IntegerType | builtin.IndexType):
            if t.value in ("true", "false"):
                if type != builtin.i1:
                    raise LeafError(t.start, t.end, f"expected an integer, got {t.value}")
                return IntegerAttr(int(t.value == "true"), type)
            if "." in t.value:
                raise LeafError(t.start, t.end, f"expected an integer, got {t.value}")
            return IntegerAttr(decimal(t.value, t), type)
        if t.value in ("true", "false"):
            raise LeafError(t.start, t.end, f"expected a number, got {t.value}")
        if "x" in t.value:
            return self.float_bits(t, type)
        return FloatAttr(float(t.value), type)

    def array(self, element: Any, t: Token) -> Attribute:
        """Return the dense array of `[1, 2]`, whose element type the op's format declares."""
        key = (f"array {element}", t.value)
        if (found := self.kept.get(key)) is None:
            values = t.value[1:-1].strip()
            found = self.by_xdsl(f"array<{element}{': ' if values else ''}{values}>", t)
            assert isinstance(found, DenseArrayBase)
            self.kept[key] = found
        return found

    def symbol(self, t: Token) -> str:
        return text_of(t)

    # ---- what leaves.lark leaves to xDSL ----
    def opaque(self, c: list[Token]) -> Attribute:
        return self.by_xdsl(c[0].value, c[0])

    def by_xdsl(self, text: str, t: Token, shift: int = 0) -> Attribute:
        parser = Parser(self.ctx, text)
        for m in re.finditer(r"[#!][A-Za-z_$][\w$-]*(?![\w.$<-])", text, re.ASCII):
            if m[0] in self.alias_at:
                parser.attribute_aliases[m[0]] = self.alias_named(m[0], t)
        try:
            found = parser.parse_attribute()
            if parser._current_token.kind != MLIRTokenKind.EOF:
                parser.raise_error("unexpected text after it")
            return found
        except ParseError as e:
            at = min(max(t.start, t.start + e.span.start - shift), t.end - 1)
            raise LeafError(at, min(at + max(1, len(e.span)), t.end), e.msg) from None
        except (VerifyException, ValueError, OverflowError, TypeError, AssertionError) as e:
            message = (
                str(e).split("\n")[0] or f"this is not a valid {text.split('<', maxsplit=1)[0]}"
            )
            raise LeafError(t.start, t.end, message) from None

    def dialect_attr(self, c: list[Token]) -> Attribute:
        t = c[0]
        name, angle, rest = t.value[1:].partition("<")
        is_type = t.value[0] == "!"
        base: type[Attribute] | None = (
            self.ctx.get_optional_type(name) if is_type else self.ctx.get_optional_attr(name)
        )
        if base is None:
            known = [
                a.name
                for d in self.ctx.loaded_dialects
                for a in d.attributes
                if issubclass(a, TypeAttribute) == is_type
            ]
            hint = did_you_mean(name, known)
            end = t.start + len(name) + 1
            what = "type" if is_type else "attribute"
            raise LeafError(t.start, end, f"{what} {t.value[0]}{name} is not registered{hint}")
        if issubclass(base, TextAttr):
            start = t.start + len(name) + 2
            if not angle:
                raise LeafError(t.end, t.end + 1, f"expected '<' after #{name}")
            return self.guarded(start, t.end, lambda: base.read(rest[:-1]))
        return self.by_xdsl(t.value, t)

    # ---- aliases ----
    def alias(self, c: list[Token]) -> Attribute:
        return self.alias_named(c[0].value, c[0])

    def alias_named(self, name: str, t: Token) -> Attribute:
        self.used_alias = True
        if (found := self.aliases.get(name)) is not None:
            return found
        if name in self.failed:
            raise SilentError
        if name not in self.alias_at:
            hint = did_you_mean(name, self.alias_at)
            self.failed.add(name)
            raise LeafError(t.start, t.end, f"{name} is not defined{hint}")
        if name in self.pending:
            raise LeafError(t.start, t.end, f"{name} is defined by itself")
        m = ATTR.match(self.text, self.alias_at[name])
        if m is None or m.end() == m.start():
            self.failed.add(name)  # the definition itself is reported at its own location
            raise SilentError
        self.pending.add(name)
        try:
            return self.define_alias(name, m[0], m.start(), m.end())
        except LeafError as e:
            self.unsaid[name] = e  # reported at the definition
            raise SilentError from None
        finally:
            self.pending.discard(name)

    def define_alias(self, name: str, value: str, start: int, end: int) -> Attribute:
        try:
            found = self.aliases[name] = self.read("ATTR", value, start, end)
        except (LeafError, SilentError):
            self.failed.add(name)
            raise
        return found

    # ---- attributes ----
    def int_attr(self, c: list[Any]) -> Attribute:
        type = builtin.i64 if c[1] is None else c[1]
        value = decimal(c[0].value, c[0])
        if isinstance(type, IntegerType | builtin.IndexType):
            return self.guarded(c[0].start, c[0].end, lambda: IntegerAttr(value, type))
        if type in FLOATS.values():
            return FloatAttr(float(value), type)
        raise LeafError(c[0].start, c[0].end, f"an integer cannot have type {type}")

    def float_attr(self, c: list[Any]) -> Attribute:
        type = builtin.f64 if c[1] is None else c[1]
        if type not in FLOATS.values():
            raise LeafError(c[0].start, c[0].end, f"a float cannot have type {type}")
        return FloatAttr(float(c[0].value), type)

    def hex_attr(self, c: list[Any]) -> Attribute:
        """Return a hexadecimal number as an integer, or as the bits of a float."""
        if c[1] is not None and c[1] in FLOATS.values():
            return self.float_bits(c[0], c[1])
        return self.int_attr(c)

    def float_bits(self, t: Token, type: Any) -> Attribute:
        bits, size = decimal(t.value, t), type.size
        if not 0 <= bits < 1 << 8 * size:
            raise LeafError(t.start, t.end, f"{t.value} has more bits than {type}")
        return FloatAttr(type.unpack(bits.to_bytes(size, "little"), 1)[0], type)

    def string_attr(self, c: list[Token]) -> Attribute:
        raw = string_bytes(c[0])
        try:
            return StringAttr(raw.decode())
        except UnicodeDecodeError:
            return BytesAttr(raw)

    def true_attr(self, c: list[Any]) -> Attribute:
        return IntegerAttr.from_bool(True)

    def false_attr(self, c: list[Any]) -> Attribute:
        return IntegerAttr.from_bool(False)

    def unit_attr(self, c: list[Any]) -> Attribute:
        return UnitAttr()

    def symbol_attr(self, c: list[Token]) -> Attribute:
        root, *nested = map(text_of, c)
        return SymbolRefAttr(root, nested)

    def array_attr(self, c: list[Any]) -> Attribute:
        return ArrayAttr(c)

    def dict_attr(self, c: list[Any]) -> Attribute:
        return DictionaryAttr(c[0])

    def entries(self, c: list[Any]) -> dict[str, Attribute]:
        found: dict[str, Attribute] = {}
        for key, name, value in c:
            if name in found:
                raise LeafError(
                    key.start, key.end, f"{name} occurs twice in this dictionary; drop one of them"
                )
            found[name] = value
        return found

    def entry(self, c: list[Any]) -> tuple[Token, str, Attribute]:
        key, value = c
        return key, text_of(key), UnitAttr() if value is None else value

    def props(self, c: list[Any]) -> dict[str, Attribute]:
        return c[0]

    # ---- types ----
    def scalar_type(self, c: list[Token]) -> Attribute:
        word = c[0].value
        if (found := SCALARS.get(word)) is not None:
            return found
        if m := re.fullmatch(r"(i|si|ui)(\d{1,8})", word):
            found = self.guarded(c[0].start, c[0].end, lambda: IntegerType(int(m[2]), SIGNS[m[1]]))
            SCALARS[word] = found
            return found
        near = get_close_matches(word, [*SCALARS, "tensor", "i1", "i32", "i64"], 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise LeafError(c[0].start, c[0].end, f"unknown type {word}{hint}")

    def tensor_type(self, c: list[Any]) -> Attribute:
        dims, element, encoding = c
        return TensorType(element, dims, NoneAttr() if encoding is None else encoding)

    def dims(self, c: list[Token]) -> list[int]:
        return [builtin.DYNAMIC_INDEX if t.value == "?x" else decimal(t.value[:-1], t) for t in c]

    def tuple_type(self, c: list[Any]) -> Attribute:
        return TupleType(ArrayAttr(tuple(c[0] or ())))

    def types(self, c: list[Any]) -> list[Attribute]:
        return c

    def fn_type(self, c: list[Any]) -> FunctionType:
        return FunctionType.from_lists(c[0] or (), c[1])

    def fn_results(self, c: list[Any]) -> list[Attribute]:
        return c

    def fn_result_list(self, c: list[Any]) -> list[Attribute]:
        return c[0] or []

    # ---- locations ----
    def unknown_loc(self, c: list[Any]) -> Attribute:
        return UNKNOWN_LOC

    def file_loc(self, c: list[Token]) -> Attribute:
        line, column = (IntAttr(decimal(t.value, t)) for t in c[1:])
        return FileLineColLoc(StringAttr(text_of(c[0])), line, column)

    def name_loc(self, c: list[Any]) -> Attribute:
        return builtin.NameLoc(StringAttr(text_of(c[0])), NoneAttr() if c[1] is None else c[1])

    def call_loc(self, c: list[Any]) -> Attribute:
        return builtin.CallSiteLoc(*c)

    def fused_loc(self, c: list[Any]) -> Attribute:
        metadata, *places = c
        return builtin.FusedLoc(tuple(places), NoneAttr() if metadata is None else metadata)


NAMES = {
    "STRING": "a string", "SYMBOL": "a symbol", "INT": "an integer", "FLOAT": "a float",
    "DIM": "a dimension", "DIALECT_ATTR": "an attribute", "HASH_ALIAS": "an alias",
    "SCALAR": "a type", "KEY": "a name", "$END": "the end", "DIALECT_TYPE": "a type",
}  # fmt: skip
