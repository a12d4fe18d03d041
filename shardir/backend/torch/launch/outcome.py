"""The ends of the ranks of a run: which of them is the cause of an error, and its story."""

import signal
from collections.abc import Mapping
from typing import Any

from shardir.backend.torch.launch.positions import Standing

OWN = ("plan", "program", "values")
"""The kinds of errors whose cause is the rank itself."""

FINAL = ("plan", "values")
"""The kinds of errors whose message is complete; a restarted run would repeat them."""

TAIL_LINES, TAIL_BYTES = 15, 1 << 14


class Outcome:
    """The messages of ranks about their end.

    Attributes:
        errors: the error event of each rank that sent one.
        done: the ranks that did all their work.
    """

    def __init__(self) -> None:
        self.errors: dict[int, dict[str, Any]] = {}
        self.done: set[int] = set()

    def add(self, event: dict[str, Any]) -> bool:
        """Take an event. Returns whether it is about the end of a rank."""
        match event["event"]:
            case "error":
                self.errors.setdefault(event["rank"], event)
            case "done":
                self.done.add(event["rank"])
            case _:
                return False
        return True

    def left(self, codes: Mapping[int, int | None]) -> list[int]:
        """Return the ranks with an exit code that ended before their work was done."""
        return [r for r, code in codes.items() if code is not None and r not in self.done]

    def cause(self, codes: Mapping[int, int | None]) -> int | None:
        """Return the rank that is the cause, if one is known to be: one that was killed, else the
        first that reported an error of its own, else one that left before its work was done."""
        left = self.left(codes)
        own = [e for e in self.errors.values() if e["kind"] in OWN]
        choices = [
            [rank for rank in left if (codes[rank] or 0) < 0],
            [e["rank"] for e in sorted(own, key=lambda e: e["time"])],
            [rank for rank in left if rank not in self.errors],
        ]
        return next((choice[0] for choice in choices if choice), None)

    def first(self) -> dict[str, Any]:
        """Return the error that a rank reported first."""
        return min(self.errors.values(), key=lambda error: error["time"])

    def places(self, cause: int, standing: Standing) -> list[str]:
        """Return the positions of ranks that explain the error of the cause: of all ranks if they
        have begun different collectives."""
        error = self.errors.get(cause)
        if error and error["kind"] in FINAL:
            return []
        if standing.has_parted():
            return standing.report()
        return [] if error else standing.of_rank(cause)

    def story(self, rank: int, code: int | None, output: bytes) -> str:
        """Describe how a rank has ended.

        Args:
            code: its exit code, -N after signal N; None while it runs.
            output: the end of its output.
        """
        error = self.errors.get(rank)
        if error and error["kind"] in FINAL:
            return error["message"]
        if code is not None and code < 0:
            name = {s.value: s.name for s in signal.Signals}.get(-code, f"signal {-code}")
            memory = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
            headline = f"rank {rank} was killed by {name}{memory}"
        elif error:
            headline = f"rank {rank} failed: {error['message']}"
        else:
            headline = f"rank {rank} ended with exit code {code} before the end of the run"
        lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
        return "\n".join([headline, *(f"  | {line}" for line in lines[-TAIL_LINES:])])
