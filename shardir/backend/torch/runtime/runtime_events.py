"""Events of a run: to the launcher as JSON lines, or to people as sentences (runtime_main.py has
their fields). A part of the runtime; needs only Python."""

import json
import os
import time
from typing import Any


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
        """Send an event of rank 0; `always`: of any rank."""
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


def _sentence(event: dict[str, Any]) -> str:
    kind = event["event"]
    if kind == "start":
        return f"{event['ranks']} ranks on {event['backend']}"
    if kind == "steps":
        last = event["first"] + len(event["losses"]) - 1
        return f"{event['function']}: step {last}, loss {event['losses'][-1]:.6g}"
    if kind == "trained":
        return f"{event['function']}: {event['steps_per_second']:.1f} steps/s"
    if kind == "result":
        shape, value = list(event["shape"]), event["value"]
        text = f"{event['dtype']} {shape}" if shape else f"{value:.6g}"
        return f"{event['function']}: {event['name']} = {text}"
    return ""
