"""The search of a schedule for a forward part alone in stages, whose stages may form any graph.

With one stage on each rank there is one order: that of the microbatches. With several it is decided
which stage a rank runs next. Tried are the forward parts of the named schedules, and for each
placement of the stages orders by priorities: of what can begin first, the microbatch that is
closest to its end, the one that is furthest from it, the first microbatch, or the first stage. The
fastest one is taken, by the times of the functions and transfers of the program.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from xdsl.dialects.func import FuncOp

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Action, Schedule, named_schedules, placements
from shardir.cost.stage_graph import StageGraph
from shardir.cost.stages import memory_of_ranks, times_of_step
from shardir.diagnostics import ShardirError
from shardir.dialects.train import StepRuns, proven_order, set_schedule

Trial = Callable[[Schedule], tuple[FuncOp, Mesh]]
"""Returns a copy of a function, split into stages for a schedule, and its mesh."""


@dataclass(frozen=True)
class ForwardSchedule:
    """The fastest schedule that was found: the seconds of its loop, a time below which none ends
    with one of the placements, and the name of what it was made by."""

    schedule: Schedule
    seconds: float
    bound: float
    origin: str

    @property
    def summary(self) -> str:
        """The figures in a line."""
        gap = max(0.0, self.seconds / self.bound - 1) if self.bound else 0.0
        return (
            f"from {self.origin}: {self.seconds:.3g} s; at least {self.bound:.3g} s, gap {gap:.1%}"
        )


def search_forward(
    ranks: int, chunks: int, microbatches: int, trial: Trial, limit: int | None
) -> ForwardSchedule:
    """Return a fast schedule of `chunks` stages on each of the ranks.

    Args:
        limit: the bytes of a device.

    Raises:
        ShardirError: none keeps to the limit.
    """
    found: list[tuple[float, int, str, Schedule]] = []
    bounds = []
    named = {n: s.forward() for n, s in named_schedules(ranks, microbatches, chunks).items()}
    for placement in placements(ranks, chunks):
        there = {n: s for n, s in named.items() if s.placement == placement}
        first = next(iter(there.values()), None) or _by_stages(placement, ranks, microbatches)
        step, mesh = trial(first)
        graph = StageGraph.of(StepRuns(step), mesh, times_of_step(step, mesh).ranks)
        bounds.append(graph.bound(placement, microbatches))
        listed = _listed(graph, placement, ranks, microbatches) if chunks > 1 else iter(())
        tried = {schedule: name for name, schedule in (*listed, *reversed(there.items()))}
        for schedule, name in (tried or {first: "the order of the stages"}).items():
            set_schedule(step, schedule)
            try:
                proven_order(step)
            except ShardirError:  # transfers of one channel are in order, and may wait for others
                continue
            timed = (t for times in times_of_step(step, mesh).ranks for t in times)
            seconds = max(t.end for t in timed if t.run.action is not None)
            peak = max(use.peak for use in memory_of_ranks(step, mesh))
            found.append((seconds, peak, name, schedule))
    fitting = [f for f in found if limit is None or f[1] <= limit]
    if not fitting:
        smallest = min(peak for _, peak, *_ in found)
        raise ShardirError(
            f"expected a schedule within {limit} B on a device, got {smallest} B in the smallest "
            "one found; use more ranks or devices, or more and smaller microbatches"
        )
    seconds, _, name, schedule = min(fitting, key=lambda f: f[0])
    return ForwardSchedule(schedule, seconds, min(bounds), name)


def _by_stages(placement: Sequence[int], ranks: int, microbatches: int) -> Schedule:
    """Return the schedule in which each rank runs all microbatches of a stage before the next."""
    orders = tuple(
        tuple(Action(s, "F", k) for s, r in enumerate(placement) if r == rank
              for k in range(microbatches))
        for rank in range(ranks)
    )  # fmt: skip
    return Schedule(len(placement), ranks, microbatches, tuple(placement), orders)


def _listed(
    graph: StageGraph, placement: tuple[int, ...], ranks: int, microbatches: int
) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules by priorities."""
    tails = graph.tails(placement)
    keys: Mapping[str, Callable[[int, int], tuple[float, ...]]] = {
        "the end first": lambda s, k: (tails[s, "F"], k),
        "the end last": lambda s, k: (-tails[s, "F"], k),
        "microbatches": lambda s, k: (k, s),
        "stages": lambda s, k: (s, k),
    }
    for name, key in keys.items():
        orders = _filled(graph, placement, ranks, microbatches, key)
        yield name, Schedule(len(placement), ranks, microbatches, placement, orders)


def _filled(
    graph: StageGraph, placement: tuple[int, ...], ranks: int, microbatches: int,
    key: Callable[[int, int], tuple[float, ...]],
) -> tuple[tuple[Action, ...], ...]:  # fmt: skip
    """Return the orders in which always that runs which can begin first, and of several the one of
    the smallest key. A stage has its microbatches in their order."""
    ends: dict[tuple[int, int], float] = {}
    free, following = [0.0] * ranks, [0] * len(placement)
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while len(ends) < len(placement) * microbatches:
        ready = []
        for stage, rank in enumerate(placement):
            k, node = following[stage], (stage, "F")
            makers = list(graph.before[node])
            if k == microbatches or any((maker[0], k) not in ends for maker in makers):
                continue
            arrived = (ends[m[0], k] + graph.delay(m, node, placement) for m in makers)
            ready.append((max(free[rank], *arrived, 0.0), key(stage, k), stage))
        begin, _, stage = min(ready)
        k, rank = following[stage], placement[stage]
        orders[rank].append(Action(stage, "F", k))
        free[rank] = ends[stage, k] = begin + graph.seconds[stage, "F"]
        following[stage] += 1
    return tuple(map(tuple, orders))
