"""The positions of ranks in their sequences of collectives, and the ranks that lag.

      rank 3 waits at all-reduce of d_w1 (mlp.ir:9), the others are one collective further
      ranks 0-2: step 12, in all-reduce of d_w2 (mlp.ir:11, program.py:36)
      rank 3: step 12, in all-reduce of d_w1 (mlp.ir:9, program.py:34)

The ranks record program lines (collectives/position.py), whose ops are in the text of the program.
All ranks of a stage begin their collectives in one order, so that the numbers of collectives can be
compared.
"""

import errno
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self

from shardir.backend.runs import Waits
from shardir.backend.torch.launch.program_lines import LineTexts
from shardir.backend.torch.shardir_runtime.collectives.position import (
    BEGUN,
    COMPLETED,
    KEPT,
    LINES,
    NOTE,
    PEER,
    RECORD,
    STEP,
)
from shardir.backend.torch.shardir_runtime.plan.program import STAGE, ProgramPlan

MIN_SAMPLES, MIN_SHARE = 20, 0.2
"""The fewest samples, and the smallest share of them, in which ranks wait for one that is named."""

SHOWN = 16
"""The maximum number of positions that a message has."""


class Position(NamedTuple):
    """The position of a rank.

    Args:
        step: the step of the training, counted from 1; 0 before it.
        begun, completed: the numbers of collectives.
        peer: the rank from which it waits for a value of another stage; -1 if it does not.
        doing: the action of its stage, such as `1F0`; "" without stages.
        lines: the program lines of the last collectives, by number.
    """

    step: int
    begun: int
    completed: int
    peer: int
    doing: str
    lines: dict[int, int]

    @classmethod
    def of(cls, record: bytes) -> Self:
        """Return the position in a record."""
        words = memoryview(record).cast("Q")
        step, begun, completed, peer = (words[i] for i in (STEP, BEGUN, COMPLETED, PEER))
        doing = words[NOTE:LINES].tobytes().rstrip(b"\0").decode(errors="replace")
        numbers = range(max(1, begun - KEPT + 1), begun + 1)
        lines = {n: words[LINES + n % KEPT] for n in numbers}
        return cls(step, begun, completed, peer - 1 if begun > completed else -1, doing, lines)

    @property
    def waits(self) -> bool:
        """Whether it is in a collective, or waits for a value."""
        return self.begun > self.completed

    @property
    def progress(self) -> int:
        """The number of collectives begun plus the number completed, which only grows."""
        return self.begun + self.completed


class Records:
    """The memory in which the ranks of this machine record their positions.

    Args:
        path: the file with which the ranks open the memory; without one they inherit it.

    Raises:
        OSError: there is no memory left.
    """

    def __init__(self, ranks: int, path: Path | None = None):
        self._size = RECORD * ranks
        self._file: Any = None
        if path is not None:
            self._file = path.open("w+b", buffering=0)
        elif hasattr(os, "memfd_create"):  # a disk may be full
            self._file = os.fdopen(os.memfd_create("positions"), "w+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - close() closes it
        self.clear()

    def clear(self) -> None:
        """Forget all positions, before ranks start."""
        if os.pwrite(self._file.fileno(), bytes(self._size), 0) < self._size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))  # files may not be so long

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self) -> list[bytes]:
        """Return the record of each rank of this machine."""
        data = os.pread(self._file.fileno(), self._size, 0)
        return [data[at : at + RECORD] for at in range(0, len(data), RECORD)]

    def close(self) -> None:
        self._file.close()


def ranks_of_a_stage(plan: ProgramPlan) -> int:
    """Return the number of ranks of a stage: they begin equal collectives."""
    return plan.size // dict(plan.axes).get(STAGE, 1)


class WaitSamples:
    """Samples of the positions of ranks: how often all others of a stage wait for one rank.

    Args:
        size: the number of ranks of a stage.
    """

    def __init__(self, size: int):
        self.size, self.count = size, 0
        self.waited: Counter[int] = Counter()
        """The samples in which the others waited for a rank."""

    def add(self, records: list[bytes]) -> None:
        """Count a sample, once the ranks train."""
        words = [memoryview(record).cast("Q") for record in records]
        if not words or not all(w[STEP] for w in words):
            return
        self.count += 1
        for first in range(0, len(words), self.size):
            stage = words[first : first + self.size]
            most = max(w[BEGUN] for w in stage)
            late = [rank for rank, w in enumerate(stage, first) if w[BEGUN] < most]
            others = [w for w in stage if w[BEGUN] == most]
            if len(late) == 1 and all(w[COMPLETED] < most for w in others):
                self.waited[late[0]] += 1

    def most(self) -> Waits | None:
        """Return the rank that the others wait for most; None where it is too seldom to say."""
        if self.count < MIN_SAMPLES or not self.waited:
            return None
        (rank, count), = self.waited.most_common(1)  # fmt: skip
        share = count / self.count
        return Waits(rank, share) if share >= MIN_SHARE else None


class Standing:
    """The positions of all ranks of a run.

    Args:
        records: the records of known ranks, by rank.
        program: the file that the ranks run.
        size: the number of ranks of a stage: the first has the ranks 0 to size - 1.
    """

    def __init__(self, records: Mapping[int, bytes], program: Path, size: int):
        self.program = program
        self.positions = {rank: Position.of(data) for rank, data in sorted(records.items())}
        of_stages: dict[int, dict[int, Position]] = {}
        for rank, position in self.positions.items():
            of_stages.setdefault(rank // size, {})[rank] = position
        self.of_stages = list(of_stages.values())

    def has_parted(self) -> bool:
        """Whether ranks of a stage have begun different collectives."""
        return any(_parting(stage) is not None for stage in self.of_stages)

    def of_rank(self, rank: int) -> list[str]:
        """Return where one rank stands; nothing where it was in no collective."""
        position = self.positions.get(rank)
        if position is None or not position.begun:
            return []
        return [f"  rank {rank}: {_text(position, LineTexts(self.program))}"]

    def report(self, stopped: Collection[int] = ()) -> list[str]:
        """Return a text of the positions of all ranks, the last rank first; empty if no rank was in
        a collective.

        Args:
            stopped: the ranks that are stopped.
        """
        if not any(p.begun for p in self.positions.values()):
            return []
        lines = LineTexts(self.program)
        some = [s for s in self.of_stages if not s.keys().isdisjoint(stopped)] or self.of_stages
        first = list(filter(None, (_difference(stage, lines, stopped) for stage in some)))
        first = first or list(_awaited_ranks(self.positions, lines))
        stand: dict[str, list[int]] = {}
        for rank, p in self.positions.items():
            stand.setdefault(_text(p, lines), []).append(rank)
        shown = [f"  {_ranks(ranks)}: {text}" for text, ranks in [*stand.items()][:SHOWN]]
        return [f"  {text}" for text in first] + shown + ["  ..."] * (len(stand) > SHOWN)


def _parting(positions: Mapping[int, Position]) -> int | None:
    """Return the number of the first collective that ranks have begun at different lines."""
    numbers = sorted({n for p in positions.values() for n in p.lines})
    for n in numbers:
        if len({p.lines[n] for p in positions.values() if n in p.lines}) > 1:
            return n
    return None


def _difference(
    positions: Mapping[int, Position], lines: LineTexts, stopped: Collection[int]
) -> str:
    """Return the ranks of a stage that are not at the position of the majority."""
    if (number := _parting(positions)) is not None:
        at = {rank: p.lines[number] for rank, p in positions.items() if number in p.lines}
        expected = Counter(at.values()).most_common(1)[0][0]
        other = [rank for rank, line in at.items() if line != expected]
        return (
            f"{_ranks(other)} went to {_line_text(at[other[0]], lines)}, the others to "
            f"{_line_text(expected, lines)}: the ranks do not begin the same collectives"
        )
    low = min(p.progress for p in positions.values())
    lagging = [rank for rank, p in positions.items() if p.progress == low]
    if len(lagging) == len(positions):
        return ""
    lagging = [rank for rank in lagging if rank in stopped] or lagging
    first, most = positions[lagging[0]], max(p.begun for p in positions.values())
    if first.waits:
        doing = f"in {first.doing}, " if first.doing else ""
        at = _line_text(first.lines[first.begun], lines)
        here = f"{_ranks(lagging)} {_verb(lagging, 'wait')} {doing}at {at}"
    elif first.doing:
        here = f"{_ranks(lagging)} {_verb(lagging, 'is', 'are')} in {first.doing}"
    else:
        known = (p.lines[first.begun + 1] for p in positions.values() if first.begun + 1 in p.lines)
        line = next(known, None)
        where = "its next collective" if line is None else _line_text(line, lines)
        here = f"{_ranks(lagging)} {_verb(lagging, 'has', 'have')} not come to {where}"
    ahead = most - first.begun
    if not (first.waits or first.doing) and ahead == 1:
        return f"{here}, where the others wait"
    far = "one collective" if ahead == 1 else f"{ahead} collectives"
    same = len({p.begun for rank, p in positions.items() if rank not in lagging}) == 1
    return f"{here}, the others are {'' if same else 'up to '}{far} further"


def _awaited_ranks(positions: Mapping[int, Position], lines: LineTexts) -> Iterable[str]:
    """Yield a text for each rank that other stages wait for, and that waits for no other stage."""
    by: dict[int, list[int]] = {}
    for rank, p in positions.items():
        if p.peer >= 0:
            by.setdefault(p.peer, []).append(rank)
    for rank, waiting in sorted(by.items()):
        if rank in positions and positions[rank].peer < 0:
            yield (
                f"{_ranks(waiting)} {_verb(waiting, 'wait')} for rank {rank}: "
                f"{_text(positions[rank], lines)}"
            )


def _text(p: Position, lines: LineTexts) -> str:
    """The position of a rank, without its number."""
    parts = [f"step {p.step}"] if p.step else []
    parts += [p.doing] if p.doing else []
    if not p.begun:
        return ", ".join([*parts, "before the first collective"])
    what = "in" if p.waits else "after"
    return ", ".join([*parts, f"{what} {_line_text(p.lines[p.begun], lines, program=True)}"])


def _line_text(line: int, lines: LineTexts, program: bool = False) -> str:
    """The text of a program line, and the lines of the source it comes from."""
    what, sources = lines.describe(line)
    places = [*sources, *([f"{lines.name}:{line}"] if line and (program or not sources) else [])]
    return f"{what} ({', '.join(places)})" if places else what


def _verb(ranks: list[int], word: str, plural: str = "") -> str:
    if len(ranks) == 1:
        return word if plural else f"{word}s"
    return plural or word


def _ranks(ranks: list[int]) -> str:
    """Ranks as text: `ranks 0-2, 5`."""
    spans = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        spans.append(f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(spans)}"
