"""The entries of a run's log, one for each step, evaluation and result, as JSON lines, for
TensorBoard, and for callbacks.

    {"event": "start", "ranks": 4, "backend": "gloo"}
    {"event": "step", "function": "step", "step": 1, "loss": 2.3, "seconds": 0.4, "memory": 2128609,
     "rates": {"steps": 12.5, "samples": 400.0}, "metrics": {"learning_rate": 0.1}}
    {"event": "evaluation", "function": "accuracy", "name": "share", "of": "step", "step": 50,
     "value": 0.91}
    {"event": "trained", "function": "step", "steps": 100, "seconds": 1.2, "steps_per_second": 83.0}
    {"event": "result", "function": "accuracy", "name": "share", "shape": [], "dtype": "f32",
     "value": 0.97}

Steps are counted from 1. `seconds`: the time from the start of the training to the report of the
step, without evaluations. `rates`: per second since the previous report, of steps, and of samples
and tokens if the inputs have them. `memory`: the peak of rank 0 in bytes. `share`: of the peak
rate of the devices, where the program's cluster has one. `waits`: the rank that the others wait for
most, {"rank": 2, "share": 0.7}, where they do. In JSON, numbers that are
not finite are null, and so are results of more than 4,096 elements.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardir.backend.runs import LaunchError, OnEvent
from shardir.syntax.files import reason

_OWN = ("rank", "time")
"""Fields of events that are the launcher's."""


@contextmanager
def open_log(path: Path | None, *, append: bool) -> Iterator[OnEvent | None]:
    """Yield a function that writes entries to a log; None without a log.

    Args:
        append: whether to keep the content of the file.

    Raises:
        LaunchError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        with path.open("a" if append else "w", encoding="utf-8", buffering=1) as file:
            yield lambda entry: file.writelines([_line(entry)])
    except OSError as e:
        raise LaunchError(f"cannot write {path}: {reason(e)}") from None


@contextmanager
def on_board(folder: Path | None) -> Iterator[OnEvent | None]:
    """Yield a function that writes entries for TensorBoard; None without a folder.

    Raises:
        LaunchError: tensorboardX is not installed, or the folder cannot be written.
    """
    if folder is None:
        yield None
        return
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        needed = "pip install 'shardir[tensorboard]'"
        raise LaunchError(f"--tensorboard needs tensorboardX: {needed}") from None

    def write(entry: dict[str, Any]) -> None:
        match entry["event"]:
            case "step":
                rates = {f"{what}_per_second": rate for what, rate in entry["rates"].items()}
                of_run = {"memory": entry["memory"], **rates}
                of_run |= {"share_of_peak": entry["share"]} if "share" in entry else {}
                scalars = {"loss": entry["loss"], **entry["metrics"], **of_run}
            case "evaluation":
                scalars = {entry["name"]: entry["value"]}
            case _:
                return
        for name, value in scalars.items():
            board.add_scalar(f"{entry['function']}/{name}", value, entry["step"])

    try:
        with SummaryWriter(str(folder)) as board:
            yield write
    except OSError as e:
        raise LaunchError(f"cannot write {folder}: {reason(e)}") from None


def entries(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries of an event of the ranks."""
    entry = {name: value for name, value in event.items() if name not in _OWN}
    match event["event"]:
        case "steps":
            first, losses, metrics = entry["first"], entry["losses"], entry["metrics"]
            more = {name: entry[name] for name in ("share", "waits") if name in entry}
            for i, loss in enumerate(losses):
                yield {"event": "step", "function": entry["function"], "step": first + i,
                       "loss": loss, "seconds": entry["seconds"], "memory": entry["memory"],
                       "rates": entry["rates"],
                       "metrics": {name: x[i] for name, x in metrics.items()}, **more}  # fmt: skip
        case "evaluated":
            yield entry | {"event": "evaluation"}
        case "start" | "trained" | "result":
            yield entry


class Rates:
    """The steps, samples and tokens of each step function in a second.

    Args:
        counts: the samples and the tokens of a step, by the function.
    """

    def __init__(self, counts: Mapping[str, Mapping[str, int]]):
        self.counts = counts
        self._before: dict[str, float] = {}

    def since(self, event: dict[str, Any]) -> dict[str, float]:
        """Return the rates of the steps in an event, by unit; none for a step that took no time."""
        name, seconds = event["function"], event["seconds"]
        before = self._before.get(name, 0.0)
        self._before[name] = seconds
        took = seconds - before if seconds >= before else seconds  # less: it was started again
        if took <= 0:
            return {}
        steps = len(event["losses"]) / took
        return {"steps": steps} | {
            what: steps * of[name] for what, of in self.counts.items() if name in of
        }


def _line(entry: dict[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in entry.items()}) + "\n"


def _finite(value: Any) -> Any:
    """A value in which numbers that are not finite, which JSON lacks, are None."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
