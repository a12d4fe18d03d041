"""shard-bench: run a benchmark of the project and print its table."""

import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.table import Table

from shardir.diagnostics import ShardirError, print_error
from shardir.diagnostics.terminal import console
from shardir.syntax.files import write_text
from shardir.tools.arguments import ToolParser
from shardir.tools.commands import command

Record = dict[str, Any]

FOLDER = Path(__file__).resolve().parent.parent / "test" / "bench"
"""The folder of the benchmarks. Each is a file with a docstring and `records(log)`. A file with
options has `add_options(parser)`, and `records` has a parameter for each. A file with several
tables has `tables(records)`, which returns titles with rows. SMOKE has the values of the file's
names for `--smoke`, with small sizes and few rounds."""

PATH = FOLDER.parent, FOLDER.parents[1] / "docs" / "examples"
"""The folders of modules that benchmarks import; pytest has them on Python's path too."""

RECORDS = FOLDER / "records"
"""The records of `--json` from which tables of the documentation are made."""

EXTRAS = {"scipy": "calibrate"}
"""The extra of a package that benchmarks require; `torch` of any other."""


def names() -> dict[str, str]:
    """Return the first line of the docstring of each benchmark, by name."""
    titles = {}
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text()
        if "\ndef records(" in text:
            titles[path.stem.replace("_", "-")] = text.split('"""')[1].strip().splitlines()[0]
    return titles


def load(name: str) -> ModuleType:
    """Import a new copy of a benchmark, with PATH on Python's path."""
    stem = name.replace("-", "_")
    spec = util.spec_from_file_location(f"shard_bench_{stem}", FOLDER / f"{stem}.py")
    assert spec is not None and spec.loader is not None
    sys.path[:0] = [str(folder) for folder in PATH if str(folder) not in sys.path]
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe_run(arguments: list[str]) -> Record:
    """Return the command of a run, its date (UTC), and the commit of the tree, with `-dirty` if
    files have changed; None outside of git."""
    git = [
        "git",
        "-C",
        str(FOLDER),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty",
        "--exclude=*",
    ]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    date = datetime.now(UTC).date().isoformat()
    return {"command": shlex.join(["shard-bench", *arguments]), "commit": commit, "date": date}


def show(title: str, records: list[Record], out: Any) -> None:
    """Print a table, with a row for each record."""
    columns = list(dict.fromkeys(key for r in records for key in r))
    table = Table(title=title)
    for column in columns:
        numeric = any(isinstance(r.get(column), int | float) for r in records)
        table.add_column(column, justify="right" if numeric else "left")
    for r in records:
        table.add_row(*(_text(r.get(column)) for column in columns))
    out.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) >= 0.1 or not value else f"{value:.3g}"
    return str(value)


GROUPS = {"what runs": ("name", "smoke"), "looking": ("json",)}
"""The arguments of shard-bench by what they are for; those of a benchmark are behind them."""

EXAMPLES = """\
shard-bench zero --smoke         in seconds, with figures that mean nothing
shard-bench search --help        the options of one benchmark
"""


def parser() -> ToolParser:
    """Return the parser of shard-bench's arguments, without those of a benchmark."""
    known = names()
    listing = "\n".join(f"  {n:{max(map(len, known))}}  {title}" for n, title in known.items())
    parser = ToolParser(
        "shard-bench", usage="[options] NAME [options of the benchmark]", groups=GROUPS,
        examples=EXAMPLES,
        description="Run a benchmark of the project and print its table.\n\nbenchmarks:\n"
        + (listing or "  none: they are in test/bench of the source tree"),
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", choices=list(known), help="the benchmark")
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write the records of the table as JSON, with the commit, date and command",
    )  # fmt: skip
    parser.add_argument(
        "--smoke", action="store_true",
        help="try it in seconds, on small sizes; the figures mean nothing",
    )  # fmt: skip
    parser.arrange()
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark. Exit codes: 0 success, 2 wrong arguments or a missing
    package."""
    known, parsed = names(), parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    name = next((a for a in arguments if a in known), "")
    progress = console(sys.stderr, 120)
    try:
        module = load(name) if name else None
        if module is not None and "--smoke" in arguments:
            vars(module).update(module.SMOKE)
        if module is not None and hasattr(module, "add_options"):
            module.add_options(parsed.add_argument_group(f"options of {name}"))
        options = vars(parsed.parse_args(arguments))
        del options["smoke"], options["color"]
        assert module is not None
        json_file, chosen = options.pop("json"), options.pop("name")
        if chosen != name:  # `name` is the value of an option before the benchmark
            parsed.error(f"expected the benchmark before its options, got {name} before {chosen}")
        if json_file is not None and not json_file.parent.is_dir():
            parsed.error(f"--json: expected a file in an existing folder, got {json_file}")
        records = module.records(lambda line: progress.print(line, style="dim"), **options)
    except ImportError as e:
        missing = f"pip install 'shardir[{EXTRAS.get(e.name or '', 'torch')}]'"
        print_error(f"{name} requires {e.name}; use {missing}")
        return 2
    except ShardirError as e:
        print_error(str(e))
        return 2
    tables = module.tables(records) if hasattr(module, "tables") else {"": records}
    out = console(sys.stdout, 120)
    for title, rows in tables.items():
        show(f"shard-bench {name}{': ' if title else ''}{title}", rows, out)
    if json_file is not None:
        try:
            run = {**describe_run(arguments), "records": records}
            write_text(json_file, json.dumps(run, indent=1) + "\n")
        except ShardirError as e:
            print_error(str(e))
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(command("bench"))
