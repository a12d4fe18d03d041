"""The names of a text: where each is defined, by a scan that no error stops.

The parser drops statements with errors; an editor asks for names while they are written. So
definitions are found by their form:

    %a, %b:2 = ...                  values, at the start of a line
    func.func @f(%x: ...)           arguments, of functions and of blocks
    WORD.WORD [private] @f          symbols: meshes, functions, steps
    dist.mesh @m <dp = 2>           axes
    #a = ...                        aliases

Names of values are those of a function, which ends where the next one begins.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from shardir.syntax.lexer import STRING, TERMINALS
from shardir.syntax.recovery import RESULTS

TOKEN = re.compile(
    rf"(?P<comment>//[^\n]*)|(?P<value>{TERMINALS['SSA_ID']})|(?P<symbol>{TERMINALS['SYMBOL']})"
    rf"|(?P<string>{STRING})|(?P<alias>[#!][A-Za-z_$][\w.$-]*)|(?P<block>{TERMINALS['BLOCK_ID']})"
    r"|(?P<number>\d[\w.]*)|(?P<word>[A-Za-z_][\w$.]*)|(?P<sign>->|[^\s\w])",
    re.ASCII,
)
VISIBILITY = ("private", "public", "nested")
CLOSES = {"(": ")", "<": ">", "{": "}", "[": "]"}


@dataclass(frozen=True)
class NameToken:
    kind: str
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """The name of a value without the number of its result; the text of others."""
        return self.text.partition("#")[0] if self.kind == "value" else self.text


@dataclass
class Symbol:
    """A symbol and what its statement defines.

    Attributes:
        op: the name of the op: `func.func`.
        start, end: the range of the statement.
        parts: the arguments of a function, the axes of a mesh.
    """

    op: NameToken
    name: NameToken
    start: int
    end: int = 0
    parts: dict[str, NameToken] = field(default_factory=dict)
    values: dict[str, NameToken] = field(default_factory=dict)
    """The values of a function, its arguments included."""

    @property
    def is_function(self) -> bool:
        return self.op.text == "func.func"

    @property
    def is_mesh(self) -> bool:
        return self.op.text == "dist.mesh"


class TextIndex:
    """The definitions of a text."""

    def __init__(self, text: str):
        self.text = text
        self.tokens = [
            NameToken(m.lastgroup or "", m.start(), m.end(), m[0]) for m in TOKEN.finditer(text)
        ]
        self.code = [t for t in self.tokens if t.kind != "comment"]
        self.symbols: list[Symbol] = []
        self.aliases: dict[str, NameToken] = {}
        self._outside: dict[str, NameToken] = {}
        self._scan()

    # ---- queries ----
    def token_at(self, offset: int) -> NameToken | None:
        """Return the token at an offset, or the one that ends there; a name before a sign."""
        at = bisect_right(self._starts, offset) - 1
        near = [self.tokens[i] for i in (at, at - 1) if 0 <= i < len(self.tokens)]
        inside = [t for t in near if t.start <= offset <= t.end and t.kind != "sign"]
        return inside[0] if inside else None

    def function_at(self, offset: int) -> Symbol | None:
        """Return the function whose text has an offset; it lasts to the next function."""
        before = [s for s in self.symbols if s.is_function and s.start <= offset]
        return before[-1] if before else None

    def values_at(self, offset: int) -> dict[str, NameToken]:
        """Return the values that are visible at an offset."""
        function = self.function_at(offset)
        return self._outside if function is None else function.values

    @property
    def axes(self) -> dict[str, list[tuple[Symbol, NameToken]]]:
        """The definitions of each axis: of several meshes where they have one name."""
        found: dict[str, list[tuple[Symbol, NameToken]]] = {}
        for mesh in (s for s in self.symbols if s.is_mesh):
            for name, token in mesh.parts.items():
                found.setdefault(name, []).append((mesh, token))
        return found

    def mesh_before(self, offset: int) -> str | None:
        """Return the mesh that the attribute around an offset names, `@m` in `#dist.layout<@m, `;
        of an alias in whose definition the offset is, too."""
        at = bisect_right(self._code_starts, offset) - 1
        for t in reversed(self.code[max(0, at - 200) : at + 1]):
            if t.kind == "symbol":
                return t.text
            if t.kind == "alias":
                return None
        return None

    def definition(self, token: NameToken) -> NameToken | None:
        """Return the token that defines a name; None for what is no name, or has no definition."""
        match token.kind:
            case "value":
                return self.values_at(token.start).get(token.name)
            case "symbol":
                return next((s.name for s in self.symbols if s.name.text == token.text), None)
            case "alias":
                return self.aliases.get(token.text)
            case "word":
                known = self.axes.get(token.text, [])
                mesh = self.mesh_before(token.start)
                of_mesh = [t for s, t in known if s.name.text == mesh]
                return (of_mesh or [t for _, t in known] or [None])[0]
        return None

    def statement(self, offset: int) -> tuple[int, int]:
        """Return the range of the lines of the statement at an offset: to the line before the next
        one that defines something."""
        first = bisect_right(self._statements, offset) - 1
        start = self._statements[first] if first >= 0 else 0
        later = self._statements[first + 1 :]
        return start, later[0] if later else len(self.text)

    def part(self, offset: int, part: str, number: int) -> NameToken | None:
        """Return the name of a part of the statement whose op is at an offset.

        Args:
            part: `operand`, `result`, or `argument` of a function.
        """
        start, end = self.statement(offset)
        if part == "argument":
            function = self.function_at(offset)
            names = list(function.parts.values()) if function and function.start == start else []
        else:
            first = bisect_left(self._code_starts, start if part == "result" else offset)
            last = bisect_left(self._code_starts, offset if part == "result" else end)
            names = [t for t in self.code[first:last] if t.kind == "value"]
        return names[number] if number < len(names) else None

    # ---- the scan ----
    @cached_property
    def _starts(self) -> list[int]:
        return [t.start for t in self.tokens]

    @cached_property
    def _code_starts(self) -> list[int]:
        return [t.start for t in self.code]

    @cached_property
    def _statements(self) -> list[int]:
        """The offsets at which statements begin: lines that begin with results, an op, a label, an
        alias or a closing brace."""
        return [t.start for i, t in enumerate(self.code) if self._begins(i)]

    def _begins(self, i: int) -> bool:
        t = self.code[i]
        if i and self.text.find("\n", self.code[i - 1].start, t.start) < 0:
            return False
        match t.kind:
            case "value":
                return RESULTS.match(self.text, self._line_start(t.start)) is not None
            case "word":
                return "." in t.text or t.text in ("return", "call", "module")
            case "alias":
                return self._sign(i + 1, "=")
            case "block":
                return True
            case "string":
                return self._sign(i + 1, "(")
        return t.text == "}"

    def _line_start(self, offset: int) -> int:
        return self.text.rfind("\n", 0, offset) + 1

    def _sign(self, i: int, sign: str) -> bool:
        return i < len(self.code) and self.code[i].text == sign

    def _scan(self) -> None:
        values = self._outside
        for i, t in enumerate(self.code):
            if not self._begins(i):
                continue
            if t.kind == "value":
                for name in self._until(i, "="):
                    if name.kind == "value":
                        values.setdefault(name.name, name)
            elif t.kind == "alias":
                self.aliases.setdefault(t.text, t)
            elif t.kind == "block" and self._sign(i + 1, "("):
                values.update(self._arguments(i + 1))
            elif t.kind == "word":
                symbol = self._symbol(i)
                values = symbol.values if symbol is not None and symbol.is_function else values
        self._end_functions()

    def _symbol(self, i: int) -> Symbol | None:
        """Return the symbol that an op defines, and add it; None for a use, as of `func.call`."""
        op, j = self.code[i], i + 1
        if op.text in ("func.call", "call"):
            return None
        if j < len(self.code) and self.code[j].text in VISIBILITY:
            j += 1
        if j == len(self.code) or self.code[j].kind != "symbol":
            return None
        end = self.text.find("\n", self.code[j].end)
        symbol = Symbol(op, self.code[j], op.start, end if end >= 0 else len(self.text))
        if symbol.is_function and self._sign(j + 1, "("):
            symbol.parts = self._arguments(j + 1)
            symbol.values.update(symbol.parts)
        elif symbol.is_mesh and self._sign(j + 1, "<"):
            inside = self._until(j + 2, ">")
            symbol.parts = {
                t.text: t for t, after in pairwise(inside)
                if t.kind == "word" and after.text == "="
            }  # fmt: skip
        self.symbols.append(symbol)
        return symbol

    def _until(self, i: int, sign: str) -> list[NameToken]:
        """Return the tokens up to a sign, or to the end of the line."""
        tokens: list[NameToken] = []
        for j in range(i, len(self.code)):
            t = self.code[j]
            if t.text == sign or (tokens and "\n" in self.text[tokens[-1].end : t.start]):
                break
            tokens.append(t)
        return tokens

    def _arguments(self, i: int) -> dict[str, NameToken]:
        """Return the names before a `:` within the parentheses that open at a token. A `(` that is
        not closed ends at the next statement."""
        found: dict[str, NameToken] = {}
        for j, t in self._within(i):
            if t.kind == "value" and self._sign(j + 1, ":"):
                found.setdefault(t.name, t)
        return found

    def _within(self, i: int) -> Iterator[tuple[int, NameToken]]:
        depth = 0
        for j in range(i, len(self.code)):
            t = self.code[j]
            if t.text == "(":
                depth += 1
            elif t.text == ")":
                depth -= 1
            if depth == 0 or (j > i and self._begins(j) and t.text != "}"):
                return
            yield j, t

    def _end_functions(self) -> None:
        """Set the ends of functions: the `}` of a body, or where the next function begins."""
        functions = [s for s in self.symbols if s.is_function]
        starts = [*(f.start for f in functions[1:]), len(self.text)]
        for f, following in zip(functions, starts, strict=False):
            depth = 0
            first = bisect_right(self._code_starts, f.name.start)
            end = following
            for i in range(first, bisect_left(self._code_starts, following)):
                t = self.code[i]
                if t.text in ("{", "}"):
                    depth += 1 if t.text == "{" else -1
                    if depth <= 0 and t.text == "}" and self._begins(i):
                        end = t.end
                        break
            f.end = max(end, f.name.end)
