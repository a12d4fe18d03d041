"""`// expected-error {{text}}`: errors that a test file expects on the lines that cause them.

`@+1`, `@-1`, `@below` and `@above` move the line; `@unknown` expects an error without a location.
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
    """An expected error or warning. `line` is 0 without a location; `written` is the line of the
    expectation."""

    severity: str
    line: int
    written: int
    text: str

    def fits(self, d: Diagnostic) -> bool:
        return d.severity == self.severity and d.line == self.line and self.text in d.message


def expected_messages(text: str) -> list[Expected]:
    """Return the expected errors and warnings of a text."""
    expected = []
    for number, line in enumerate(text.split("\n"), 1):
        if "expected-" not in line or "//" not in line:
            continue
        for m in EXPECTED.finditer(line, line.index("//")):
            offset = m[2] or "+0"
            target = 0 if offset == "unknown" else number + (OFFSETS.get(offset) or int(offset))
            expected.append(Expected(m[1], target, number, m[3]))
    return expected


def compare(name: str, text: str, diagnostics: Sequence[Diagnostic]) -> list[str]:
    """Return a line for each unexpected diagnostic and for each missing one."""
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
