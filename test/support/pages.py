"""The pages of the documentation, and what their commands print."""

import re
import shlex
import tempfile
from contextlib import chdir
from functools import cache
from pathlib import Path

from support.runlines import run_tool

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(p for p in DOCS.rglob("*.md") if not p.is_relative_to(DOCS / "examples")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)
MADE = re.compile(r"(^<!-- from: (.*?) -->\n)(.*?)(^<!-- end -->$)", re.M | re.S)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The code blocks of a language, each with the line of its first line."""
    text = page.read_text()
    return [
        (text.count("\n", 0, m.start(2)) + 1, m[2])
        for m in BLOCK.finditer(text)
        if m[1] == language
    ]


def between(text: str, words: list[str]) -> str:
    """The lines from the first with words[0] to the next one with words[1]."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if words[0] in line)
    end = next(i for i, line in enumerate(lines[start:], start) if words[1] in line)
    return "\n".join(lines[start : end + 1])


def printed(command: str) -> str:
    """Return the output of a pipeline of our tools, errors included."""
    text = ""
    for part in command.split(" | "):
        tool, *words = shlex.split(part)
        if tool == "tables":
            text = table(words[0])
        elif tool == "between":
            text = between(text, words)
        elif tool == "cat":
            text = Path(words[0]).read_text()
        else:
            _, out, err = run_tool([tool, *words], text.encode())
            text = err + out
    return text.rstrip()


@cache
def table(name: str) -> str:
    """A section that docs/reference.py prints."""
    from reference import table

    return table(name)


def regenerated(page: Path, folder: Path) -> str:
    """The page's text with what its commands print now."""
    text = page.read_text()
    for name, content in FILE.findall(text):
        (folder / name).write_text(content)

    def made(m: re.Match[str]) -> str:
        fence = re.match(r"```\w*\n", m[3])
        out = printed(m[2])
        return f"{m[1]}{fence[0]}{out}\n```\n{m[4]}" if fence else f"{m[1]}\n{out}\n\n{m[4]}"

    with chdir(folder):
        return MADE.sub(made, text)


def main() -> int:
    """Write what the pages' commands print into the pages."""
    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            text = regenerated(page, Path(folder))
        if text != page.read_text():
            page.write_text(text)
            print(f"{page.relative_to(ROOT)}: changed")
    return 0
