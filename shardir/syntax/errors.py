"""The errors of one text, and the parts of its module that are missing because of them."""

from shardir.diagnostics import Diagnostic
from shardir.grammar.machine import Token
from shardir.syntax.source import Source
from shardir.syntax.verify import Incomplete

MAX_ERRORS = 50
"""The number of errors after which parsing stops."""


class StopError(Exception):
    """Parsing stops: too many errors, or the end of the text."""


class ErrorLog:
    """The errors of a source, in the order in which they are found."""

    def __init__(self, source: Source):
        self.source = source
        self.errors: list[Diagnostic] = []
        self.incomplete = Incomplete()

    def report(self, start: int, end: int, message: str, *notes: str) -> None:
        """Report an error of the range [start, end) once.

        Raises:
            StopError: there are MAX_ERRORS of them.
        """
        found = self.source.at(start, end, message, notes)
        if found in self.errors:
            return
        self.errors.append(found)
        if len(self.errors) == MAX_ERRORS:
            self.errors.append(
                Diagnostic("too many errors; the rest is not shown", self.source.name)
            )
            raise StopError

    def report_at(self, t: Token, message: str, *notes: str) -> None:
        """Report an error of a token."""
        self.report(t.start, t.end, message, *notes)
