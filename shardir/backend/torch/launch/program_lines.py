"""The lines of an emitted program: which collective is on one, and which lines of the source it
comes from, by the comments (docs/contribute/architecture.md)."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

NAMES = 3
"""The maximum number of values, and of lines of the source, that a text names."""

SOURCE = re.compile(r"\bat (\S+:\d+)\b")
"""A line of the source in the comment of a collective."""

COMMENT = re.compile(r"(?:^|\s)# (\S+:\d+)$")
"""The comment with the source line of a statement, on its first line or before it."""

BETWEEN_STEPS = "the exchange between two steps"


class LineText(NamedTuple):
    """The text of a line: its op, and the source lines of the op."""

    what: str
    sources: tuple[str, ...] = ()


class LineTexts:
    """The texts of the lines of a program file; empty for a file that cannot be read or parsed."""

    def __init__(self, path: Path):
        self.name = path.name
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            text, tree = "", ast.Module([], [])
        self._lines = text.split("\n")
        self._functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]

    def describe(self, line: int) -> LineText:
        """Return the text of a line."""
        function = next((f for f in self._functions if _has(f, line)), None)
        if function is None:
            return LineText(BETWEEN_STEPS if self._functions else "a collective")
        if line == function.lineno:
            return LineText(function.name, self._first_source(function))
        statement = function
        for node in ast.walk(function):
            if isinstance(node, ast.stmt) and _has(node, line):
                statement = node  # the innermost one comes last
        what = next(filter(None, (self._call(n, function) for n in ast.walk(statement))), None)
        return LineText(what or "a collective", self._sources(statement.lineno, function.lineno))

    def _call(self, node: ast.AST, function: ast.FunctionDef) -> str | None:
        """Return the text of a call of a collective, or of the wait for one."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return None
        of = node.func.value
        if node.func.attr == "wait" and isinstance(of, ast.Name):
            started = self._start(of.id, node.lineno, function)
            return f"the end of {started or of.id}"
        if not (isinstance(of, ast.Name) and node.args and _name(node.args[0]).endswith("mesh")):
            return None
        values = node.args[1] if len(node.args) > 1 else None
        several = values.elts if isinstance(values, ast.List | ast.Tuple) else [values]
        names = [_name(value) for value in several if value is not None]
        shown = ", ".join(filter(None, names[:NAMES])) + (", ..." if len(names) > NAMES else "")
        return node.func.attr.replace("_", "-") + (f" of {shown}" if shown else "")

    def _start(self, name: str, before: int, function: ast.FunctionDef) -> str | None:
        """Return the text of the collective whose result a variable is to be."""
        found = None
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Assign)
                and node.lineno < before
                and any(_name(target) == name for target in node.targets)
                and (text := self._call(node.value, function))
            ):
                found = text
        return found

    def _sources(self, line: int, first: int) -> tuple[str, ...]:
        """Return the lines of the source that the comment before a line names, or the last ones
        before it."""
        block = []
        for at in range(line - 2, first - 1, -1):
            text = self._lines[at].strip()
            if not text.startswith("#"):
                break
            block.insert(0, text[1:].strip())
        found = list(dict.fromkeys(SOURCE.findall(" ".join(block))))
        if found:
            return (*found[:NAMES], *(["..."] if len(found) > NAMES else []))
        comments = (COMMENT.search(self._lines[at]) for at in range(line - 1, first - 1, -1))
        last = next(filter(None, comments), None)
        return (last[1],) if last is not None else ()

    def _first_source(self, function: ast.FunctionDef) -> tuple[str, ...]:
        """Return the first line of the source that a function names."""
        for text in self._lines[function.lineno : function.end_lineno]:
            if found := COMMENT.search(text):
                return (found[1],)
        return ()


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _name(node: ast.AST) -> str:
    """Return the text of a variable, of an element, or of an expression of variables."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Subscript | ast.Attribute) else ""
