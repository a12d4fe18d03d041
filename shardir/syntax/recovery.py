"""Recovery from syntax errors: report, drop the statement, and resume at the next one."""

import re
from typing import Any

from xdsl.ir import Region

from shardir.diagnostics import did_you_mean, one_of
from shardir.grammar.machine import Row, Token, UnexpectedError
from shardir.syntax.builder import ModuleBuilder
from shardir.syntax.errors import StopError

BLANK = r"[^\S\n]*+"
RESULT_LIST = rf"{BLANK}(?:%[\w$.-]++{BLANK}(?::{BLANK}\d++{BLANK})?,?{BLANK})++=(?!=)"
RESULTS = re.compile(RESULT_LIST, re.ASCII)
STATEMENT = re.compile(
    rf"{RESULT_LIST}|{BLANK}(?:[A-Za-z_]\w*+\.[\w.]++(?!{BLANK}=)"
    rf'|"[^"\n]*+"{BLANK}\(|[}}^]|[#!][\w$-]++{BLANK}=|(?:module|return|call)\b)',
    re.ASCII,
)
ARGUMENT = re.compile(r"(%[\w$.-]+)\s*:", re.ASCII)
DEFINED_SYMBOL = re.compile(
    r"\s*(?!func\.call|call)[A-Za-z_][\w.]*\s+(?:(?:private|public|nested)\s+)?"
    r'@([A-Za-z_][\w$.]*|"[^"\n]*")',
    re.ASCII,
)
BRACKET = re.compile(r'"(?:[^"\\\n]|\\.)*+"|//[^\n]*|[{}\n]')
ANY_BRACKET = re.compile(r'->|"(?:[^"\\\n]|\\.)*+"|//[^\n]*|[<>(){}\[\]%"]')
CLOSING = re.compile(rf"}}{BLANK}(?:\n|\Z|//|\)|}}|:|loc\b|\{{|,{BLANK}\{{{BLANK}\n)")
OPENED = re.compile(r"(?:[A-Za-z_#!][\w.$-]*+\s*+(?=<))?[<({\[]", re.ASCII)
COMMENT = re.compile(r"//[^\n]*")
OP_ON_LINE = re.compile(r"(?<![\w%@#!.\"])[A-Za-z_]\w*(?:\.\w+)+", re.ASCII)
WORD_OF_SYNTAX = re.compile(r"`(\w+)`")
CLOSES = {"<": ">", "(": ")", "{": "}", "[": "]"}
NAMES = {
    "SSA_ID": "a value", "BLOCK_ID": "a block name", "STRING": "a string", "SYMBOL": "a symbol",
    "TYPE": "a type", "FN_TYPE": "a function type", "ATTR": "an attribute",
    "BRACES": "an attribute dictionary", "LOC": "", "DENSE": "dense<...>", "NUMBER": "a number",
    "SQUARES": "a list in '[...]'", "ANGLES": "'<...>'", "COUNT": "a number of results",
    "ALIAS_ID": "", "OP_NAME": "an operation", "MODULE": "an operation", "FUNC": "an operation",
    "RECOVER": "", "NEVER": "", "OTHER": "an operation", "$END": "the end of the file",
}  # fmt: skip


class Recovery:
    """Panic mode for one parser: drop the current statement, resume at the next one."""

    def __init__(self, builder: ModuleBuilder):
        self.builder = builder
        self.unopened = 0

    def recover_within(self, stack: list[Row], values: list[Any], e: UnexpectedError) -> int:
        """Like `recover`, for a part of a statement. Raises the error if it is not in a region."""
        enter_region(stack, values)
        if not any("op" in row.goto for row in stack):
            e.read_body |= any(map(has_region, values))
            raise e
        return self.recover(stack, values, e)

    def recover(self, stack: list[Row], values: list[Any], e: UnexpectedError) -> int:
        """Repair the stacks, and return the offset at which to resume."""
        builder, text = self.builder, self.builder.source.text
        unknown: Token | None = values[-1] if "NEVER" in stack[-1].shift else None
        start = scan = e.start
        read_body = e.read_body
        enter_region(stack, values)
        while "op" not in stack[-1].goto:
            if len(stack) == 1:
                raise StopError
            stack.pop()
            value = values.pop()
            read_body = read_body or has_region(value)
            if (t := first_token(value)) is not None:
                start = min(start, t.start)
        reported = builder.bad or builder.head_lost
        builder.bad = builder.head_lost = False
        builder.arguments, builder.isolated = None, False
        if not read_body:
            scan = start
        following, body = next_statement(text, scan)
        if e.got == "}" and start == e.start and self.unopened:
            self.unopened -= 1
        elif unknown is not None and (op := after_op(text, unknown)):
            self.report_word(unknown, op)
        elif reported or self.same_line(text, start):
            pass  # the remainder of a statement with a reported error
        elif unknown is not None:
            builder.unregistered(unknown, unknown.value)
        else:
            self.report(e, text, start, following)
        if not e.got:
            raise StopError
        self.lose(text, start, body + 1 if body >= 0 else following)
        if body < 0:
            return following
        row, _ = stack[-1].shift["RECOVER"]
        stack.append(row)
        values.append(None)
        builder.lenient = True
        return body

    def same_line(self, text: str, start: int) -> bool:
        """Whether `start` is in the middle of a line with a reported error."""
        errors = self.builder.log.errors
        line = text.rfind("\n", 0, start) + 1
        number = self.builder.source.line_column(start)[0]
        return bool(errors) and errors[-1].line == number and bool(text[line:start].strip())

    def lose(self, text: str, start: int, end: int) -> None:
        """Drop a statement: mark the names that it may define as lost."""
        builder = self.builder
        builder.names.scope.lost = True
        head = text[start:end]
        if m := RESULTS.match(head):
            builder.names.lose(re.findall(r"%[\w$.-]+", m[0]))
        if head.startswith("^"):
            builder.names.lose(ARGUMENT.findall(head))
        if m := DEFINED_SYMBOL.match(head):
            builder.log.incomplete.symbols.add(m[1].strip('"'))
        if "{" not in head[-2:] and head.startswith(("func.func", "builtin.module")):
            builder.names.scope.lenient = True  # the `{` is missing: the body follows
            self.unopened += 1

    # ---- messages ----
    def report(self, e: UnexpectedError, text: str, start: int, following: int) -> None:
        report = self.builder.log.report
        if not e.got:
            self.report_end(e, text)
            return
        line = text.rfind("\n", 0, e.start) + 1
        if start < line and following <= line and STATEMENT.match(text, line):
            last = start + len(COMMENT.sub(blank, text[start:line]).rstrip())
            message = "this operation is not complete"
            if not text[line : e.start].strip():
                message += f": {self.expected(e)}"
            report(max(start, last - 1), last, message)
        elif (m := OPENED.match(text, e.start)) and (why := unclosed(text, m.end() - 1)):
            report(m.end() - 1, m.end(), why)
        elif e.got == '"':
            report(e.start, e.end, "expected the closing '\"' of this string, got none")
        else:
            literals = e.literals
            hint = did_you_mean(e.got, [literals[k] for k in e.expected if k in literals])
            report(e.start, e.end, f"{self.expected(e)}, got {shown(e.got)}{hint}")

    def report_word(self, t: Token, op: str) -> None:
        """Report a word that the syntax of the preceding op does not have. It replaces an error of
        the op, whose end the parser may have missed."""
        log = self.builder.log
        if log.errors and log.errors[-1].line == self.builder.source.line_column(t.start)[0]:
            log.errors.pop()
        known = self.builder.formats.ops.get(op)
        syntax = known.get_irdl_definition().assembly_format if known is not None else None
        hint = did_you_mean(t.value, WORD_OF_SYNTAX.findall(syntax or ""))
        log.report_at(t, f"expected ':' with types, or the end of {op}, got {t.value}{hint}")

    def report_end(self, e: UnexpectedError, text: str) -> None:
        end = max(e.after, 1)
        notes = []
        if (opened := self.builder.names.scope.opened) is not None:
            line = self.builder.source.line_column(opened.start)[0]
            notes.append(f"the '{{' on line {line} is not closed")
        self.builder.log.report(
            end - 1, end, f"{self.expected(e)}, got the end of the file", *notes
        )

    def expected(self, e: UnexpectedError) -> str:
        names = {human(k, e.literals) for k in e.expected} - {""}
        if "an operation" in names:
            names -= {"a value", "a string"}
        if "a type" in names:
            names -= {"a function type"}
        return "expected " + one_of(names or {"nothing more"})


def human(kind: str, literals: dict[str, str]) -> str:
    """Return the name of a terminal in messages."""
    if kind in NAMES:
        return NAMES[kind]
    if kind.startswith("OPS"):
        return "an operation"
    return f"'{literals.get(kind, kind)}'"


def has_region(value: Any) -> bool:
    """Whether the value of a rule is a region, or a list with one."""
    return isinstance(value, Region) or (
        isinstance(value, list) and any(isinstance(v, Region) for v in value)
    )


def after_op(text: str, t: Token) -> str:
    """Return the name of the op before a word on its line; empty if there is none, if a body is in
    between, or if the word has a dot."""
    line = text.rfind("\n", 0, t.start) + 1
    names = OP_ON_LINE.findall(text, line, t.start)
    is_separate = "." in t.value or text[line : t.start].rstrip().endswith(("{", "}"))
    return names[-1] if names and not is_separate else ""


def enter_region(stack: list[Row], values: list[Any]) -> None:
    """Reduce the mid-rule action `open` before a region."""
    for call, size, origin in stack[-1].reduce.values():
        if origin == "open" and size == 1:
            del stack[-1]
            values.append(call([values.pop()]))
            stack.append(stack[-1].goto[origin])
            return


def next_statement(text: str, start: int) -> tuple[int, int]:
    """Return the start of the statement after `start`, and the offset of the `{` of a body to parse
    before it, or -1."""
    opened: list[int] = []
    for m in BRACKET.finditer(text, start):
        pos = m.start()
        if m[0] == "\n":
            if not STATEMENT.match(text, m.end()):
                continue
            while opened and not ends_line(text, opened[-1]):
                opened.pop()  # an attribute dictionary that was never closed
            return (m.end(), -1) if not opened else (opened[-1], opened[-1])
        if m[0] == "{":
            opened.append(pos)
        elif m[0] == "}":
            if opened:
                opened.pop()
            elif pos == start:
                return pos + 1, -1
            elif CLOSING.match(text, pos):
                return pos, -1
    return len(text), -1


def ends_line(text: str, brace: int) -> bool:
    """Whether a `{` opens a region: only a comment may follow on its line."""
    return re.compile(r"\{[^\S\n]*+(?://[^\n]*+)?\n").match(text, brace) is not None


def unclosed(text: str, at: int) -> str:
    """Return the error message if the bracket at `at` is not closed before the next value, else an
    empty text."""
    depth, opens = 0, text[at]
    for m in ANY_BRACKET.finditer(text, at):
        if m[0] == opens:
            depth += 1
        elif m[0] == CLOSES[opens]:
            depth -= 1
            if depth == 0:
                return ""
        elif m[0] == '"':
            return f"expected the closing '\"' of a string after this '{opens}', got none"
        elif m[0] == "%":
            if opens == "(":
                return ""
            break
    return f"expected the '{CLOSES[opens]}' of this '{opens}', got none, or too much nesting"


def blank(m: re.Match[str]) -> str:
    return " " * len(m[0])


def shown(word: str) -> str:
    if word == "\0":
        return "a NUL byte"
    return repr(word if len(word) < 40 else word[:37] + "...")


def first_token(value: Any) -> Token | None:
    """Return the first token in the value of a rule, if it has one."""
    while isinstance(value, list | tuple) and value:
        value = next((v for v in value if isinstance(v, Token | list | tuple)), None)
    return value if isinstance(value, Token) else None
