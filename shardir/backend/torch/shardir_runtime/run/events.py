"""Events of a run, as JSON lines for the launcher or as sentences for people (main.py has their
fields). This file needs only Python."""

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

FINISH = signal.SIGUSR1
"""The launcher's signal to end the training after the current step."""

MAY_FINISH = "SHARDIR_MAY_FINISH"
"""The environment variable that announces that this signal may come."""

TRACE = "SHARDIR_TRACE"
"""The environment variable by which the launcher requests a trace (trace.py)."""


def _text(value: object) -> bool:
    return isinstance(value, str)


def _count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _number(value: object) -> bool:
    return isinstance(value, (int, float))


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_number, value))


def _metrics(value: object) -> bool:
    return isinstance(value, dict) and all(map(_numbers, value.values()))


def _value(value: object) -> bool:
    return value is None or _number(value) or isinstance(value, list)


_FIELDS: dict[str, dict[str, Callable[[object], bool]]] = {
    "start": {"ranks": _count, "backend": _text},
    "steps": {"function": _text, "first": _count, "losses": _numbers, "seconds": _number,
              "memory": _count, "metrics": _metrics},
    "evaluated": {"of": _text, "step": _count, "function": _text, "name": _text,
                  "value": _number},
    "checkpoint": {"step": _count, "folder": _text},
    "repeat": {"function": _text, "step": _count, "loss": _number, "first": _count,
               "done": _count},
    "stopped": {"step": _count, "signal": _count},
    "trained": {"function": _text, "steps": _count, "seconds": _number,
                "steps_per_second": _number},
    "result": {"function": _text, "name": _text, "shape": _counts, "dtype": _text,
               "value": _value},
    "round": {"done": _count, "of": _count},
    "times": {"program": _count, "function": _text, "seconds": _numbers},
    "answer": {"value": lambda value: True},
    "done": {},
    "error": {"kind": _text, "message": _text},
}  # fmt: skip
"""The fields of each kind of event; each event also has `rank` and `time`."""


def event_of(line: bytes, ranks: int) -> dict[str, Any] | None:
    """Return the event in a line; None if it is not an event of one of the ranks."""
    try:
        event = json.loads(line)
        fields = {"rank": _count, "time": _number, **_FIELDS[event["event"]]}
        right = all(is_right(event[name]) for name, is_right in fields.items())
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return event if right and event["rank"] < ranks else None


class Events:
    """The destination of reports: the launcher, as JSON lines, or stdout, as sentences."""

    def __init__(self, rank: int):
        self.rank = rank
        target = os.environ.get("SHARDIR_EVENTS", "")
        self.fd = None
        if target.startswith("fd:"):
            self.fd = int(target[3:])
        elif target:
            self.fd = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def send(self, always: bool = False, **event: Any) -> None:
        """Send an event from rank 0; with `always`, from any rank."""
        if self.rank and not always:
            return
        if self.fd is None:
            text = _sentence(event)
            if text:
                print(text, flush=True)
            return
        line = json.dumps({**event, "rank": self.rank, "time": time.monotonic()}) + "\n"
        data = line.encode()
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError:
            self.fd = None  # the launcher is gone


def repeat_sentence(event: dict[str, Any]) -> str:
    """Return the sentence about steps that run again; empty for a sign of life."""
    first, last = event["first"], event["step"]
    if event["done"] >= first:
        return ""
    steps = f"step {first} runs" if first == last else f"steps {first} to {last} run"
    return (
        f"{event['function']}: step {last}, loss {event['loss']:.6g}; {steps} again to find the "
        "first value that is not finite"
    )


def _sentence(event: dict[str, Any]) -> str:
    kind = event["event"]
    if kind == "start":
        return f"{event['ranks']} ranks on {event['backend']}"
    if kind == "steps":
        last = event["first"] + len(event["losses"]) - 1
        return f"{event['function']}: step {last}, loss {event['losses'][-1]:.6g}"
    if kind == "evaluated":
        return f"{event['of']}: step {event['step']}, {event['function']}: {event['name']} = " + (
            f"{event['value']:.6g}"
        )
    if kind == "repeat":
        return repeat_sentence(event)
    if kind == "stopped":
        return f"stopped after step {event['step']}, with a checkpoint"
    if kind == "trained":
        return f"{event['function']}: {event['steps_per_second']:.1f} steps/s"
    if kind == "result":
        shape, value = list(event["shape"]), event["value"]
        text = f"{event['dtype']} {shape}" if shape else f"{value:.6g}"
        return f"{event['function']}: {event['name']} = {text}"
    return ""
