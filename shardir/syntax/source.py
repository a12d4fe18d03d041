"""A source text, locations in it, and diagnostics; warnings and remarks of passes."""

import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from xdsl.dialects.builtin import FileLineColLoc, IntAttr, StringAttr
from xdsl.ir import Operation, SSAValue

from shardir.diagnostics import Diagnostic, Located
from shardir.dialects.locations import file_location, file_name, op_name

if TYPE_CHECKING:  # few commands read plans
    from shardir.algebra.plan import LineError

WORD = re.compile(r'"[^"\n]*"|[\w.$]+')


def new_location(file: StringAttr, line: IntAttr, column: IntAttr) -> FileLineColLoc:
    """Return a location without the checks of its constructor, for speed: each op gets one."""
    loc = object.__new__(FileLineColLoc)
    put = object.__setattr__
    put(loc, "filename", file)
    put(loc, "line", line)
    put(loc, "column", column)
    return loc


class Source:
    """A text, its name, and the offsets at which its lines begin."""

    def __init__(self, text: str, name: str = "<input>"):
        self.text, self.name = text, name
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.file = file_name(name)
        self.offsets: dict[Operation, int] = {}
        """The offsets of operations with an explicit `loc(...)`."""
        self.definitions: dict[int, Sequence[SSAValue]] | None = None
        """The values of each defined name, by its offset, where a caller asks for them by `{}`."""
        self._ints: dict[int, IntAttr] = {}
        self._line = 0

    def _int(self, n: int) -> IntAttr:
        if (attribute := self._ints.get(n)) is None:
            attribute = self._ints[n] = IntAttr(n)
        return attribute

    def line_column(self, pos: int) -> tuple[int, int]:
        line = bisect_right(self.starts, pos)
        return line, pos - self.starts[line - 1] + 1

    def location(self, pos: int) -> FileLineColLoc:
        starts, line = self.starts, self._line
        if not (starts[line] <= pos and (line + 1 == len(starts) or pos < starts[line + 1])):
            line = self._line = bisect_right(starts, pos) - 1
        return new_location(self.file, self._int(line + 1), self._int(pos - starts[line] + 1))

    def line_text(self, line: int) -> str:
        if not 0 < line <= len(self.starts):
            return ""
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return self.text[self.starts[line - 1] : end].rstrip("\r\n")

    def at(
        self, start: int, end: int, message: str, notes: Sequence[str] = (), severity: str = "error"
    ) -> Diagnostic:
        """Return a diagnostic for the range [start, end) of the text. A single character stands for
        the word that begins there: errors within attributes know their start only."""
        if end == start + 1:
            end = max(end, self._word_end(start))
        line, column = self.line_column(start)
        return Diagnostic(
            message, self.name, line, column, max(1, end - start), self.line_text(line),
            tuple(notes), severity,
        )  # fmt: skip

    def at_line(self, error: "LineError") -> Diagnostic:
        """Return a diagnostic for an error, from its column to the end of its line."""
        start = self.starts[error.number - 1]
        end = start + len(self.line_text(error.number))
        return self.at(start + error.column, end, error.message)

    def at_op(self, op: Operation | None, message: str, notes: Sequence[str] = ()) -> Diagnostic:
        """Return a diagnostic for an op, at its name in this text or at its own location."""
        if op is None:
            return Diagnostic(message, self.name, notes=tuple(notes))
        if (pos := self.offsets.get(op)) is not None:
            return self.at(pos, self._word_end(pos), message, notes)
        place = file_location(op.location)
        if place is None:
            return Diagnostic(f"{op_name(op)}: {message}", self.name, notes=tuple(notes))
        file, line, column = place
        if file != self.file.data or not 0 < line <= len(self.starts):
            return Diagnostic(f"{op_name(op)}: {message}", file, line, column, notes=tuple(notes))
        pos = self.starts[line - 1] + column - 1
        return self.at(pos, self._word_end(pos), message, notes)

    def _word_end(self, pos: int) -> int:
        m = WORD.match(self.text, pos)
        return m.end() if m else pos + 1


_remarks: ContextVar[list[str] | None] = ContextVar("remarks", default=None)


@contextmanager
def collect_remarks() -> Iterator[list[str]]:
    """Collect the remarks of passes within the block."""
    remarks: list[str] = []
    token = _remarks.set(remarks)
    try:
        yield remarks
    finally:
        _remarks.reset(token)


def remark(message: str) -> None:
    """Record a remark about a decision of a pass, if remarks are collected."""
    if (remarks := _remarks.get()) is not None:
        remarks.append(message)


_warnings: ContextVar[list[Located] | None] = ContextVar("warnings", default=None)


@contextmanager
def collect_warnings() -> Iterator[list[Located]]:
    """Collect the warnings of passes within the block, for a tool to show."""
    located: list[Located] = []
    token = _warnings.set(located)
    try:
        yield located
    finally:
        _warnings.reset(token)


def warn(op: Operation | None, message: str) -> None:
    """Warn about a program that is valid, but may not be what its author meant."""
    if (located := _warnings.get()) is not None:
        located.append((op, message))
    else:
        where = file_location(op.location) if op is not None else None
        prefix = ":".join(map(str, where)) + ": " if where else ""
        warnings.warn(f"{prefix}{message}", stacklevel=2)
