"""The simulated run of a function: when each device computes, communicates and waits, and what
memory it holds.

It has the times of `schedule.py`, by which reports, the search and overlap price, and one row for
each resource that works independently:

    compute        ops in program order, and the waits for collectives between them
    links: LEVEL   collectives on the links of a level of the cluster
    host copies    copies from and to host memory
    arrivals       transfers from other ranks of a pipeline

A row holds one event at a time; simultaneous events take several rows: `arrivals`, `arrivals 2`.
The events of `compute` follow each other without a gap in a step without stages; in a step in
stages the gaps are the bubble. An op in a loop over microbatches is one event for all its runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh
from shardir.cost.functions import functions, is_global, on_cluster
from shardir.cost.memory import LiveStorages, MemoryUse, memory_of
from shardir.cost.report import FunctionCost, StagedCost, cost_of_function
from shardir.cost.schedule import TimedOp, device_waits
from shardir.cost.seconds import OpCost, cost_of
from shardir.cost.stages import Arrival, TimedRun, bytes_at_runs, times_of_step
from shardir.dialects import train
from shardir.dialects.train import StageRun, TransferOp

COMPUTE, LINKS, HOST, ARRIVALS = "compute", "links: ", "host copies", "arrivals"
"""The rows; LINKS is followed by the name of a level."""


class SimulatedEvent(NamedTuple):
    """An op on a row, from `begin` to `end` in seconds.

    Attributes:
        waits: the device waits for the op, a collective, on the row of computation.
        run: the run of a stage's function that contains the event.
        late: the device waits for the last device to begin the collective.
    """

    row: str
    begin: float
    end: float
    cost: OpCost
    waits: bool = False
    run: StageRun | None = None
    late: bool = False

    def later(self, seconds: float, run: StageRun) -> "SimulatedEvent":
        """Return the event of a function's run that begins `seconds` later."""
        return self._replace(begin=self.begin + seconds, end=self.end + seconds, run=run)


class SharedRows:
    """Rows for events that may overlap: `arrivals`, `arrivals 2`, ..."""

    def __init__(self) -> None:
        self._ends: dict[str, list[float]] = {}

    def free(self, name: str, begin: float, end: float) -> str:
        """Occupy the first row of a name that is free at `begin`, until `end`, and return it. Calls
        come in the order of `begin`."""
        ends = self._ends.setdefault(name, [])
        index = next((i for i, other in enumerate(ends) if other <= begin), len(ends))
        ends[index : index + 1] = [end]
        return f"{name} {index + 1}" if index else name


class StageArrival(NamedTuple):
    """A transfer from another rank of the pipeline, and the run that makes its value."""

    event: SimulatedEvent
    made: TimedRun


@dataclass(frozen=True)
class RankTimeline:
    """The simulated run of devices that do the same: all devices, or the devices of a pipeline
    rank.

    Attributes:
        rank: of the pipeline; None without stages.
        events: in the order of their begin.
        bytes: pairs of a time in seconds and the bytes that are live from then on.
        memory: the peak.
        runs: of stages' functions.
        arrivals: transfers from other ranks of the pipeline.
    """

    rank: int | None
    events: tuple[SimulatedEvent, ...]
    bytes: tuple[tuple[float, int], ...]
    memory: MemoryUse
    runs: tuple[TimedRun, ...] = ()
    arrivals: tuple[StageArrival, ...] = ()

    @property
    def rows(self) -> list[str]:
        """The names of the rows in their order: computation first."""
        return sorted({e.row for e in self.events}, key=lambda row: (row != COMPUTE, row))

    def busy(self, row: str) -> float:
        """Return the seconds in which a row works."""
        return sum(e.end - e.begin for e in self.events if e.row == row and not e.waits)

    @property
    def exposed(self) -> float:
        """The seconds in which the device waits for collectives and copies that the last device has
        begun."""
        return sum(e.end - e.begin for e in self.events if e.waits and not e.late)


@dataclass(frozen=True)
class Simulation:
    """The simulated run of a function: one timeline for each role."""

    cost: FunctionCost
    ranks: tuple[RankTimeline, ...]

    @property
    def seconds(self) -> float:
        """The makespan, equal to the report's."""
        ends = (e.end for rank in self.ranks for e in rank.events)
        return max(ends, default=0.0)

    @property
    def bubbles(self) -> list[float]:
        """By rank, the share of the makespan in which it neither computes nor waits in a stage."""
        busy = (sum(e.end - e.begin for e in r.events if e.row == COMPUTE) for r in self.ranks)
        return [1 - seconds / self.seconds if self.seconds else 0.0 for seconds in busy]


def simulate(module: ModuleOp, cluster: Cluster | None = None) -> list[Simulation]:
    """Return the simulated runs of the functions of `report`, except stages' functions, which are
    part of their step.

    Args:
        cluster: devices and links, by default the meshes' own.

    Raises:
        ShardirError: a mesh is no part of the cluster, or an op has no cost.
    """
    return [
        simulate_function(f, on_cluster(mesh, cluster))
        for f, mesh in functions(module)
        if not is_global(f) and train.stage_of(f) is None
    ]


def simulate_function(f: FuncOp, mesh: Mesh) -> Simulation:
    """Return the simulated run of a function on the mesh's cluster."""
    cost = cost_of_function(f, mesh)
    if isinstance(cost, StagedCost):
        return Simulation(cost, tuple(_rank_timelines(f, cost)))
    events = sorted(_events(cost.times), key=lambda e: e.begin)
    rank = RankTimeline(None, tuple(events), tuple(_live_bytes(f, cost)), memory_of(f, mesh))
    return Simulation(cost, (rank,))


def row_of(level: str) -> str:
    """Return the row of a level's links; of host copies if the name is empty."""
    return f"{LINKS}{level}" if level else HOST


def _events(times: tuple[TimedOp, ...]) -> Iterator[SimulatedEvent]:
    """Yield the events of some ops, and of the waits for them."""
    rows = SharedRows()  # latencies of collectives in flight overlap
    for t in times:
        if t.level is not None:
            row = rows.free(row_of(t.level), t.begin, t.end)
            yield SimulatedEvent(row, t.begin, t.end, t.cost)
        elif t.left > t.reached and t.cost.seconds:
            yield SimulatedEvent(COMPUTE, t.reached, t.left, t.cost)
    for wait in device_waits(times):
        if wait.begun > wait.begin:
            yield SimulatedEvent(COMPUTE, wait.begin, wait.begun, wait.cost, True, late=True)
        if wait.end > wait.begun:
            yield SimulatedEvent(COMPUTE, wait.begun, wait.end, wait.cost, waits=True)


def _live_bytes(f: FuncOp, cost: FunctionCost) -> Iterator[tuple[float, int]]:
    """Yield the time at which the device reaches each op, and the bytes that are live at it."""
    reached, now = {t.cost.op: t.reached for t in cost.times}, 0.0
    live = LiveStorages(f, cost.mesh)
    for op, needed in zip(live.ops, live.needed, strict=True):
        now = reached.get(op, now)  # marks take no time
        yield now, needed


# ---- steps in stages ----


def _rank_timelines(f: FuncOp, cost: StagedCost) -> Iterator[RankTimeline]:
    """Yield the timeline of each rank of a pipeline."""
    step, held = times_of_step(f, cost.mesh), bytes_at_runs(f, cost.mesh)
    within = {op: tuple(_events(times)) for op, times in step.ops.items()}
    begins = {t.run: t for runs in step.ranks for t in runs}
    for rank, runs in enumerate(step.ranks):
        events = [e.later(t.begin, t.run) for t in runs for e in within[t.run.op]]
        arrivals = list(_arrivals(rank, step.arrivals, begins, cost.mesh))
        events += [a.event for a in arrivals]
        yield RankTimeline(
            rank, tuple(sorted(events, key=lambda e: e.begin)),
            tuple((t.begin, n) for t, n in zip(runs, held[rank], strict=True)),
            cost.memories[rank], tuple(runs), tuple(arrivals),
        )  # fmt: skip


def _arrivals(
    rank: int, arrivals: Mapping[tuple[TransferOp, int | None, int], Arrival],
    runs: Mapping[StageRun, TimedRun], mesh: Mesh,
) -> Iterator[StageArrival]:  # fmt: skip
    """Yield the transfers that a rank receives, each on the first row that is free."""
    rows = SharedRows()
    received = [(a, op) for (op, _, target), a in arrivals.items() if target == rank]
    for a, op in sorted(received, key=lambda pair: pair[0].begin):
        cost = cost_of(op, mesh)
        assert cost is not None
        row = rows.free(ARRIVALS, a.begin, a.end)
        yield StageArrival(SimulatedEvent(row, a.begin, a.end, cost, run=a.made), runs[a.made])
