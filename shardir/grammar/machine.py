"""LALR(1) tables, run by one loop with a lexer for each parser state.

Lark's own loop and lexer keep line counts and token objects, which take half of the time of a large
module. This loop keeps offsets only, drops punctuation, and turns leaf tokens into values as it
shifts them. It also owns its stacks, which error recovery needs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from shardir.grammar.tables import Production, Terminal, tables_of

SKIP = r"(?:\s++|//[^\n]*+)*+"
_skip = re.compile(SKIP, re.ASCII)
ODD = re.compile(r'[A-Za-z_][\w$.]*|%[\w$.-]+|[@#!^][\w$.-]+|"[^"\n]*"|\d+|->|.', re.ASCII | re.S)
WORD = re.compile(r"[A-Za-z_][\w$.]*+", re.ASCII)


class Token:
    """A terminal of a text, with its position."""

    __slots__ = ("end", "start", "value")

    def __init__(self, value: str, start: int, end: int):
        self.value, self.start, self.end = value, start, end


class UnexpectedError(Exception):
    """A terminal that no rule allows here; `after` is the end of the terminal before it."""

    def __init__(self, after: int, start: int, end: int, got: str, expected: list[str]):
        super().__init__(got)
        self.after, self.start, self.end = after, start, end
        self.got, self.expected = got, expected
        self.literals: dict[str, str] = {}
        """The texts of punctuation and keywords in the grammar."""
        self.read_body = False
        """Whether the text from `start` on follows the regions of the statement."""


class Others(Protocol):
    """Reads parts of a text that are not in the grammar."""

    def knows(self, word: str) -> bool: ...

    def read(self, word: str, start: int, end: int) -> tuple[Any, int]:
        """Return the value of the part that begins with a word, and its end. Raises
        UnexpectedError."""
        ...


Matcher = Callable[[str, int, int], Any]
"""Matches a terminal at a position; the last group of the match is named after the terminal."""

MAX_SINGLE = 8
"""The number of times that a state tries the shared regexes of its terminals one by one, before it
compiles one regex for all of them: the compilation takes longer than to parse a short text."""


class Row:
    """The actions of one state. They are read when the state is first reached: few are."""

    __slots__ = ("goto", "is_read", "lexed", "match", "number", "reduce", "shift", "words")

    def __init__(self, number: int):
        self.number = number
        self.is_read = False
        self.lexed = 0
        self.shift: dict[str, tuple[Row, Callable[[str, int, int], Any] | None]] = {}
        self.reduce: dict[str, tuple[Callable[[list[Any]], Any], int, str]] = {}
        self.goto: dict[str, Row] = {}
        self.match: Matcher | None = None
        self.words: dict[str, dict[str, str]] = {}

    @property
    def kinds(self) -> list[str]:
        return [*self.shift, *self.reduce]


class Machine:
    """A grammar with its actions, ready to run.

    `convert`: for each leaf terminal, the function that makes its value when it is shifted.
    `words`: spellings of a terminal that are separate terminals, such as names of ops.
    `others`: for a terminal, the reader of what begins with one of its other spellings; such a
    spelling is the terminal OTHER.
    """

    def __init__(
        self,
        grammar: str,
        starts: Sequence[str],
        actions: object,
        convert: Mapping[str, Callable[[str, int, int], Any]] | None = None,
        words: dict[str, dict[str, str]] | None = None,
        token: Callable[[str, int, int], Any] = Token,
        others: Mapping[str, Others] | None = None,
    ):
        self.tables = tables = tables_of(grammar, starts)
        self.actions, self.words = actions, words or {}
        self.others = others or {}
        self.terminals = {t.name: t for t in tables.terminals}
        conversions = convert or {}
        self.makes = {name: conversions.get(name, token) for name in tables.kept}
        self.rows: dict[int, Row] = {}
        self.first = {start: self._row(n) for start, n in tables.first.items()}
        self.final = {start: self._row(n) for start, n in tables.final.items()}
        self.singles: dict[str, Matcher] = {}
        """The matcher of each terminal."""

    @property
    def literals(self) -> dict[str, str]:
        """The texts of punctuation and keywords."""
        return {t.name: t.text for t in self.terminals.values() if t.is_literal}

    def _row(self, number: int) -> Row:
        if (row := self.rows.get(number)) is None:
            row = self.rows[number] = Row(number)
        return row

    def _read(self, row: Row) -> None:
        """Read the actions of a state."""
        tables = self.tables
        state = tables.state(row.number)
        row.shift = {n: (self._row(to), self.makes.get(n)) for n, to in state.shift.items()}
        row.goto = {name: self._row(to) for name, to in state.goto.items()}
        for number, among in state.reduce:
            rule = tables.rule(number)
            reduction = _reduction(rule, self.actions), rule.size, rule.origin
            row.reduce |= dict.fromkeys(tables.lookaheads[among], reduction)
        row.is_read = True

    def _prepare(self, row: Row) -> Matcher:
        """Return the matcher of a state, made on first use: most states never lex."""
        if not row.is_read:
            self._read(row)
        defs = [self.terminals[k] for k in row.kinds if k in self.terminals]
        for t in defs:
            literals = {n: self.terminals[n] for n in self.tables.matched_literals.get(t.name, ())}
            words = {w.text: n for n, w in literals.items() if w in defs}
            words = dict(self.words.get(t.name, {})) | words
            if words:
                row.words[t.name] = words
        inner = {name for w in row.words.values() for name in w.values()}
        defs = [t for t in defs if t.name not in inner]
        defs.sort(key=lambda t: (-t.priority, t.is_literal, -len(t.text), t.name))
        singles = [self._single(t) for t in defs]

        def match(text: str, pos: int, stop: int) -> Any:
            row.lexed += 1
            if row.lexed > MAX_SINGLE:
                regexes = "|".join(map(_regex, defs)) or "(?!)"
                row.match = re.compile(f"{SKIP}(?:{regexes})", re.ASCII).match
                return row.match(text, pos, stop)
            return next(filter(None, (single(text, pos, stop) for single in singles)), None)

        row.match = match
        return match

    def _single(self, t: Terminal) -> Matcher:
        """Return the matcher of one terminal."""
        if (matcher := self.singles.get(t.name)) is None:
            matcher = self.singles[t.name] = re.compile(SKIP + _regex(t), re.ASCII).match
        return matcher

    def run(
        self,
        text: str,
        start: str,
        pos: int = 0,
        end: int | None = None,
        recover: Callable[[list[Row], list[Any], UnexpectedError], int] | None = None,
    ) -> Any:
        """Parse `text[pos:end]` and return its value. `recover` repairs the stacks after an error,
        and returns the position from which to resume.

        Raises:
            UnexpectedError: a terminal does not fit, and there is no `recover`.
        """
        return self._run(text, start, pos, len(text) if end is None else end, recover, False)[0]

    def run_part(
        self, text: str, start: str, pos: int,
        recover: Callable[[list[Row], list[Any], UnexpectedError], int],
    ) -> tuple[Any, int]:  # fmt: skip
        """Parse a part of a text, from `pos` to the end of a rule, whatever follows. Return its
        value and its end."""
        return self._run(text, start, pos, len(text), recover, True)

    def _run(
        self, text: str, start: str, pos: int, stop: int,
        recover: Callable[[list[Row], list[Any], UnexpectedError], int] | None, is_part: bool,
    ) -> tuple[Any, int]:  # fmt: skip
        row, final, others = self.first[start], self.final[start], None
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
                    word = row.words[kind].get(value)
                    if word is None and kind in self.others and self.others[kind].knows(value):
                        others, word = self.others[kind], "OTHER"
                    kind = word or kind
            while True:
                if (shift := row.shift.get(kind)) is not None:
                    to, make = shift
                    if kind == "OTHER":
                        assert others is not None
                        try:
                            made, finish = others.read(value, begin, finish)
                        except UnexpectedError as error:
                            if recover is None:
                                raise
                            stack.append(to)
                            values.append(Token(value, begin, finish))
                            pos = recover(stack, values, error)
                            row = stack[-1]
                            break
                    else:
                        made = None if make is None else make(value, begin, finish)
                    row = to
                    stack.append(row)
                    values.append(made)
                    pos = finish
                    if is_part and (call := self._completion(stack, final)) is not None:
                        return call(values), pos
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
                if not row.is_read:
                    self._read(row)
                stack.append(row)
                values.append(call(children))
                if row is final and (is_part or kind == "$END"):
                    return values[-1], pos

    def _completion(self, stack: list[Row], final: Row) -> Callable[[list[Any]], Any] | None:
        """Return the reduction of a whole stack, if it does not depend on the next terminal: after
        a part, another grammar may go on."""
        row = stack[-1]
        if not row.is_read:
            self._read(row)
        if row.shift:
            return None
        call, size, origin = next(iter(row.reduce.values()))
        return call if size == len(stack) - 1 and stack[0].goto.get(origin) is final else None

    def _unexpected(
        self, text: str, after: int, begin: int, stop: int, stack: list[Row]
    ) -> UnexpectedError:
        m = ODD.match(text, begin, stop)
        expected = [k for k in dict.fromkeys(stack[-1].kinds) if self.accepts(stack, k)]
        if m is None:
            error = UnexpectedError(after, stop, stop + 1, "", expected)
        else:
            error = UnexpectedError(after, begin, m.end(), m[0], expected)
        error.literals = self.literals
        return error

    def accepts(self, stack: list[Row], kind: str) -> bool:
        """Whether a terminal can follow. A reduction alone does not show it: it may end in a state
        that refuses the terminal."""
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
            if not rows[-1].is_read:
                self._read(rows[-1])
        return True


def _regex(t: Terminal) -> str:
    """Return the regex of a terminal, in a group with its name."""
    regex = t.text
    if t.is_literal:
        regex = re.escape(t.text) + (r"(?![\w$.])" if WORD.fullmatch(t.text) else "")
    return f"(?P<{t.name}>{regex})"


def _reduction(rule: Production, actions: object) -> Callable[[list[Any]], Any]:
    """Return the function from the values of a rule's children to the rule's value, by default
    their list."""
    make = getattr(actions, rule.method, _list_children)
    if rule.expands:
        make = partial(_make_unless_single, make)
    picks = rule.picks
    if picks == [(i, False) for i in range(rule.size)]:
        return make
    if not any(inlined for _, inlined in picks):
        return partial(_make_of_picked, make, [i for i, _ in picks])
    return partial(_make_of_inlined, make, picks)


def _list_children(children: list[Any]) -> list[Any]:
    return children


def _make_unless_single(make: Callable[[list[Any]], Any], children: list[Any]) -> Any:
    return children[0] if len(children) == 1 else make(children)


def _make_of_picked(make: Callable[[list[Any]], Any], picks: list[int], children: list[Any]) -> Any:
    return make([None if i < 0 else children[i] for i in picks])


def _make_of_inlined(
    make: Callable[[list[Any]], Any], picks: list[tuple[int, bool]], children: list[Any]
) -> Any:
    picked: list[Any] = []
    for i, inlined in picks:
        if not inlined:
            picked.append(None if i < 0 else children[i])
        elif picked:
            picked += children[i]
        else:  # reuses the list, which has no other owner: copies would be quadratic
            picked = children[i]
    return make(picked)
