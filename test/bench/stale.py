"""The figures of docs/understand/benchmarks.md, and how old they are: `python test/bench/stale.py`.

A section is generated from the record of its benchmark, where test/bench/records has one, or
written by hand: then its date and commit are those of its last change. `commits` are those that
have changed what it measures since then: the package, or the benchmark.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from shardir.tools.bench import RECORDS, names, show

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/understand/benchmarks.md"


def sections() -> Iterator[tuple[str, list[str], range]]:
    """Yield each section with figures: its title, its benchmarks, the numbers of its lines."""
    lines, known = PAGE.read_text(encoding="utf-8").splitlines(), names()
    begins = [i for i, line in enumerate(lines) if line.startswith("#")]
    for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        text = "\n".join(lines[begin:end])
        asked = dict.fromkeys(re.findall(r"shard-bench ([\w-]+)", text))
        if begin and any(line.startswith("| ") for line in lines[begin:end]):
            found = [name for name in asked if name in known]
            yield lines[begin].strip("# "), found, range(begin + 1, end + 1)


def record(name: str) -> dict[str, Any] | None:
    """Return the record of a benchmark, if there is one."""
    file = RECORDS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def listing() -> list[dict[str, Any]]:
    """Return a row for each section: section, benchmarks, source, date, commit, commits."""
    rows = []
    for title, benchmarks, lines in sections():
        known = next((r for name in benchmarks if (r := record(name)) is not None), None)
        date, commit = (known["date"], known["commit"]) if known else last_change(lines)
        files = ["shardir", "passes", *(f"test/bench/{n.replace('-', '_')}*" for n in benchmarks)]
        since = git("rev-list", "--count", f"{commit}..HEAD", "--", *files) if commit else ""
        rows.append({
            "section": title, "benchmarks": ", ".join(benchmarks),
            "source": "record" if known else "by hand", "date": date, "commit": commit,
            "commits": int(since) if since else None,
        })  # fmt: skip
    return rows


def last_change(lines: range) -> tuple[str | None, str | None]:
    """Return the date and the commit of the last change of some lines of the page."""
    text = git("log", "-1", "-s", "--format=%as %h", f"-L{lines[0]},{lines[-1]}:{PAGE}")
    date, _, commit = text.partition(" ")
    return date or None, commit or None


def git(*words: str) -> str:
    """Return what git prints; nothing where it fails."""
    run = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    return run.stdout.strip()


if __name__ == "__main__":
    show("figures of docs/understand/benchmarks.md", listing(), Console(width=140))
