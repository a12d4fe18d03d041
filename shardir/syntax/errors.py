"""The errors of one text, and the resulting gaps in its module."""

from shardir.diagnostics import Diagnostic
from shardir.grammar.machine import Token
from shardir.syntax.source import Source
from shardir.syntax.verify import Incomplete

MAX_ERRORS = 50
"""The maximum number of errors; then parsing stops."""


class StopError(Exception):
    """Parsing stops: too many errors, or the end of the text."""


class ErrorLog:
    """The errors of a source, in the order in which they are found."""

    def __init__(self, source: Source):
        self.source = source
        self.errors: list[Diagnostic] = []
        self.incomplete = Incomplete()

    def report(self, start: int, end: int, message: str, *notes: str) -> None:
        """Report an error in the range [start, end), unless it has been reported.

        Raises:
            StopError: there are MAX_ERRORS errors.
        """
        error = self.source.at(start, end, message, notes)
        if error in self.errors:
            return
        self.errors.append(error)
        if len(self.errors) == MAX_ERRORS:
            self.errors.append(
                Diagnostic("too many errors; the rest is not shown", self.source.name)
            )
            raise StopError

    def report_at(self, t: Token, message: str, *notes: str) -> None:
        """Report an error at a token."""
        self.report(t.start, t.end, message, *notes)
