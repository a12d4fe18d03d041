"""Words that docs/glossary.md replaces by the field's terms: where they still occur.

`python test/vocabulary.py [PATH ...]` lists them, with their number per file on top.

The last column of the glossary's tables has the words. A word counts in identifiers, comments,
docstrings, messages and pages, in all of its forms. Docstrings name what a thing is or does: their
titles do not begin with What or How, and with Whether only where the answer is a bool.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sources import tree

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"

EXEMPT = (GLOSSARY, Path(__file__), ROOT / "test" / "project" / "test_vocabulary.py")
"""Files that name the words."""

FORMS = {
    "digit": "digits?",
    "wire": "wires?|wired",
    "whole": "wholes?|whole",
    "contribution": "contribut(?:e|es|ed|ing|ion|ions)",
    "stated": "stated",
    "least": "least",
    "greatest": "greatest",
    "alike": "alike",
    "calculate": "calculat(?:e|es|ed|ing|ion|ions)",
    "mail": "mail",
    "settle": "settl(?:e|es|ed|ing)",
    "behind": "behind",
    "floor": r"floors|floor \d+",
    "room": "rooms?",
    "fault": "faults?|faulty",
    "mend": "mends?|mended|mending",
    "lie": "lie|lies|lying",
    "the documents": "the documents",
    "under way": "under way",
}
"""The forms of each word; one without an entry stands for itself."""

ALLOWED = (
    "make faults",  # a target of the Makefile
    '# whole: |f"whole: ',  # a comment of plans
    r"\bat least\b",
    r"\bAt least\b",
    r"\bat_least\b",
    r"\bleast[ _]squares\b",
    r"letters, digits",
    r"ASCII letters, digits",
    r"hand-?written digits",
    r"test digits",
    r"\bdigits\.(?:ir|npz)",
    r"make_digits",
    r"\bload[ _]digits\b",
    r"\bisdigit\b",
    r"\b(?:three|two|last|decimal|4300) digits?\b",
    r"COUNT[ _]DIGITS",
    r"digits? (?:of|that)\b",
    r"e-?mail",
)
"""Phrases in which such a word means something else."""


class Found(NamedTuple):
    file: str
    line: int
    word: str
    text: str


@cache
def words() -> tuple[str, ...]:
    """The words of the last column of the glossary's tables."""
    found: list[str] = []
    for line in GLOSSARY.read_text().splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[2] not in ("not", "---", ""):
            found += [w.strip() for w in cells[2].split(",")]
    return tuple(found)


@cache
def pattern() -> re.Pattern[str]:
    forms = "|".join(FORMS.get(w, re.escape(w)) for w in words())
    return re.compile(rf"(?<![A-Za-z])(?:{forms})(?![A-Za-z])", re.I)


@cache
def allowed() -> re.Pattern[str]:
    return re.compile("|".join(ALLOWED))


def spaced(identifier: str) -> str:
    """Return the words of an identifier, for those in camel case too."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", identifier)


def pieces(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, each with its first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        if t.type == tokenize.NAME:
            yield t.start[0], spaced(t.string)
        elif t.type in (tokenize.STRING, tokenize.COMMENT):
            yield from enumerate(t.string.splitlines(), t.start[0])


def files() -> Iterator[Path]:
    """Yield the sources and pages of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.ir", "*.lark"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    for name in listed:
        path = ROOT / name
        if path.is_file() and path not in EXEMPT:
            yield path


def occurrences(path: Path) -> Iterator[Found]:
    """Yield the words of the glossary's last column in a file."""
    if not pattern().search(spaced(path.read_text(encoding="utf-8"))):
        return  # most files have none, not even in what is allowed
    for line, text in pieces(path):
        for word in words_in(text):
            yield Found(str(path.relative_to(ROOT)), line, word, text.strip())


@cache
def words_in(text: str) -> list[str]:
    """Return the words of the glossary's last column in a text: a name, or a line."""
    return [m[0] for m in pattern().finditer(allowed().sub("", text))]


BOOLEAN = re.compile(r"bool|TypeGuard")
QUESTION = "What|How|Where|When|Which|Who|Why"
TITLE = re.compile(rf"(?:{QUESTION})\b")
OPENING = re.compile(rf"""["']\s*(?:{QUESTION}|Whether)\b""")


def titles(path: Path) -> Iterator[Found]:
    """Yield the docstrings of a file whose first words do not name a thing."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py" or not OPENING.search(content):
        return
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        returns = node.returns if isinstance(node, ast.FunctionDef) else None
        result = "" if returns is None else ast.unparse(returns)
        if TITLE.match(text) or (
            text.startswith("Whether") and result and not BOOLEAN.search(result)
        ):
            line = node.body[0].lineno
            name = str(path.relative_to(ROOT))
            yield Found(name, line, text.split()[0], text.splitlines()[0])


def main(names: list[str]) -> None:
    wanted = [str(Path(n).resolve()) for n in names] or [str(ROOT)]
    found = [
        f for path in files() if any(str(path.resolve()).startswith(w) for w in wanted)
        for f in (*occurrences(path), *titles(path))
    ]  # fmt: skip
    for file, n in Counter(f.file for f in found).most_common():
        print(f"{n:5} {file}")
    for f in found:
        print(f"{f.file}:{f.line}: {f.word}: {f.text[:120]}")


if __name__ == "__main__":
    main(sys.argv[1:])
