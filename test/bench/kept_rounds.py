"""Measured rounds of programs in a file, so that other predictions are compared with them again.

A file has the seconds of each function in each round, and the recorded calls of each rank, of which
there are CALLS in a round. More rounds are added to those of a file, if its programs are the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from shardir.backend.runs import MeasuredTimes, RankCalls
from shardir.diagnostics import ShardirError
from shardir.syntax.files import write_text

CALLS = 2
"""The number of recorded calls in a round (`backend/torch/launch/measure.py`)."""


@dataclass
class Rounds:
    """The rounds of programs: of each the seconds of its functions, and the calls of its ranks."""

    seconds: MeasuredTimes
    calls: list[list[RankCalls]]

    def __len__(self) -> int:
        return max((len(s) for found in self.seconds for s in found.values()), default=0)

    def __add__(self, other: "Rounds") -> "Rounds":
        if not self.seconds:
            return other
        seconds = [_joined(a, b) for a, b in zip(self.seconds, other.seconds, strict=True)]
        calls = [
            [_joined(a, b) for a, b in zip(ranks, others, strict=True)]
            for ranks, others in zip(self.calls, other.calls, strict=True)
        ]
        return Rounds(seconds, calls)

    def half(self, which: int) -> "Rounds":
        """Return every other round, from the first (0) or the second (1) on."""
        return Rounds(
            [{f: s[which::2] for f, s in found.items()} for found in self.seconds],
            [
                [
                    {f: [c for i, c in enumerate(calls) if i // CALLS % 2 == which]
                     for f, calls in rank.items()}
                    for rank in ranks
                ]
                for ranks in self.calls
            ],
        )  # fmt: skip


def _joined(first: Mapping[str, list[Any]], second: Mapping[str, list[Any]]) -> dict[str, Any]:
    return {name: [*first.get(name, []), *found] for name, found in second.items()}


def digest(programs: Sequence[Path]) -> str:
    """Return a digest of the emitted programs of directories, of their runtime, and of torch."""
    found = sha256(torch.__version__.encode())
    for program in programs:
        for file in sorted(program.glob("*.py")):
            found.update(f"{file.name}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()


def folder_of(path: Path) -> None:
    """Make a folder for rounds, if it is not there.

    Raises:
        ShardirError: there is a file, or it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShardirError(
            f"expected a folder for rounds, got {path}: {error.strerror}; use another path"
        ) from None


def read(file: Path, programs: str) -> Rounds:
    """Return the rounds of a file; none if there is no file.

    Raises:
        ShardirError: it cannot be read, or is of programs with another digest.
    """
    if not file.exists():
        return Rounds([], [])
    rounds = None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        of, rounds = found["programs"], Rounds(found["seconds"], found["calls"])
    except (OSError, ValueError, KeyError, TypeError):
        of = None
    if rounds is None or of != programs:
        got = "another text" if rounds is None else "others"
        raise ShardirError(
            f"{file}: expected rounds of these programs, got {got}; use another folder"
        )
    return rounds


def write(file: Path, programs: str, rounds: Rounds) -> None:
    """Write the rounds of programs with a digest.

    Raises:
        ShardirError: the file cannot be written.
    """
    record = {"programs": programs, "seconds": rounds.seconds, "calls": rounds.calls}
    write_text(file, json.dumps(record))
