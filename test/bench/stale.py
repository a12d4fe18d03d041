"""The records of benchmarks, and how old they are: `python test/bench/stale.py`.

The charts of docs/understand/benchmarks.md are drawn from test/bench/records. `commits` are the
commits that have changed what a record measures since then: the package, or the benchmark.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console

from shardir.tools.bench import RECORDS, show

ROOT = Path(__file__).resolve().parents[2]


def listing() -> list[dict[str, Any]]:
    """Return a row for each record: benchmark, command, date, commit, commits since then."""
    rows = []
    for file in sorted(RECORDS.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        files = ["shardir", "passes", f"test/bench/{file.stem.replace('-', '_')}*"]
        since = git("rev-list", "--count", f"{found['commit']}..HEAD", "--", *files)
        rows.append({
            "benchmark": file.stem, "command": found["command"], "date": found["date"],
            "commit": found["commit"], "commits": int(since) if since else None,
        })  # fmt: skip
    return rows


def git(*words: str) -> str:
    """Return what git prints; nothing where it fails."""
    run = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    return run.stdout.strip()


if __name__ == "__main__":
    show("records of benchmarks", listing(), Console(width=140))
