"""The log of a run: JSON lines, one for each step, evaluation and result.

    {"event": "start", "ranks": 4, "backend": "gloo"}
    {"event": "step", "function": "step", "step": 1, "loss": 2.3, "seconds": 0.4, "memory": 2128609}
    {"event": "evaluation", "function": "accuracy", "name": "share", "of": "step", "step": 50,
     "value": 0.91}
    {"event": "trained", "function": "step", "steps": 100, "seconds": 1.2, "steps_per_second": 83.0}
    {"event": "result", "function": "accuracy", "name": "share", "shape": [], "dtype": "f32",
     "value": 0.97}

Steps are counted from 1. `seconds` are those since the start of the training, without evaluations,
when the step was reported; `memory` is the peak of rank 0 in bytes. A number that is not finite is
null, and so is a result of more than 4,096 elements.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardir.backend.interface import LaunchError, OnEvent
from shardir.syntax.files import reason

_OWN = ("rank", "time")
"""Fields of events that are the launcher's."""


@contextmanager
def logged(path: Path | None) -> Iterator[OnEvent | None]:
    """Yield what writes events to a log; None without one.

    Raises:
        LaunchError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        with path.open("w", encoding="utf-8", buffering=1) as file:
            yield lambda event: file.writelines(map(_line, _entries(event)))
    except OSError as e:
        raise LaunchError(f"cannot write {path}: {reason(e)}") from None


def _entries(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries of an event."""
    entry = {name: value for name, value in event.items() if name not in _OWN}
    match event["event"]:
        case "steps":
            first, losses = entry.pop("first"), entry.pop("losses")
            for step, loss in enumerate(losses, first):
                yield {"event": "step", "function": entry["function"], "step": step, "loss": loss,
                       "seconds": entry["seconds"], "memory": entry["memory"]}  # fmt: skip
        case "evaluated":
            yield entry | {"event": "evaluation"}
        case "start" | "trained" | "result":
            yield entry


def _line(entry: dict[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in entry.items()}) + "\n"


def _finite(value: Any) -> Any:
    """A value in which numbers that are not finite, which JSON lacks, are None."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
