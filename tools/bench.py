"""shard-bench: run a benchmark of the project and print its table."""

import argparse
import json
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

Record = dict[str, Any]

FOLDER = Path(__file__).resolve().parent.parent / "test" / "bench"
"""The folder of the benchmarks: a file each, with a docstring and `records(log)`."""


def names() -> dict[str, str]:
    """Return the benchmarks, each with the first line of its docstring."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text()
        if "\ndef records(" in text:
            found[path.stem.replace("_", "-")] = text.split('"""')[1].strip().splitlines()[0]
    return found


def load(name: str) -> ModuleType:
    """Import a benchmark; its folder is put on the path, since benchmarks share programs."""
    stem = name.replace("-", "_")
    spec = util.spec_from_file_location(f"shard_bench_{stem}", FOLDER / f"{stem}.py")
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(FOLDER))
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show(name: str, records: list[Record], console: Console) -> None:
    """Print one table, with a row for each record."""
    columns = list(dict.fromkeys(key for r in records for key in r))
    table = Table(title=f"shard-bench {name}")
    for column in columns:
        numeric = any(isinstance(r.get(column), int | float) for r in records)
        table.add_column(column, justify="right" if numeric else "left")
    for r in records:
        table.add_row(*(_text(r.get(column)) for column in columns))
    console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) >= 0.1 or not value else f"{value:.3g}"
    return str(value)


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark. Exit codes: 0 success, 2 wrong arguments or a missing package."""
    known = names()
    listing = "\n".join(f"  {n:14} {title}" for n, title in known.items())
    parser = argparse.ArgumentParser(
        prog="shard-bench",
        description=__doc__,
        epilog=f"benchmarks:\n{listing or '  none: they are in test/bench of the source tree'}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(known), help="the benchmark")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the records of the table as JSON"
    )
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: expected a file in an existing folder, got {options.json}")
    progress = Console(stderr=True)
    try:
        records = load(options.name).records(lambda line: progress.print(line, style="dim"))
    except ImportError as e:
        missing = "pip install 'shardir[torch]'"
        print(f"error: {options.name} requires {e.name}; use {missing}", file=sys.stderr)
        return 2
    show(options.name, records, Console(width=None if sys.stdout.isatty() else 120))
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
