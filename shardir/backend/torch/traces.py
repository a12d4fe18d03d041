"""The trace of a run: measured and predicted times of each op in common rows, and their
differences."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh, axes_text
from shardir.backend.runs import RankCalls
from shardir.backend.torch.measured import MeasuredCall, OpRun, ProgramLines
from shardir.cost.report import table
from shardir.cost.simulator import ARRIVALS, COMPUTE, SimulatedEvent, Simulation, simulate
from shardir.cost.trace import (
    ACTIONS,
    Process,
    Trace,
    about,
    add_simulation,
    category,
    event_name,
)
from shardir.dialects import dist

STEPS = "calls"
"""The row of the calls of a function."""

SPAN_ROWS = {"arrival": ARRIVALS, "send": "sends"}
"""The rows of transfers between stages."""

REST = "waits for other stages, and the runtime"
"""The time of a call besides ops and collectives."""

SKEW = "waits for other ranks"
"""The kind of seconds lost to other ranks: in a collective, until the last rank of the group begins
it, and after half of its ranks have left it (ranks that share cores do not compute at the same
time: the first to leave hold up the others); and the difference between the seconds of computation
and its work, while other ranks wait."""

COMPUTATION, EXPOSED = "computation", "exposed"

PartName = tuple[str, str]
"""A kind of op: computation, or exposed communication."""

GroupSpan = tuple[float, float]
"""When the last rank of a group begins a collective, and when half of them have left it."""


class PartDifference(NamedTuple):
    """The predicted and measured seconds of the ops of a kind in a call, as means over all ranks
    and calls, since among ranks that share cores an op may take the time of other ranks. `events`:
    the number of ops on a rank."""

    what: str
    kind: str
    events: float
    predicted: float
    measured: float


class Differences(NamedTuple):
    """The differences of a function: of a call, and of its parts, the largest first."""

    function: str
    ranks: int
    calls: int
    predicted: float
    measured: float
    computed: tuple[float, float]
    """The predicted and measured seconds of computation. Measured are the seconds of work: the
    median of all calls of the mean over ranks."""
    parts: list[PartDifference]

    @property
    def exposed(self) -> tuple[float, float]:
        """The predicted and measured seconds of a call beyond its computation."""
        return self._beyond(self.predicted, 0), self.beyond(self.measured)

    def beyond(self, seconds: float) -> float:
        """Return the seconds of a call beyond its computation; 0 without communication."""
        return self._beyond(seconds, 1)

    def _beyond(self, seconds: float, which: int) -> float:
        """Return the seconds beyond the predicted (0) or the measured (1) computation."""
        communicates = any(p.kind == EXPOSED for p in self.parts)
        return seconds - self.computed[which] if communicates else 0.0

    def __str__(self) -> str:
        head = (
            f"{self.function}: predicted {self.predicted:.3g} s, measured {self.measured:.3g} s "
            f"(mean of {self.calls} calls of {self.ranks} ranks)"
        )
        rows: list[tuple[str, ...]] = [
            ("op", "", "events", "predicted", "measured", "difference", "")
        ]
        for d in self.parts:
            seconds = (f"{s:.3g}" for s in (d.predicted, d.measured, d.measured - d.predicted))
            rows.append((d.what, d.kind, f"{d.events:.4g}", *seconds, ""))
        return "\n".join([head, *table(rows)])


class MeasuredTrace:
    """The recorded calls of all ranks, beside the simulated run of each function.

    Args:
        lines: the lines of the program that the ranks ran.
        cluster: the devices and links of the prediction; by default the mesh's.

    Raises:
        ShardirError: the mesh is no part of the cluster.
    """

    def __init__(self, lines: ProgramLines, ranks: Sequence[RankCalls], cluster: Cluster | None):
        self.functions = [
            (s, [list(lines.calls(rank.get(s.cost.name, []), s)) for rank in ranks])
            for s in simulate(lines.module, cluster)
        ]
        """The simulated run of each function, and the calls of each rank."""

    def text(self) -> str:
        """Return the trace as JSON."""
        trace = Trace()
        first = min(
            (c.begin for _, ranks in self.functions for calls in ranks for c in calls), default=0.0
        )
        for simulation, ranks in self.functions:
            if not any(ranks):
                continue
            add_simulation(trace, simulation)
            processes = [
                Process(trace, f"measured @{simulation.cost.name}, rank {rank}")
                for rank in range(len(ranks))
            ]
            for process, calls in zip(processes, ranks, strict=True):
                for call in calls:
                    _add_call(process, call, first)
            _add_arrows(processes, ranks, first)
        return trace.text()

    def differences(self) -> list[Differences]:
        """Return the differences of each function that ranks have called."""
        return [differences(s, ranks) for s, ranks in self.functions if all(ranks)]


def _add_call(process: Process, call: MeasuredCall, first: float) -> None:
    """Add the rows of a call, with times since the first call."""
    process.event(STEPS, "call", call.begin - first, call.end - first, "call", {})
    for what, *names, begin, end in call.spans:
        if what == "part":
            kind, stage, k = names
            name, row, given = f"{stage}{kind}{k}", ACTIONS, {}
        else:
            name, peer, k = names
            name, row = f"{'wait for' if what == 'arrival' else 'send'} %{name}", SPAN_ROWS[what]
            given = {"rank": peer, "microbatch": k}
        process.event(row, name, begin - first, end - first, what, given)
    for e in call.events:
        begin, end = e.begin - first, e.end - first
        process.event(e.row, event_name(e), begin, end, category(e), dict(about(e.cost)))


def _add_arrows(
    processes: Sequence[Process], ranks: Sequence[Sequence[MeasuredCall]], first: float
) -> None:
    """Add an arrow from each send to the wait for it."""
    sent: dict[tuple[Any, ...], float] = {}
    for source, calls in enumerate(ranks):
        for i, call in enumerate(calls):
            for what, *names, begin, end in call.spans:
                if what == "send":
                    name, target, k = names
                    sent[i, source, target, name, k] = (begin + end) / 2
    for target, calls in enumerate(ranks):
        for i, call in enumerate(calls):
            for what, *names, begin, _ in call.spans:
                if what == "arrival":
                    name, source, k = names
                    if (at := sent.get((i, source, target, name, k))) is not None:
                        process = processes[target]
                        processes[source].arrow(
                            SPAN_ROWS["send"], at - first, process, SPAN_ROWS[what], begin - first
                        )


def differences(simulation: Simulation, ranks: Sequence[Sequence[MeasuredCall]]) -> Differences:
    """Return where the calls of a function on all ranks differ from its simulated run."""
    seconds = simulation.seconds
    predicted = [_by_part(r.events, seconds) for r in simulation.ranks]
    measured: list[list[dict[PartName, float]]] = [[] for _ in ranks]
    for calls in zip(*ranks, strict=True):
        spans = _group_spans(calls, simulation.cost.mesh)
        for rank, call in enumerate(calls):
            measured[rank].append(
                _by_part(call.events, call.end - call.begin, spans[rank], call.work)
            )
    parts = dict.fromkeys(
        part for found in (*predicted, *(c for calls in measured for c in calls)) for part in found
    )
    numbers = [Counter(_part(e) for e in calls[-1].events if e.row == COMPUTE) for calls in ranks]

    def of(part: PartName) -> PartDifference:
        return PartDifference(
            *part,
            mean(n[part] for n in numbers),
            mean(found.get(part, 0.0) for found in predicted),
            mean(call.get(part, 0.0) for calls in measured for call in calls),
        )

    found = sorted(map(of, parts), key=lambda d: -abs(d.measured - d.predicted))
    computed = [
        mean(map(_compute_seconds, rank_parts)) for rank_parts in zip(*measured, strict=True)
    ]
    return Differences(
        simulation.cost.name, len(ranks), len(ranks[0]), seconds,
        mean(c.end - c.begin for calls in ranks for c in calls),
        (mean(map(_compute_seconds, predicted)), median(computed)), found,
    )  # fmt: skip


def _group_spans(calls: Sequence[MeasuredCall], mesh: Mesh) -> list[dict[OpRun, GroupSpan]]:
    """Return for each rank when the last rank of its group begins each collective of a call, and
    when half of them have left it."""
    spans = [
        {
            (e.cost.op, k): (e.begin, e.end)
            for e, k in _number_repeats(call.events)
            if e.row != COMPUTE
        }
        for call in calls
    ]
    found: list[dict[OpRun, GroupSpan]] = [{} for _ in calls]
    axes = {e.cost.op: e.cost.axes for call in calls for e in call.events if e.row != COMPUTE}
    for group in {group for over in axes.values() for group in mesh.groups(over)}:
        for rank in group:
            for (op, k), mine in spans[rank].items():
                if group in mesh.groups(axes[op]):
                    begins, ends = zip(
                        *(spans[other].get((op, k), mine) for other in group), strict=True
                    )
                    found[rank][op, k] = max(begins), sorted(ends)[(len(group) - 1) // 2]
    return found


def _number_repeats(events: Sequence[SimulatedEvent]) -> Iterator[tuple[SimulatedEvent, int]]:
    """Yield events, each with the number of previous events of its op and row."""
    counts = Counter[tuple[Operation, bool]]()
    for e in events:
        key = e.cost.op, e.row == COMPUTE
        yield e, counts[key]
        counts[key] += 1


def _by_part(
    events: Sequence[SimulatedEvent],
    seconds: float,
    spans: Mapping[OpRun, GroupSpan] | None = None,
    work: Mapping[OpRun, float] | None = None,
) -> dict[PartName, float]:  # fmt: skip
    """Return the seconds of each kind of op on the row of computation, and the remaining seconds.

    Args:
        spans: the span of the group of each collective (`_group_spans`): waits outside are for
            other ranks.
        work: the seconds of work of computation, if they differ from the seconds of its events; the
            difference is due to other ranks.
    """
    found = defaultdict[PartName, float](float)
    for e, k in _number_repeats(events):
        if e.row != COMPUTE:
            continue
        begin, end = e.begin, e.end
        if e.waits and spans:
            run = k // 2 if dist.is_started(e.cost.op) else k  # its start, and its end
            all_there, left = spans.get((e.cost.op, run), (begin, end))
            begin = min(max(begin, all_there), end)
            end = max(min(end, left), begin)
        mine = end - begin if e.waits else (work or {}).get((e.cost.op, k), end - begin)
        found[SKEW, ""] += e.end - e.begin - mine
        found[_part(e)] += mine
    found[REST, ""] = seconds - sum(found.values())
    return found


def _compute_seconds(parts: Mapping[PartName, float]) -> float:
    """Return the seconds of computation."""
    return sum(s for (_, kind), s in parts.items() if kind == COMPUTATION)


def _part(e: SimulatedEvent) -> tuple[str, str]:
    if e.late:
        return SKEW, ""
    if not e.waits:
        return e.cost.op.name, COMPUTATION
    over = f" over {axes_text(e.cost.axes)}" if e.cost.axes else ""
    return f"{e.cost.op.name}{over}", EXPOSED
