"""The simulated run of a function: when each device computes, communicates, waits, and what it
holds.

It is the schedule of `schedule.py` that reports, the search and overlap price by, with a row for
each thing that works on its own:

    compute        ops one after the other, and between them the waits for collectives
    links: LEVEL   the collectives on the links of a level of the cluster, as many rows as are at a
                   time
    host copies    the copies from and to host memory
    arrivals       values of other ranks of a pipeline in transfer, as many rows as are at a time

The events of the row `compute` follow each other without a gap in a step without stages; in a step
in stages the gaps are the bubble. A row holds one event at a time. An op in a loop over
microbatches is one event, of all its runs.
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
    """An op on a row, from `begin` to `end` in seconds; on the row of computation also what the
    device waits for, and whether for another device that is late. `run` is the function of a stage
    that it is in."""

    row: str
    begin: float
    end: float
    cost: OpCost
    waits: bool = False
    run: StageRun | None = None
    late: bool = False

    def later(self, seconds: float, run: StageRun) -> "SimulatedEvent":
        """Return the event in a function that begins after some seconds."""
        return self._replace(begin=self.begin + seconds, end=self.end + seconds, run=run)


class SharedRows:
    """Rows for events of which several may be at a time: `arrivals`, `arrivals 2`, ..."""

    def __init__(self) -> None:
        self._ends: dict[str, list[float]] = {}

    def free(self, name: str, begin: float, end: float) -> str:
        """Return the first row of a name that is free from `begin` on, until `end`; events come by
        their begin."""
        ends = self._ends.setdefault(name, [])
        index = next((i for i, other in enumerate(ends) if other <= begin), len(ends))
        ends[index : index + 1] = [end]
        return f"{name} {index + 1}" if index else name


class StageArrival(NamedTuple):
    """A value from another rank of the pipeline, and the run of the function that makes it."""

    event: SimulatedEvent
    made: TimedRun


@dataclass(frozen=True)
class RankTimeline:
    """The run of the devices of one role: of all ranks, or those of one rank of a pipeline."""

    rank: int | None
    """The rank of the schedule; None without stages."""
    events: tuple[SimulatedEvent, ...]
    """By begin."""
    bytes: tuple[tuple[float, int], ...]
    """The live bytes of a device from a time on, at the ops or functions."""
    memory: MemoryUse
    """The peak, with what lives there."""
    runs: tuple[TimedRun, ...] = ()
    arrivals: tuple[StageArrival, ...] = ()

    @property
    def rows(self) -> list[str]:
        """The rows, in their order: computation first."""
        found = dict.fromkeys(e.row for e in self.events)
        return sorted(found, key=lambda row: (row != COMPUTE, row))

    def busy(self, row: str) -> float:
        """Return the seconds in which a row works."""
        return sum(e.end - e.begin for e in self.events if e.row == row and not e.waits)

    @property
    def exposed(self) -> float:
        """The seconds in which the device waits for collectives and copies, from when the last
        device begins them."""
        return sum(e.end - e.begin for e in self.events if e.waits and not e.late)


@dataclass(frozen=True)
class Simulation:
    """The simulated run of a function: one timeline for each role."""

    cost: FunctionCost
    ranks: tuple[RankTimeline, ...]

    @property
    def seconds(self) -> float:
        """The time from the first event to the end of the last, which the report has too."""
        ends = (e.end for rank in self.ranks for e in rank.events)
        return max(ends, default=0.0)

    @property
    def bubbles(self) -> list[float]:
        """The share of the time in which each rank neither computes nor waits within a stage."""
        busy = (sum(e.end - e.begin for e in r.events if e.row == COMPUTE) for r in self.ranks)
        return [1 - each / self.seconds if self.seconds else 0.0 for each in busy]


def simulate(module: ModuleOp, cluster: Cluster | None = None) -> list[Simulation]:
    """Return the simulated runs of the functions that `report` has, those of stages within the
    step that calls them.

    Args:
        cluster: the devices and links, if not those of the meshes.

    Raises:
        ShardirError: a mesh is no part of the cluster, or an op has no cost.
    """
    return [
        simulated(f, on_cluster(mesh, cluster))
        for f, mesh in functions(module)
        if not is_global(f) and train.stage_of(f) is None
    ]


def simulated(f: FuncOp, mesh: Mesh) -> Simulation:
    """Return the simulated run of a function on the mesh's cluster."""
    cost = cost_of_function(f, mesh)
    if isinstance(cost, StagedCost):
        return Simulation(cost, tuple(_of_stages(f, cost)))
    events = sorted(_events(cost.times), key=lambda e: e.begin)
    rank = RankTimeline(None, tuple(events), tuple(_bytes(f, cost)), memory_of(f, mesh))
    return Simulation(cost, (rank,))


def row_of(level: str) -> str:
    """Return the row of a level's links, or of copies."""
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


def _bytes(f: FuncOp, cost: FunctionCost) -> Iterator[tuple[float, int]]:
    """Yield the live bytes at each op, from the time at which the device reaches it."""
    reached, now = {t.cost.op: t.reached for t in cost.times}, 0.0
    live = LiveStorages(f, cost.mesh)
    for op, needed in zip(live.ops, live.needed, strict=True):
        now = reached.get(op, now)  # marks take no time
        yield now, needed


# ---- steps in stages ----


def _of_stages(f: FuncOp, cost: StagedCost) -> Iterator[RankTimeline]:
    """Yield the timeline of each rank of the schedule."""
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
    """Yield the values that a rank receives, each on the first row that is free."""
    rows = SharedRows()
    mine = [(a, op) for (op, _, target), a in arrivals.items() if target == rank]
    for a, op in sorted(mine, key=lambda found: found[0].begin):
        cost = cost_of(op, mesh)
        assert cost is not None
        row = rows.free(ARRIVALS, a.begin, a.end)
        yield StageArrival(SimulatedEvent(row, a.begin, a.end, cost, run=a.made), runs[a.made])
