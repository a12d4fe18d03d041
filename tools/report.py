"""shard-report: write a page that shows programs: time, timeline, memory, layouts, communication.

The page is one file, without requests to the network. Several programs are side by side.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardir.diagnostics import ParseErrors, ShardirError, print_error, progress_shown
from shardir.tools.arguments import ToolParser, import_modules, output_file
from shardir.tools.commands import command

GROUPS = {
    "what is shown": ("programs", "output", "cost", "trace", "title", "json"),
    "compiling .ir files": ("passes", "mode", "plan", "precision", "recompute", "imports"),
}
"""The arguments of shard-report by what they are for."""

EXAMPLES = """\
shard-report net.ir --plan "megatron(tp) * fsdp(dp)" --cost h200 -o report.html
shard-report out --trace run.json -o report.html
shard-report ddp fsdp -o both.html
shard-report net.ir --json > report.json
"""


def main(arguments: list[str] | None = None) -> int:
    """Write a report. Exit codes: 0 success; 1 an error of a program; 2 a wrong command line, or a
    file that cannot be read or written."""
    options = parser().parse_args(arguments)
    try:
        if options.json == (options.output is not None):
            given = "both" if options.json else "neither"
            raise ShardirError(f"expected -o FILE or --json, got {given}")
        if options.trace is not None and len(options.programs) > 1:
            raise ShardirError(
                f"--trace: expected one program, which it is of, got {len(options.programs)}"
            )
        import_modules(options.imports)
        return _write(options)
    except ParseErrors as error:
        error.show()
        return 1
    except ShardirError as error:
        print_error(str(error), "shard-report")
        return 2


def _write(options: argparse.Namespace) -> int:
    from shardir.api.reporting import program_record
    from shardir.cost.clusters import load
    from shardir.reports.measured import read_trace
    from shardir.reports.page import html
    from shardir.reports.record import ReportRecord
    from shardir.syntax.files import write_text
    from shardir.syntax.source import collect_warnings

    cluster = load(options.cost) if options.cost else None
    trace = None if options.trace is None else read_trace(options.trace)
    records = []
    for path in options.programs:
        source, module, passes = _program(path, options)
        with collect_warnings() as warnings, progress_shown("reporting"):
            record = program_record(
                source, module, passes, label=_label(path, options.programs), cluster=cluster,
                trace=trace,
            )  # fmt: skip
        records.append(record)
        for op, message in warnings:
            line = dataclasses.replace(source.at_op(op, message), severity="warning")
            print(line, file=sys.stderr)
    title = options.title or ", ".join(record.label for record in records[:3])
    page = ReportRecord(title, records)
    if options.json:
        print(page.json())
    else:
        write_text(options.output, html(page))
    return 0


def _label(path: Path, paths: Sequence[Path]) -> str:
    """Return the name of a program, with its folders if another one has that name too."""
    name = path.resolve().name
    return str(path) if [p.resolve().name for p in paths].count(name) > 1 else name


def _program(path: Path, options: argparse.Namespace) -> Any:
    """Return the source of a program, its module, and its passes.

    Raises:
        ShardirError: there is no such program, or it is wrong; or a directory, which is compiled
            already, has options of a compilation.
    """
    from shardir import pipelines
    from shardir.backend.torch.resize import origin_of
    from shardir.syntax.files import read_text
    from shardir.syntax.parser import parse
    from shardir.syntax.source import Source

    if path.is_dir():
        for name in ("mode", "passes", "plan", "precision", "recompute"):
            if getattr(options, name) is not None:
                option = "-p" if name == "passes" else f"--{name}"
                raise ShardirError(f"{path} is compiled already; {option} is for an .ir file")
        return origin_of(path)
    text = read_text(path)
    passes = pipelines.build(pipelines.pipeline_of(options.passes, options.mode, pipelines.DEFAULT))
    passes = pipelines.with_plan(passes, options.plan)
    passes = pipelines.with_precision(passes, options.precision)
    passes = pipelines.with_recompute(passes, options.recompute)
    return Source(text, str(path)), parse(text, str(path), verify=True), passes


def parser() -> ToolParser:
    """Return the parser of shard-report's arguments."""
    parser = ToolParser(
        "shard-report", usage="[options] PROGRAM ...", groups=GROUPS, examples=EXAMPLES,
        description="Write a page that shows programs: time, timeline, memory, layouts, "
        "communication.",
    )  # fmt: skip
    add = parser.add_argument
    add(
        "programs", nargs="+", type=Path, metavar="PROGRAM",
        help=".ir files, or directories that shard-opt wrote",
    )  # fmt: skip
    add("-o", "--output", type=output_file, metavar="FILE", help="the page, such as report.html")
    add("--json", action="store_true", help="print the data of the page, in place of it")
    add("--title", help="the title of the page (the names of the programs)")
    add(
        "--cost", metavar="CLUSTER",
        help="the cluster of the devices, ready-made or in a file (that of the program's mesh)",
    )  # fmt: skip
    add(
        "--trace", type=Path, metavar="FILE",
        help="show the times that shard-run --trace=FILE has measured beside the predicted ones",
    )  # fmt: skip
    add(
        "-p", "--passes", "--pass-pipeline", dest="passes", metavar="P",
        help="the passes to run (train)",
    )  # fmt: skip
    add("--mode", help="a mode, in place of passes: semi_auto, auto, ...")
    add("--plan", metavar="P", help="a plan, its file, or presets such as fsdp")
    add("--precision", metavar="TYPE", help="of products: bf16 or f16")
    add("--recompute", metavar="R", help="full, dots, or a budget of memory, such as 6GB or 0.6")
    add(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="import a Python module that registers custom ops",
    )  # fmt: skip
    parser.arrange()
    return parser


if __name__ == "__main__":
    sys.exit(command("report"))
