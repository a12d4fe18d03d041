"""The record of a program for a report: its passes run, and what they decide on is kept."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from shardir.algebra.cluster import Cluster
from shardir.api.located import run_located
from shardir.cost.functions import on_cluster
from shardir.reports.comparison import samples_of
from shardir.reports.reasons import Reasons, run_passes
from shardir.reports.record import ProgramRecord
from shardir.reports.recorder import record_of, reported_function
from shardir.rewriting.copying import copied
from shardir.syntax.parser import default_parser
from shardir.syntax.source import Source, collect_remarks


def program_record(
    source: Source,
    module: ModuleOp,
    passes: Sequence[ModulePass],
    *,
    label: str = "",
    cluster: Cluster | None = None,
    trace: Mapping[str, Any] | None = None,
) -> ProgramRecord:
    """Run passes over a copy of a module, and return the record of the program.

    Args:
        label: its name in the report, by default that of the source.
        cluster: of the devices, by default the program's.
        trace: of a run of the program.

    Raises:
        ShardirError: the errors of the program, with their locations; no function is in the local
            view after the passes; or the trace is of another program.
    """
    program = copied(module)

    def work() -> Reasons:
        with collect_remarks():
            return run_passes(default_parser().ctx, program, passes)

    reasons = run_located(source, work)
    mesh = None if cluster is None else on_cluster(reported_function(program)[1], cluster)
    name = label or Path(source.name).name
    return record_of(program, name, passes, reasons, mesh, samples_of(module), trace)
