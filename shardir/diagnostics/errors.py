"""The errors that bad input raises, and a diagnostic: an error with its source location."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardir.diagnostics.terminal import STYLES, Paint, painter, plain

SHOWN = 300
"""The number of characters of a source line to show at most: a constant may have 30,000 numbers."""


class ShardirError(Exception):
    """Bad input. The message has the expected and the found input, and the fix."""


class NotationError(ShardirError):
    """Text of an attribute that does not parse.

    `offset` counts characters from the start of the attribute's text.
    """

    def __init__(self, message: str, offset: int = 0):
        super().__init__(message)
        self.message, self.offset = message, offset


Located = tuple[Any, str]
"""An operation, or None where no single one is wrong, and a message."""


@dataclass(frozen=True)
class Diagnostic:
    """A message and its source location, which is unknown where `line` is 0."""

    message: str
    file: str = "<input>"
    line: int = 0
    column: int = 0
    length: int = 1
    source: str = ""
    notes: tuple[str, ...] = ()
    severity: str = "error"

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def __str__(self) -> str:
        return self.rendered(plain)

    def rendered(self, paint: Paint) -> str:
        """Return the text; with colours, the source line has its number before it."""
        style = self.severity if self.severity in STYLES else "note"
        head = paint(f"{self.severity}:", style)
        lines = [f"{paint(f'{self.location}:', 'bold')} {head} {paint(self.message, 'bold')}"]
        gutter = gap = " "
        if paint is not plain:
            gutter, gap = f"{self.line:>4} | ", "     | "
        if self.source:
            first = max(0, self.column - 1 - SHOWN // 2) if len(self.source) > SHOWN else 0
            shown = self.source[first : first + SHOWN]
            before = self.source[first : self.column - 1]
            indent = "".join("\t" if c == "\t" else " " for c in before)
            width = max(1, min(self.length, len(shown) - len(before)))
            lines.append(f" {paint(gutter, 'dim')}{shown}")
            lines.append(f" {paint(gap, 'dim')}{indent}{paint('^' * width, style)}")
        lines += [f"  {paint('note:', 'note')} {n}" for n in self.notes]
        return "\n".join(lines)

    def show(self) -> None:
        """Print the text on stderr."""
        print(self.rendered(painter(sys.stderr)), file=sys.stderr)


class Locator(Protocol):
    """A source text that finds the location of an operation."""

    def at_op(self, op: Any, message: str) -> Diagnostic: ...


class Failure(ShardirError):  # noqa: N818 - a set of errors
    """All errors of one pass, each with its operation."""

    def __init__(self, errors: Sequence[Located] | str):
        self.errors: list[Located] = [(None, errors)] if isinstance(errors, str) else list(errors)
        super().__init__("\n".join(message for _, message in self.errors))

    @classmethod
    def at(cls, op: Any, message: str) -> "Failure":
        return cls([(op, message)])

    def diagnostics(self, source: Locator) -> list[Diagnostic]:
        return [source.at_op(op, message) for op, message in self.errors]


class ParseErrors(ShardirError):  # noqa: N818 - a set of errors
    """All errors of one text."""

    def __init__(self, errors: Sequence[Diagnostic]):
        self.errors = list(errors)
        super().__init__("\n".join(map(str, self.errors)))

    def show(self) -> None:
        """Print the errors on stderr."""
        for error in self.errors:
            error.show()
