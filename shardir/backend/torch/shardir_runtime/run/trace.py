"""The times of the lines of a program's functions, on one rank: for shard-run --trace.

The functions are compiled from program.py again, with a mark before each statement: the program
itself is as it is, and a run without a trace takes no time for it. SHARDIR_TRACE is `K:FOLDER`: of
each function the last K calls are written to rank0.json, rank1.json, ... of the folder:

    {"functions": {"step": [{"begin": 17, "end": 99, "lines": [31, 33], "times": [18, 40],
                             "work": [20, 50], "own": [18, 41],
                             "spans": [["part", "F", 0, 1, 18, 55]]}]}}

Times are in nanoseconds of the machine's clock; the time of a mark is the begin of its line. `work`
is the CPU time of a line in all threads of this rank: times the number of ranks per core if ranks
share cores, else at most the time of the line. `own` is the work of the threads that compute: if
torch has one thread, the calling thread alone, since threads of the library move data in flight
meanwhile. `spans` are parts of steps in stages: `part` with kind, stage and microbatch; `send` and
`arrival` (the wait for a value) with its name, the peer rank, and the microbatch. On a GPU, times
are those of its stream, without `work` and `own`. The work of the marks is subtracted: reading the
clocks may take microseconds.
"""

import ast
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..plan.program import ProgramPlan
from .events import TRACE
from .process import ranks_of_a_core

MARKED, SIDE = 40, 256
"""The number of calls of ops with marks and without, to measure the work of a mark, and the side of
their square operands: small, so that a mark is a measurable part of a call."""

MARK = "the mark of a line"
"""The global name of the function that a mark calls; not an identifier, so no program has it."""


class Recorder:
    """The times of the last calls of each function.

    Args:
        calls: the number of calls to keep.
        folder: the folder of the files.
    """

    def __init__(self, calls: int, folder: Path, device: torch.device):
        self.folder = folder
        self.calls: dict[str, deque[dict[str, Any]]] = {}
        self._most = calls
        self._lines: list[int] = []
        self._times: list[Any] = []
        self._worked: list[tuple[int, int]] = []
        self._spans: list[list[Any]] = []
        self._clock = _StreamClock() if device.type == "cuda" else _HostClock()
        self._of_mark = self._work_of_mark() if device.type == "cpu" else [0.0, 0.0]

    def functions(self, plan: ProgramPlan, path: Path) -> dict[str, Callable]:
        """Return the functions of a program file, with marks."""
        tree = Marks().visit(ast.parse(path.read_text(encoding="utf-8", errors="surrogateescape")))
        made: dict[str, Any] = {"__name__": "program", "__file__": str(path), MARK: self._mark()}
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), made)
        for value in made.values():
            if hasattr(value, "recorder"):  # a step in stages
                value.recorder = self
        return {f.name: made[f.python] for f in plan.functions}

    def _mark(self) -> Callable[[int], None]:
        line, at, now = self._lines.append, self._times.append, self._clock.now
        worked, work = self._worked.append, self._clock.work

        def mark(number: int) -> None:
            line(number)
            worked(work())
            at(now())

        return mark

    def _work_of_mark(self) -> list[float]:
        """Return the work of a mark by each clock, between ops of several kinds: twice the work of
        marks in sequence, whose code stays in caches."""
        x, mark = torch.ones(SIDE, SIDE), self._mark()
        kinds = (torch.neg, torch.relu, torch.exp, torch.square, torch.sigmoid, torch.t)
        taken: tuple[list[tuple[int, ...]], ...] = [], []
        for i in range(2 * MARKED):
            begin = self._clock.work()
            for kind in kinds:
                if i % 2:
                    mark(0)
                kind(x)
            taken[i % 2].append(
                tuple(b - a for a, b in zip(begin, self._clock.work(), strict=True))
            )
        without, marked = ([median(spent) for spent in zip(*turns, strict=True)] for turns in taken)
        return [max(0.0, b - a) / len(kinds) for a, b in zip(without, marked, strict=True)]

    @contextmanager
    def call(self, function: str) -> Iterator[None]:
        """Record a call of a function."""
        for found in (self._lines, self._times, self._worked, self._spans):
            found.clear()
        begin = self._clock.now()
        yield
        end, worked = self._clock.now(), [*self._worked, self._clock.work()]
        begin, end, *times = self._clock.nanoseconds([begin, end, *self._times])
        spans = [
            [*what, *self._clock.nanoseconds([span_begin, span_end])]
            for *what, span_begin, span_end in self._spans
        ]
        taken = [b - a for a, b in pairwise([*times, end])]
        work, own = (
            self._clock.spent(clock, taken, of_mark)
            for clock, of_mark in zip(zip(*worked, strict=True), self._of_mark, strict=True)
        )
        call = {
            "begin": begin, "end": end, "lines": list(self._lines), "times": times, "spans": spans,
            "work": work, "own": own,
        }  # fmt: skip
        self.calls.setdefault(function, deque(maxlen=self._most)).append(call)

    @contextmanager
    def span(self, *what: Any) -> Iterator[None]:
        """Record a part of a call."""
        begin = self._clock.now()
        yield
        self._spans.append([*what, begin, self._clock.now()])

    def write(self, rank: int) -> None:
        """Write the calls to the file of a rank."""
        found = {name: list(calls) for name, calls in self.calls.items()}
        (self.folder / f"rank{rank}.json").write_text(json.dumps({"functions": found}))


class _HostClock:
    """The time of the host, and the CPU time of the process and of its computing threads."""

    now = staticmethod(time.perf_counter_ns)

    def __init__(self) -> None:
        alone = torch.get_num_threads() == 1
        self._own = time.thread_time_ns if alone else time.process_time_ns

    def work(self) -> tuple[int, int]:
        return time.process_time_ns(), self._own()

    def spent(self, marks: Sequence[int], taken: Sequence[int], of_mark: float) -> list[float]:
        """Return the work of lines from a clock's marks, without the work of the marks; at most the
        time of the line if each rank has a core."""
        spent = [max(0.0, b - a - of_mark) for a, b in pairwise(marks)]
        if (share := ranks_of_a_core()) > 1:
            return [share * s for s in spent]
        return [min(s, t) for s, t in zip(spent, taken, strict=True)]

    def nanoseconds(self, marks: list[int]) -> list[int]:
        return marks


class _StreamClock:
    """The time at which the current stream of a GPU reaches a mark."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._first, self._at = self.now(), time.perf_counter_ns()

    def work(self) -> tuple[int, int]:
        return 0, 0

    def spent(self, marks: Sequence[int], taken: Sequence[int], of_mark: float) -> list[float]:
        return []

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, marks: list[Any]) -> list[int]:
        torch.cuda.synchronize()
        return [self._at + round(self._first.elapsed_time(m) * 1e6) for m in marks]


class Marks(ast.NodeTransformer):
    """Writes a mark before each statement of functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        for inner in ast.walk(node):
            for field in ("body", "orelse"):
                statements = getattr(inner, field, None)
                if isinstance(statements, list):
                    marked = [x for s in statements for x in (_mark_of(s), s)]
                    setattr(inner, field, marked)
        return node


def _mark_of(statement: ast.stmt) -> ast.stmt:
    call = ast.Call(ast.Name(MARK, ast.Load()), [ast.Constant(statement.lineno)], [])
    return ast.copy_location(ast.Expr(call), statement)


def requested_recorder(device: torch.device) -> Recorder | None:
    """Return a recorder if the launcher requests a trace."""
    calls, _, folder = os.environ.get(TRACE, "").partition(":")
    return Recorder(int(calls), Path(folder), device) if folder else None
