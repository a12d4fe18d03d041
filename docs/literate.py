"""Show docs/miniature.py as a page of the site: its comments as text, its code as code.

A hook of mkdocs (mkdocs.yml). A line `<!-- literate: FILE -->` of a page, with the file relative to
docs/, becomes the file's contents: comments that begin a line are Markdown, and the rest is Python.
"""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
MARK = re.compile(r"^<!-- literate: (\S+) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the files that a page names into it."""
    return MARK.sub(lambda m: as_markdown((DOCS / m[1]).read_text(encoding="utf-8")), markdown)


def as_markdown(source: str) -> str:
    """Return Python as Markdown."""
    parts = []
    lines = source.splitlines()
    for is_text, group in groupby(lines, key=lambda line: line.startswith("#")):
        if is_text:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in group)
            parts.append(re.sub(r"^(## .*)$", r"\1\n", text, flags=re.M))
        elif code := "\n".join(group).strip("\n"):
            parts.append(f"```python\n{code}\n```")
    return "\n\n".join(parts)
