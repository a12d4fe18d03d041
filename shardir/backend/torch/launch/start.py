"""Runs of emitted directories: the plan is checked, and the ranks are started to their end."""

import importlib.util
from pathlib import Path
from typing import Any

from shardir.backend.interface import LaunchError, OnEvent, Options, Report
from shardir.backend.torch.launch.ranks import Ranks
from shardir.backend.torch.runtime.runtime_plan import PlanError, ProgramPlan, load_plan


def read_plan(directory: str | Path, nproc: int | None = None) -> ProgramPlan:
    """Return the checked plan of a directory.

    Args:
        nproc: the number of ranks that it has to be for.
    """
    try:
        plan = load_plan(directory)
    except PlanError as error:
        raise LaunchError(str(error)) from None
    if not (plan.directory / "program.py").is_file():
        raise LaunchError(f"{directory} has no program.py: it is not a compiled program")
    if nproc is not None and nproc != plan.size:
        raise LaunchError(
            f"expected --nproc {plan.size}, for {plan.mesh_text()}, got {nproc}; omit --nproc"
        )
    return plan


def run(
    directory: str | Path,
    options: Options | None = None,
    nproc: int | None = None,
    program: str = "program.py",
    on_event: OnEvent | None = None,
) -> Report:
    """Run a program of the directory (`single.py`: on one rank) to its end.

    Call it from the main thread: Linux kills the ranks when the thread that started them ends.
    """
    options = options or Options()
    plan = read_plan(directory, nproc)
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("running needs torch: pip install 'shardir[torch]'")
    ranks = plan.size if program == "program.py" else 1
    report = Report(ranks, options.backend)

    def take(event: dict[str, Any]) -> None:
        report.add(event)
        if on_event:
            on_event(event)

    Ranks(plan.directory / program, ranks, options).run(take)
    return report
