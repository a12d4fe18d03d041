"""Replacements that messages propose, by their form: `expected X, got Y; fix`.

expected a registered operation, got nn.rellu; did you mean nn.relu?     nn.rellu -> nn.relu
expected %h of type tensor<8xf32>, got tensor<4xf32>       tensor<4xf32> -> tensor<8xf32>
expected '>', got ')'                                                  ')' -> '>'
"""

import re
from dataclasses import dataclass

from shardir.diagnostics import Diagnostic
from shardir.syntax.source import Source

TENSOR = r"tensor<[^;]*?>"
FORMS = [re.compile(form) for form in (
    r"\b(?P<got>[^\s;]+); did you mean (?P<want>\S+)\?$",
    rf"expected .*?(?P<want>{TENSOR}), (?:as .*?, )?got (?P<got>{TENSOR})(?:; write .*)?$",
    r"expected '(?P<want>[^\w\s])', got '(?P<got>[^\w\s])'$",
)]  # fmt: skip


@dataclass(frozen=True)
class Fix:
    """The replacement of a range of the text."""

    start: int
    end: int
    old: str
    new: str


def fix_of(d: Diagnostic, source: Source, statement: tuple[int, int]) -> Fix | None:
    """Return the replacement that a diagnostic proposes: of the named text in its range, or else of
    the only such text in its statement. None without one.

    Args:
        statement: the range in which the named text may be.
    """
    if not d.line:
        return None
    found = next((m for form in FORMS if (m := form.search(d.message)) is not None), None)
    if found is None:
        return None
    old, new = (found[group].strip("'\"") for group in ("got", "want"))
    start = source.starts[d.line - 1] + d.column - 1
    if source.text.startswith(old, start):
        return Fix(start, start + len(old), old, new)
    for first, last, only in ((start, start + d.length, False), (*statement, True)):
        places = [m.start() for m in _whole(old).finditer(source.text, first, last)]
        if places and (len(places) == 1 or not only):
            return Fix(places[0], places[0] + len(old), old, new)
    return None


def _whole(word: str) -> re.Pattern[str]:
    """Match a text that is no part of a longer name."""
    before = r"(?<![\w.$#%@])" if word[:1].isalnum() else ""
    after = r"(?![\w$])" if word[-1:].isalnum() else ""
    return re.compile(before + re.escape(word) + after)
