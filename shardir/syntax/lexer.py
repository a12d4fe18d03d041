"""Lark's LALR(1) tables and terminals, run by one loop with a lexer for each parser state.

Lark reads the grammar, resolves it and computes the tables; its own loop and lexer keep line
counts and token objects that cost half of the time of a large module. This loop keeps offsets
only, drops punctuation, and turns leaf tokens into values as it shifts them. It also owns its
stacks, which is what error recovery needs.
"""

import os
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import lark
from lark import Lark, Transformer
from lark.lexer import PatternStr, TerminalDef
from lark.parsers.lalr_analysis import Shift

SKIP = r"(?:\s++|//[^\n]*+)*+"
_skip = re.compile(SKIP, re.ASCII)
ODD = re.compile(r'[A-Za-z_][\w$.]*|%[\w$.-]+|[@#!^][\w$.-]+|"[^"\n]*"|\d+|->|.', re.ASCII | re.S)

STRING = r'"(?:[^"\\\n]++|\\.)*+"'


def balanced(opens: str, closes: str, depth: int) -> str:
    """Return a regex for text between brackets that nest up to `depth` levels.

    `->` is not a bracket, strings and comments hide theirs, and no type or attribute holds a `%`,
    so that a bracket which is never closed stops at the next value instead of the end of the file.
    """
    unbracketed = rf'[^\{opens}\{closes}"%/-]++|->|-|//[^\n]*+|/|{STRING}'
    regex = rf"\{opens}(?:{unbracketed})*+\{closes}"
    for _ in range(depth - 1):
        regex = rf"\{opens}(?:{unbracketed}|{regex})*+\{closes}"
    return regex


ANGLES, PARENS = balanced("<", ">", 8), balanced("(", ")", 5)
SQUARES, BRACES = balanced("[", "]", 6), balanced("{", "}", 6)
SYMBOL = rf"@(?:[A-Za-z_][\w$.]*|{STRING})"
NUMBER = r"-?(?:0x[0-9a-fA-F]+|\d+(?:\.\d*(?:[eE][-+]?\d+)?)?)"
NAME = r"[A-Za-z_][\w$.]*+"
TYPE = rf"(?:![A-Za-z_$][\w.$-]*+|{NAME})(?:{ANGLES}|(?!\s*<))"
FN_TYPE = rf"{PARENS}\s*->\s*(?:{PARENS}|{TYPE})"
LOC = rf"loc\s*{PARENS}"
DENSE = rf"dense(?:_resource)?{ANGLES}"

TERMINALS = {
    "LOC.3": LOC,
    "FN_TYPE.2": FN_TYPE,
    "TYPE": TYPE,
    "ATTR": rf"{STRING}|{NUMBER}(?:\s*:\s*{TYPE})?|{SYMBOL}(?:::{SYMBOL})*|{SQUARES}|{BRACES}"
    rf"|#[A-Za-z_$][\w.$-]*(?:{ANGLES})?|{LOC}|{DENSE}\s*:\s*{TYPE}|{FN_TYPE}|{TYPE}",
    "DENSE.2": DENSE,
    "NUMBER": rf"{NUMBER}|true|false",
    "SQUARES": SQUARES,
    "BRACES.2": BRACES,
    "ANGLES": ANGLES,
    "STRING": STRING,
    "SYMBOL": SYMBOL,
    "SSA_ID": r"%(?:\d+|[a-zA-Z$._-][\w$.-]*)(?:#\d+)?",
    "BLOCK_ID": r"\^(?:\d+|[a-zA-Z$._-][\w$.-]*)",
    "ALIAS_ID": r"[#!][A-Za-z_$][\w$-]*(?=\s*=)",
    "OP_NAME": NAME,
    "COUNT": r"\d+",
}


def lark_regexes(terminals: dict[str, str]) -> str:
    """Return definitions of terminals, as Lark reads them."""
    slash = chr(92) + "/"
    return "".join(f"{name}: /{r.replace('/', slash)}/\n" for name, r in terminals.items())


class Token:
    """A terminal with a value."""

    __slots__ = ("end", "start", "value")

    def __init__(self, value: str, start: int, end: int):
        self.value, self.start, self.end = value, start, end


class UnexpectedError(Exception):
    """A terminal that no rule allows here; `after` is the end of the one before it."""

    def __init__(self, after: int, start: int, end: int, got: str, expected: list[str]):
        super().__init__(got)
        self.after, self.start, self.end = after, start, end
        self.got, self.expected = got, expected


class Row:
    """The actions of one state."""

    __slots__ = ("goto", "match", "number", "reduce", "shift", "words")

    def __init__(self, number: int):
        self.number = number
        self.shift: dict[str, tuple[Row, Callable[[str, int, int], Any] | None]] = {}
        self.reduce: dict[str, tuple[Callable[[list[Any]], Any], int, str]] = {}
        self.goto: dict[str, Row] = {}
        self.match: Any = None
        self.words: dict[str, dict[str, str]] = {}

    @property
    def kinds(self) -> list[str]:
        return [*self.shift, *self.reduce]


class NoLexer:
    """Lark's lexers are not used, and so not built."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def built(grammar: str, starts: list[str], actions: Transformer[Any, Any]) -> Lark:
    """Return Lark's parser of a grammar. The tables are read from a file beside Python's byte code,
    which is written where Python writes that.

    To compute the tables of all ops takes about a second, to read them a tenth of it. The file is
    named by all that the tables depend on, and appears complete.
    """
    options: dict[str, Any] = {"transformer": actions, "_plugins": {"ContextualLexer": NoLexer}}
    key = repr((lark.__version__, sys.implementation.cache_tag, starts, grammar))
    name = f"{sha256(key.encode()).hexdigest()[:32]}.tables"
    file = Path(cache_from_source(__file__)).with_name(name)
    try:
        with file.open("rb") as f:
            return Lark.__new__(Lark)._load(f, **options)
    except Exception:  # no file, or a damaged one: pickle raises errors of any kind
        found = Lark(grammar, parser="lalr", start=starts, maybe_placeholders=True, **options)
    if not sys.dont_write_bytecode:
        part = file.with_name(f"{name}.{os.getpid()}")
        try:
            with part.open("wb") as f:
                found.save(f, exclude_options=options)
            part.replace(file)
        except OSError:  # the disk is full, or the folder read-only
            part.unlink(missing_ok=True)
    return found


class Machine:
    """A grammar with its actions, ready to run.

    `convert`: leaf terminals -> value, made as they are shifted.
    `words`: spellings of one terminal that are terminals of their own, such as names of ops.
    """

    def __init__(
        self,
        grammar: str,
        starts: list[str],
        actions: Transformer[Any, Any],
        convert: dict[str, Callable[[str, int, int], Any]] | None = None,
        words: dict[str, dict[str, str]] | None = None,
    ):
        self.lark = built(grammar, starts, actions)
        self.words = words or {}
        self.terminals: dict[str, TerminalDef] = {t.name: t for t in self.lark.terminals}
        self.literals = {
            name: t.pattern.value
            for name, t in self.terminals.items()
            if isinstance(t.pattern, PatternStr)
        }
        self._rows(convert or {})

    def _rows(self, convert: dict[str, Callable[[str, int, int], Any]]) -> None:
        frontend: Any = self.lark.parser
        table, calls = frontend.parser._parse_table, frontend.parser_conf.callbacks
        kept = {
            symbol.name
            for rule in self.lark.rules
            for symbol in rule.expansion  # a Terminal also has a flag that drops it
            if symbol.is_term
            and (rule.options.keep_all_tokens or not getattr(symbol, "filter_out", False))
        }
        rows = {number: Row(number) for number in table.states}
        reductions: dict[Any, tuple[Any, int, str]] = {}
        for number, actions in table.states.items():
            row = rows[number]
            for symbol, (action, arg) in actions.items():
                name = str(symbol)  # Lark's own strings compare slowly
                if action is not Shift:
                    if arg not in reductions:
                        reductions[arg] = calls[arg], len(arg.expansion), str(arg.origin.name)
                    row.reduce[name] = reductions[arg]
                elif name.isupper() or name[0] == "$":
                    row.shift[name] = rows[arg], convert.get(name, Token) if name in kept else None
                else:
                    row.goto[name] = rows[arg]
        self.first = {s: rows[n] for s, n in table.start_states.items()}
        self.final = {s: rows[n] for s, n in table.end_states.items()}

    def _prepare(self, row: Row) -> Any:
        """Return the regex of a state, made on first use: most states never lex."""
        defs = [self.terminals[k] for k in row.kinds if k in self.terminals]
        regexes = [t for t in defs if t.name not in self.literals]
        words: dict[str, dict[str, str]] = {}
        for r in regexes:
            if r.name in self.words:
                words[r.name] = dict(self.words[r.name])
            for t in defs:
                if t.name in self.literals and re.fullmatch(
                    r.pattern.value, self.literals[t.name], re.ASCII
                ):
                    words.setdefault(r.name, {})[self.literals[t.name]] = t.name
        inner = {name for w in words.values() for name in w.values()}
        defs = [t for t in defs if t.name not in inner]
        literals = self.literals
        defs.sort(key=lambda t: (-t.priority, t.name in literals, -len(t.pattern.value), t.name))
        parts = []
        for t in defs:
            text = self.literals.get(t.name)
            if text is None:
                regex = t.pattern.value
            else:
                regex = re.escape(text) + (r"(?![\w$.])" if re.fullmatch(NAME, text) else "")
            parts.append(f"(?P<{t.name}>{regex})")
        row.words = words
        row.match = re.compile(SKIP + f"(?:{'|'.join(parts) or '(?!)'})", re.ASCII).match
        return row.match

    def run(
        self,
        text: str,
        start: str,
        pos: int = 0,
        end: int | None = None,
        recover: Callable[[list[Row], list[Any], UnexpectedError], int] | None = None,
    ) -> Any:
        """Return the value of `text[pos:end]`; `recover` repairs the stacks and returns where to
        resume."""
        stop = len(text) if end is None else end
        row, final = self.first[start], self.final[start]
        stack, values = [row], []
        while True:
            kind: Any
            m = (row.match or self._prepare(row))(text, pos, stop)
            if m is None:
                kind, value = "", ""
                blank = _skip.match(text, pos, stop)
                begin = finish = pos if blank is None else blank.end()
                if begin >= stop:
                    kind = "$END"
            else:
                kind = m.lastgroup
                value, begin, finish = m[kind], m.start(kind), m.end()
                if kind in row.words:
                    kind = row.words[kind].get(value, kind)
            while True:
                if (shift := row.shift.get(kind)) is not None:
                    row, make = shift
                    stack.append(row)
                    values.append(None if make is None else make(value, begin, finish))
                    pos = finish
                    break
                if (reduce := row.reduce.get(kind)) is None:
                    error = self._unexpected(text, pos, begin, stop, stack)
                    if recover is None:
                        raise error
                    pos = recover(stack, values, error)
                    row = stack[-1]
                    break
                call, size, origin = reduce
                if size:
                    children = values[-size:]
                    del values[-size:], stack[-size:]
                else:
                    children = []
                row = stack[-1].goto[origin]
                stack.append(row)
                values.append(call(children))
                if row is final and kind == "$END":
                    return values[-1]

    def _unexpected(
        self, text: str, after: int, begin: int, stop: int, stack: list[Row]
    ) -> UnexpectedError:
        m = ODD.match(text, begin, stop)
        expected = [k for k in dict.fromkeys(stack[-1].kinds) if self.accepts(stack, k)]
        if m is None:
            return UnexpectedError(after, stop, stop + 1, "", expected)
        return UnexpectedError(after, begin, m.end(), m[0], expected)

    def accepts(self, stack: list[Row], kind: str) -> bool:
        """Whether a terminal can follow: reductions may end in a state in which it cannot."""
        rows = list(stack)
        while kind not in rows[-1].shift:
            if (reduce := rows[-1].reduce.get(kind)) is None:
                return rows[-1] in self.final.values() and kind == "$END"
            _, size, origin = reduce
            if size:
                del rows[-size:]
            if origin not in rows[-1].goto:
                return kind == "$END"
            rows.append(rows[-1].goto[origin])
        return True
