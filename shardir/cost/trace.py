"""Traces in Chrome's JSON format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process of a trace stands for a rank, or for ranks with equal programs. A thread stands for a row,
with one event at a time. `Trace Event Format`, Google, 2016: complete events (X), counters (C),
flows (s, f), instants (i), names (M). Times are in microseconds.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from xdsl.ir import Operation

from shardir.algebra.mesh import axes_text
from shardir.cost.report import LARGEST, op_text
from shardir.cost.seconds import OpCost
from shardir.cost.simulator import COMPUTE, RankTimeline, SimulatedEvent, Simulation
from shardir.cost.stages import TimedRun
from shardir.dialects import dist
from shardir.dialects.locations import describe_maker, short_location

ACTIONS = "functions"
"""The row of stages' functions."""


class Trace:
    """The events of all processes of a trace."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.processes = count()
        self.arrows = count(1)

    def text(self) -> str:
        """Return the JSON text, one line for each event."""
        lines = ",\n".join(json.dumps(e) for e in self.events)
        return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}\n'


class Process:
    """A process of a trace, and its rows."""

    def __init__(self, trace: Trace, name: str):
        self.trace, self.pid = trace, next(trace.processes)
        self._rows: dict[str, int] = {}
        self._about("process_name", 0, name=name)
        self._about("process_sort_index", 0, sort_index=self.pid)

    def row(self, name: str) -> int:
        """Return the thread of a row. A new row is shown below the existing ones."""
        if name not in self._rows:
            tid = self._rows[name] = len(self._rows)
            self._about("thread_name", tid, name=name)
            self._about("thread_sort_index", tid, sort_index=tid)
        return self._rows[name]

    def event(
        self, row: str, name: str, begin: float, end: float, category: str, args: Mapping[str, Any]
    ) -> None:
        """Add an event on a row, from `begin` to `end` in seconds."""
        self._add(
            "X", begin, row, name=name, cat=category, dur=_microseconds(end - begin),
            args=dict(args),
        )  # fmt: skip

    def counter(self, name: str, at: float, **values: float) -> None:
        """Set the values of a counter from a time on, in seconds."""
        self.trace.events.append(
            {"ph": "C", "pid": self.pid, "name": name, "ts": _microseconds(at), "args": values}
        )

    def instant(self, row: str, name: str, at: float, args: Mapping[str, Any]) -> None:
        """Add a mark on a row at a time, in seconds."""
        self._add("i", at, row, name=name, s="p", args=dict(args))

    def arrow(self, row: str, at: float, to: "Process", to_row: str, to_at: float) -> None:
        """Add an arrow from the event of `row` at the time `at` to the event of `to_row` in the
        process `to` at `to_at`; times are in seconds."""
        number = next(self.trace.arrows)
        about = {"name": "sent", "cat": "transfer", "id": number}
        self._add("s", at, row, **about)
        to._add("f", to_at, to_row, bp="e", **about)

    def _add(self, phase: str, at: float, row: str, **fields: Any) -> None:
        self.trace.events.append(
            {"ph": phase, "pid": self.pid, "tid": self.row(row), "ts": _microseconds(at), **fields}
        )

    def _about(self, what: str, tid: int, **args: Any) -> None:
        self.trace.events.append(
            {"ph": "M", "pid": self.pid, "tid": tid, "name": what, "args": args}
        )


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 6)


def name_of(op: Operation) -> str:
    """Return the name of an op's events: `%y = nn.matmul net.ir:22`."""
    return f"{op_text(op)} {short_location(op)}".rstrip()


def about(cost: OpCost) -> Iterator[tuple[str, Any]]:
    """Yield the arguments that an event shows for its op."""
    op = cost.op
    yield "op", op.name
    yield "bytes", cost.bytes
    if not cost.communicates:
        yield "flops", cost.flops
        return
    yield "form", cost.form
    if cost.axes:
        yield "over", axes_text(cost.axes)
    if isinstance(op, dist.CollectiveOp):
        yield "in flight", dist.is_started(op)
    yield "made by", ", ".join(dict.fromkeys(map(describe_maker, op.operands)))
    users = dict.fromkeys(use.operation for v in op.results for use in v.uses)
    yield "needed by", ", ".join(map(name_of, users))


def add_simulation(trace: Trace, simulation: Simulation) -> list[Process]:
    """Add the simulated run of a function to a trace, and return its processes, one for each
    `RankTimeline`."""
    cost = simulation.cost
    processes = []
    for timeline in simulation.ranks:
        if timeline.rank is None:
            ranks = "all ranks" if cost.mesh.size > 1 else "rank 0"
        else:
            ranks = f"pipeline rank {timeline.rank}"
        process = Process(trace, f"predicted @{cost.name}, {ranks}")
        processes.append(process)
        _add_timeline(process, timeline)
    for process, timeline in zip(processes, simulation.ranks, strict=True):
        for event, maker_run in timeline.arrivals:
            source = next(r.rank for r in simulation.ranks if maker_run in r.runs)
            assert source is not None
            middle = (maker_run.begin + maker_run.end) / 2  # an end would be ambiguous
            processes[source].arrow(ACTIONS, middle, process, event.row, event.begin)
    return processes


def _add_timeline(process: Process, timeline: RankTimeline) -> None:
    """Add the rows, the live bytes and the peak of a timeline to its process."""
    for run in timeline.runs:
        process.event(ACTIONS, action_name(run), run.begin, run.end, "function", {})
    for row in timeline.rows:
        process.row(row)
    for e in timeline.events:
        process.event(e.row, event_name(e), e.begin, e.end, category(e), dict(about(e.cost)))
    before = None
    for at, held in timeline.bytes:
        if held != before:
            process.counter("live bytes", at, bytes=held)
            before = held
    use = timeline.memory
    at = next((at for at, held in timeline.bytes if held == use.peak), 0.0)
    largest = {f"%{s.value.name_hint}": s.bytes for s in use.storages if s.value.name_hint}
    lives = {"by purpose": use.parts, "largest": dict(list(largest.items())[:LARGEST])}
    process.instant(COMPUTE, f"peak: {use.peak} B", at, {"at": name_of(use.op), **lives})


def action_name(run: TimedRun) -> str:
    """Return the name of a run of a stage's function: its action, `2F0`, or the function's name."""
    action = run.run.action
    return str(action) if action is not None else run.run.op.callee.string_value()


def event_name(e: SimulatedEvent) -> str:
    """Return the name of an event."""
    what = "wait for the last rank at " if e.late else "wait for " if e.waits else ""
    return what + name_of(e.cost.op)


def category(e: SimulatedEvent) -> str:
    """Return the category of an event, by which a trace can be filtered."""
    if e.waits:
        return "skew" if e.late else "exposed"
    return "communication" if e.cost.communicates else "computation"


def predicted_trace(simulations: list[Simulation]) -> str:
    """Return the trace of simulated runs, as JSON."""
    trace = Trace()
    for simulation in simulations:
        add_simulation(trace, simulation)
    return trace.text()
