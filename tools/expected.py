"""`// expected-error {{text}}`: errors that a test file expects on the lines that cause them.

`@+1`, `@-1`, `@below` and `@above` move the line; `@unknown` is an error without a location.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardir.diagnostics import Diagnostic

EXPECTED = re.compile(
    r"expected-(error|warning)\s*(?:@\s*([+-]\d+|below|above|unknown))?\s*\{\{(.*?)\}\}"
)
OFFSETS = {"below": 1, "above": -1}


@dataclass(frozen=True)
class Expected:
    """An expected error or warning; line 0 for one without a location."""

    severity: str
    line: int
    written: int
    text: str

    def fits(self, d: Diagnostic) -> bool:
        return d.severity == self.severity and d.line == self.line and self.text in d.message


def expected_messages(text: str) -> list[Expected]:
    """Return the expected errors and warnings of a text."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if "expected-" not in line or "//" not in line:
            continue
        for m in EXPECTED.finditer(line, line.index("//")):
            where = m[2] or "+0"
            at = 0 if where == "unknown" else number + (OFFSETS.get(where) or int(where))
            found.append(Expected(m[1], at, number, m[3]))
    return found


def compare(name: str, text: str, diagnostics: Sequence[Diagnostic]) -> list[str]:
    """Return a line for each unexpected diagnostic, and each expected one that is missing."""
    missing, unexpected = expected_messages(text), []
    for d in diagnostics:
        fitting = next((e for e in missing if e.fits(d)), None)
        if fitting is not None:
            missing.remove(fitting)
        else:
            unexpected.append(f"unexpected {d.severity}: {d}")
    return unexpected + [
        f"{name}:{e.written}: expected {e.severity} was not produced: {e.text}" for e in missing
    ]
