"""The times of functions of emitted programs, on ranks of this machine.

All programs run in one start of the ranks, in turns: where the speed of a shared machine drifts,
it drifts for all of them.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardir.backend.runs import LaunchError, MeasuredTimes, Options, RankCalls
from shardir.backend.torch.directory import copy_runtime
from shardir.backend.torch.launch.ranks import Ranks
from shardir.backend.torch.launch.start import read_plan, recorded_calls
from shardir.syntax.files import scratch_folder

SCRIPT = """\
from shardir_runtime.run.measure import main

main(__file__)
"""
"""The program of the ranks, with the runtime beside it."""


def times(
    programs: Sequence[Path],
    rounds: int,
    seconds: float,
    options: Options,
    on_round: Callable[[int], object] | None = None,
    on_traces: Callable[[list[list[RankCalls]]], object] | None = None,
    traced: Sequence[bool] = (),
) -> MeasuredTimes:
    """Call every function of the programs for about `seconds` in each round.

    Args:
        programs: emitted directories, all for the same number of ranks.
        on_round: called with the number of rounds done.
        on_traces: called with the recorded calls of the ranks of each program, two in each round,
            with the times of lines. Without it no calls are recorded.
        traced: the programs whose calls are recorded; by default all.

    Raises:
        LaunchError: the programs cannot run together, or a rank failed.
    """
    plans = [read_plan(p) for p in programs]
    sizes = {plan.size for plan in plans}
    if len(sizes) != 1:
        raise LaunchError(f"programs for {sorted(sizes)} ranks cannot be measured together")
    found: MeasuredTimes = [{} for _ in plans]

    def take(event: dict[str, Any]) -> None:
        match event["event"]:
            case "round" if on_round:
                on_round(event["done"])
            case "times" if event["program"] < len(found):
                found[event["program"]][event["function"]] = event["seconds"]

    with scratch_folder() as here:
        copy_runtime(here)
        (script := here / "measure.py").write_text(SCRIPT)
        turns = {
            "programs": [str(p.directory.resolve()) for p in plans],
            "rounds": rounds,
            "seconds": seconds,
            "traced": list(traced) or [on_traces is not None] * len(plans),
        }
        (here / "turns.json").write_text(json.dumps(turns))
        Ranks(script, sizes.pop(), options).run(take)
        if on_traces is not None:
            folders = [here / f"trace{i}" for i in range(len(plans))]
            on_traces([recorded_calls(f) if f.is_dir() else [] for f in folders])
    return found
