"""The reductions of leaves.lark: attributes, types and locations.

Builtin syntax that training programs do not use (`vector`, `memref`, `dense`, `affine_map`, ...) is
parsed by xDSL's own attribute parser; its errors are mapped to the source.
"""

import math
import re
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import Any

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.dialects.builtin import (
    UNKNOWN_LOC,
    ArrayAttr,
    BytesAttr,
    DenseIntOrFPElementsAttr,
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
    UnregisteredAttr,
)
from xdsl.ir import Attribute, TypeAttribute
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError, VerifyException
from xdsl.utils.mlir_lexer import MLIRTokenKind

from shardir.compat.xdsl import token_of
from shardir.diagnostics import did_you_mean
from shardir.dialects import DIALECTS
from shardir.dialects.text import TextAttr
from shardir.grammar.machine import Token
from shardir.syntax.aliases import Aliases
from shardir.syntax.lexer import NUMBER, STRING
from shardir.syntax.spelling import LeafError, decimal, located, string_bytes, text_of

FLOAT_NAMES = (
    "bf16 f16 f32 f64 f80 f128 tf32 f8E5M2 f8E4M3 f8E4M3FN f8E5M2FNUZ f8E4M3FNUZ f8E4M3B11FNUZ "
    "f8E3M4 f8E8M0FNU f6E2M3FN f6E3M2FN f4E2M1FN"
)
FLOATS: dict[str, Attribute] = {name: getattr(builtin, name) for name in FLOAT_NAMES.split()}
SCALARS = FLOATS | {"index": builtin.IndexType(), "none": builtin.NoneType()}
INTEGERS: dict[str, Attribute] = {}
"""The integer types read so far. Messages do not propose them: they would depend on other texts of
the process."""
STRINGS = re.compile(rf"//[^\n]*|({STRING})")
"""Matches comments, and strings in its first group."""
WORD = re.compile(r"\s*((?:[A-Za-z_][\w$.]*)?)", re.ASCII)
"""The name in an opaque attribute, `#dialect<name ...>`."""
NUMBERS, HEX = re.compile(NUMBER, re.ASCII), re.compile(r"-?0x[0-9a-fA-F]+")
SIGNS = {"i": Signedness.SIGNLESS, "si": Signedness.SIGNED, "ui": Signedness.UNSIGNED}


@lru_cache(maxsize=4096)
def _tensor_type(element: Attribute, dims: tuple[int, ...], encoding: Attribute) -> TensorType:
    """Return a type; cached, since identical objects compare fast."""
    return TensorType(element, dims, encoding)


class LeafReductions:
    """The reductions of leaves.lark; `c` is the list of a rule's children."""

    def __init__(self, ctx: Context):
        self.ctx = ctx
        self.aliases: Aliases
        """The aliases of the current text."""

    # ---- attributes ----
    def int_attr(self, c: list[Any]) -> Attribute:
        type = builtin.i64 if c[1] is None else c[1]
        value = decimal(c[0].value, c[0])
        if isinstance(type, IntegerType | builtin.IndexType):
            return located(c[0].start, c[0].end, lambda: IntegerAttr(value, type))
        if type in FLOATS.values():
            return float_of(float(value), type, c[0])
        raise LeafError(c[0].start, c[0].end, f"expected a type of numbers, got {type}")

    def float_attr(self, c: list[Any]) -> Attribute:
        type = builtin.f64 if c[1] is None else c[1]
        if type not in FLOATS.values():
            raise LeafError(c[0].start, c[0].end, f"expected a type of floats, got {type}")
        return float_of(float(c[0].value), type, c[0])

    def hex_attr(self, c: list[Any]) -> Attribute:
        """Return a hexadecimal number as an integer, or as the bits of a float."""
        if c[1] is not None and c[1] in FLOATS.values():
            return float_bits(c[0], c[1])
        return self.int_attr(c)

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
        entries: dict[str, Attribute] = {}
        for key, name, value in c:
            if name in entries:
                raise LeafError(
                    key.start, key.end, f"{name} occurs twice in this dictionary; drop one of them"
                )
            entries[name] = value
        return entries

    def entry(self, c: list[Any]) -> tuple[Token, str, Attribute]:
        key, value = c
        return key, text_of(key), UnitAttr() if value is None else value

    def props(self, c: list[Any]) -> dict[str, Attribute]:
        return c[0]

    def dense_attr(self, c: list[Any]) -> Attribute:
        """Return the dense attribute of a text and a type. A splat is stored once, where xDSL's
        parser makes a list with all elements."""
        t: Token = c[0]
        type: Any = c[1]
        if not t.value.startswith("dense<"):
            return self.by_xdsl(f"{t.value} : {type}", t)
        content = re.sub(r"//[^\n]*", "", t.value[len("dense<") : -1]).strip()
        element: Any = getattr(type, "element_type", None)
        shape: tuple[int, ...] = type.get_shape() if hasattr(type, "get_shape") else ()
        if content[:1] not in ("", "[") and shape and min(shape) > 0:
            try:
                one: Any = self._dense(content, TensorType(element, []), t)
                return located(t.start, t.end, lambda: DenseIntOrFPElementsAttr(type, one.data))
            except LeafError:
                pass  # a hexadecimal string of all elements, or an error
        return self._dense(content, type, t)

    def _dense(self, content: str, type: Any, t: Token) -> Attribute:
        """Return a dense attribute. A hexadecimal number is the bits of a float, where xDSL's
        parser would read an integer."""
        element = getattr(type, "element_type", None)
        is_complex = isinstance(element, builtin.ComplexType)
        part: Any = element.element_type if is_complex else element
        if part not in FLOATS.values() or content.startswith('"'):
            return self.by_xdsl(f"dense<{content}> : {type}", t)
        decimals = HEX.sub("0.0", content)
        attribute: Any = self.by_xdsl(f"dense<{decimals}> : {type}", t)
        values = [*chain(*attribute.get_values())] if is_complex else attribute.get_values()
        if any(map(math.isinf, values)) and not any(
            math.isinf(float(m[0])) for m in NUMBERS.finditer(decimals)
        ):
            message = f"expected numbers in the range of {part}, got {t.value[:60]}"
            raise LeafError(t.start, t.end, message)
        if "0x" not in content:
            return attribute
        numbers = [
            float_bits(Token(m[0], t.start, t.end), part).value.data if HEX.fullmatch(m[0])
            else value
            for m, value in zip(NUMBERS.finditer(content), values, strict=True)
        ]  # fmt: skip
        pairs: Any = zip(numbers[::2], numbers[1::2], strict=True)
        return DenseIntOrFPElementsAttr.from_list(type, list(pairs) if is_complex else numbers)

    # ---- types ----
    def scalar_type(self, c: list[Token]) -> Attribute:
        word = c[0].value
        if (type := SCALARS.get(word) or INTEGERS.get(word)) is not None:
            return type
        if m := re.fullmatch(r"(i|si|ui)(\d{1,8})", word):
            type = located(c[0].start, c[0].end, lambda: IntegerType(int(m[2]), SIGNS[m[1]]))
            INTEGERS[word] = type
            return type
        near = get_close_matches(word, [*SCALARS, "tensor", "i1", "i32", "i64"], 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise LeafError(c[0].start, c[0].end, f"expected a type, got {word}{hint}")

    def tensor_type(self, c: list[Any]) -> Attribute:
        dims, element, encoding = c
        return _tensor_type(element, tuple(dims), NoneAttr() if encoding is None else encoding)

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
        """Return a place; the end of a range is dropped, for which xDSL has no attribute."""
        line, column = (IntAttr(decimal(t.value, t)) for t in c[1:3])
        return FileLineColLoc(StringAttr(text_of(c[0])), line, column)

    def name_loc(self, c: list[Any]) -> Attribute:
        return builtin.NameLoc(StringAttr(text_of(c[0])), NoneAttr() if c[1] is None else c[1])

    def call_loc(self, c: list[Any]) -> Attribute:
        return builtin.CallSiteLoc(*c)

    def fused_loc(self, c: list[Any]) -> Attribute:
        metadata, *inner = c
        return builtin.FusedLoc(tuple(inner), NoneAttr() if metadata is None else metadata)

    # ---- aliases, and attributes of dialects ----
    def alias(self, c: list[Token]) -> Attribute:
        return self.aliases.value(c[0].value, c[0])

    def dialect_attr(self, c: list[Token]) -> Attribute:
        """Return the attribute of `#dialect.name<...>` or `#dialect<name ...>`. If it is not
        registered, and need not be, it has its text."""
        t = c[0]
        name, angle, body = t.value[1:].partition("<")
        body = body[:-1]
        is_type, is_opaque, at = t.value[0] == "!", "." not in name, t.start + len(name) + 2
        if is_opaque:
            m = WORD.match(body)
            assert m is not None
            name, body, at = f"{name}.{m[1]}", body[m.end() :], at + m.end()
        base: type[Attribute] | None = (
            self.ctx.get_optional_type(name) if is_type else self.ctx.get_optional_attr(name)
        )
        if base is None:
            dialect = name.partition(".")[0]
            if dialect in self.ctx.registered_dialect_names:
                dialects = [self.ctx.get_dialect(dialect)]
            else:
                dialects = [d for d in self.ctx.loaded_dialects if d.name in DIALECTS]
            known = [
                a.name for d in dialects for a in d.attributes
                if issubclass(a, TypeAttribute) == is_type
            ]  # fmt: skip
            is_named = not name.endswith(".")
            hint = did_you_mean(name, known) if is_named else ""
            if not hint and len(dialects) == 1 and known:
                hint = f"; {dialect} has {', '.join(sorted(known))}"
            end = t.start + len(name) + 1
            what = "type" if is_type else "attribute"
            shown = f"{t.value[0]}{name}" if is_named else f"{t.value[:40]} without a name"
            raise LeafError(t.start, end, f"expected a registered {what}, got {shown}{hint}")
        if issubclass(base, UnregisteredAttr):
            return base(name, is_type, is_opaque, body)
        if is_opaque and not body.startswith("<"):
            return self.by_xdsl(t.value, t)
        if is_opaque:
            text = f"{t.value[0]}{name}{body}"
            return self.dialect_attr([Token(text, at - len(text) + len(body), t.end)])
        if issubclass(base, TextAttr):
            if not angle:
                raise LeafError(t.end, t.end + 1, f"expected '<' after #{name}, got none")
            return located(at, t.end, lambda: base.read(body))
        return self.by_xdsl(t.value, t)

    def typed_attr(self, c: list[Any]) -> Attribute:
        return self.by_xdsl(f"{c[0].value} : {c[1]}", c[0])

    def opaque(self, c: list[Token]) -> Attribute:
        return self.by_xdsl(c[0].value, c[0])

    def by_xdsl(self, text: str, t: Token, shift: int = 0) -> Attribute:
        """Return the attribute that xDSL's parser reads: the token's text after `shift` characters
        that are not in the source.

        Strings are checked first: xDSL's lexer takes exponential time for invalid escapes."""
        for m in STRINGS.finditer(text):
            if m[1]:
                string_bytes(Token(m[1], t.start + m.start() - shift, t.start + m.end() - shift))
        parser = Parser(self.ctx, text)
        for name in self.aliases.used_in(text):
            parser.attribute_aliases[name] = self.aliases.value(name, t)
        try:
            attribute = parser.parse_attribute()
            if token_of(parser).kind != MLIRTokenKind.EOF:
                parser.raise_error("unexpected text after it")
            return attribute
        except ParseError as e:
            at = min(max(t.start, t.start + e.span.start - shift), t.end - 1)
            raise LeafError(at, min(at + max(1, len(e.span)), t.end), e.msg) from None
        except NotImplementedError:  # it packs numbers as C types
            message = f"expected numbers of a type of at most 64 bits, got {text[:60]}"
            raise LeafError(t.start, t.end, message) from None
        except OverflowError:
            message = f"expected numbers in the range of their type, got {text[:60]}"
            raise LeafError(t.start, t.end, message) from None
        except (VerifyException, ValueError, TypeError, AssertionError) as e:
            message = (
                str(e).split("\n")[0] or f"this is not a valid {text.split('<', maxsplit=1)[0]}"
            )
            raise LeafError(t.start, t.end, message) from None


def number(type: Any, t: Token) -> Attribute:
    """Return the number or boolean of a token as an attribute of a type."""
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
        return float_bits(t, type)
    return float_of(float(t.value), type, t)


def float_of(value: float, type: Any, t: Token) -> FloatAttr[Any]:
    """Return the float of a token. Raises LeafError beyond the range of its type, where xDSL either
    returns infinity or fails."""
    try:
        attribute: FloatAttr[Any] = FloatAttr(value, type)
    except OverflowError:
        attribute = FloatAttr(math.inf, type)
    if math.isinf(attribute.value.data) and not math.isinf(value):  # unlike 1.0e400
        raise LeafError(t.start, t.end, f"expected a number in the range of {type}, got {t.value}")
    return attribute


def float_bits(t: Token, type: Any) -> FloatAttr[Any]:
    """Return the float of a type from its bits in a token."""
    bits, size = decimal(t.value, t), type.size
    if not 0 <= bits < 1 << 8 * size:
        raise LeafError(
            t.start, t.end, f"expected at most {8 * size} bits of {type}, got {t.value}"
        )
    return FloatAttr(type.unpack(bits.to_bytes(size, "little"), 1)[0], type)
