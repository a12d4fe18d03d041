"""The search for the mesh of a stage, the number of stages, the microbatches and the schedule.

All numbers are enumerated: a mesh of the devices of one stage, which has the number of ranks; and
the microbatches, and the stages on each rank. Two bounds of the seconds of a step rule some out:

1. One device would take the seconds of all ops, without communication; all devices together take
   them that time at least, divided by their number.
2. With more microbatches a step does not take less time for a sample. So the seconds of all ops,
   under the fastest layouts that are found on a mesh, divided by the ranks, are a bound for all
   multiples of the number of microbatches.

Both know the work of all ranks; with one stage on each rank also that ranks wait for their first
microbatch (`waiting_bound`). A bound is less than the time of the plan that it is made of by the
gap of the search for layouts.

For what is left the layouts are searched for, the ops are split into stages for each named schedule
(stages.py), and the step is simulated. If programs are to be measured, those are lowered whose
estimates are below the best step by less than `MARGIN`; otherwise the estimate decides. Numbers of
ranks near the cube root of all devices come first, and a few microbatches for each rank.

A search for layouts of a large model takes a second. So their number may be limited. Then only
those candidates are looked at that seem faster than the best one, by the costs on the same mesh
with the nearest number of microbatches. The bound of all that is left out is reported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2
from typing import Any, NamedTuple

from shardir.algebra.estimates import IMPROVEMENT, ranked
from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Schedule, named_schedules, simulate
from shardir.analysis.in_flight import in_flight
from shardir.diagnostics import Failure
from shardir.search.stages.stage_costs import (
    UNLIMITED,
    UnitCosts,
    costs_in_memory,
    costs_of_stages,
    sums_of_stages,
)
from shardir.search.stages.stages import Segments, StageSplit, split

MARGIN = 0.05
"""The part by which the program of a candidate may be faster than its estimate."""

LARGE = 64
"""The size of an axis above which meshes are tried last: few dimensions are divisible by it, and of
others the redistributions are planned one by one."""

USUAL = 2
"""The microbatches for each rank that are tried first."""


class StageCandidate(NamedTuple):
    """A choice; `mesh` is that of one stage. Without stages `schedule` is empty."""

    mesh: Mesh
    ranks: int
    microbatches: int
    chunks: int = 1
    schedule: str = ""

    def __str__(self) -> str:
        loop = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        chunks = f", chunks = {self.chunks}" if self.chunks > 1 else ""
        stages = f", <{self.schedule}, ranks = {self.ranks}{chunks}>" if self.schedule else ""
        return f"{self.mesh}{loop}{stages}"


class StepEstimate(NamedTuple):
    """The estimated seconds of a step, the bytes of a device, and the ops with which stages begin,
    by their numbers; with the number of all ops last."""

    seconds: float
    bytes: float
    cuts: tuple[int, ...]


class StepMeasure(NamedTuple):
    """The seconds of a lowered step, and the bytes of a device."""

    seconds: float
    bytes: float


class FoundStages(NamedTuple):
    """A candidate with its figures; where programs are not measured, they are the estimates."""

    candidate: StageCandidate
    estimate: StepEstimate
    measured: StepMeasure


@dataclass
class Space:
    """The numbers and meshes that are enumerated.

    Attributes:
        meshes: with the number of ranks of each.
        microbatches: their numbers, the lowest one first.
        chunks: the numbers of stages on a rank.
        schedules: the names of the schedules; empty: all.
        stages: the largest number of stages.
    """

    meshes: Sequence[tuple[Mesh, int]]
    microbatches: Sequence[int]
    chunks: Sequence[int] = (1,)
    schedules: Sequence[str] = ()
    stages: float = inf

    def each(self, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield the numbers of microbatches and chunks of steps on so many ranks."""
        for m in self.microbatches:
            if ranks == 1:
                yield m, 1
            elif m > 1:
                yield from ((m, v) for v in self.chunks if ranks * v <= self.stages)

    @property
    def size(self) -> int:
        """The number of candidates, schedules aside."""
        return sum(1 for _, ranks in self.meshes for _ in self.each(ranks))

    def named(self, ranks: int, microbatches: int, chunks: int) -> Iterator[tuple[str, Schedule]]:
        """Yield the schedules with these numbers; of equal ones the first."""
        seen = list[Schedule]()
        for name, s in named_schedules(ranks, microbatches, chunks).items():
            if (not self.schedules or name in self.schedules) and s not in seen:
                seen.append(s)
                yield name, s


@dataclass
class JointSearch:
    """The search in a space.

    Attributes:
        costs: returns the costs of all ops on a mesh with a number of microbatches, under layouts
            with which the step in one stage keeps to some bytes. Raises Failure if there are none.
        cuts: returns the cuts between ops that are considered, by the stages and chunks.
        limit: the bytes of a device.
        measure: lowers the step of a candidate, whose stages begin at these ops; None where
            programs are not measured.
        report: receives lines.
        searches: the number of searches for layouts, about; 0: as many as bounds leave.
    """

    space: Space
    costs: Callable[[Mesh, int, int], UnitCosts]
    cuts: Callable[[int, int], Sequence[int]]
    limit: float
    measure: Callable[[StageCandidate, Sequence[int]], StepMeasure] | None
    report: Callable[[str], object]
    searches: int = 0
    fewest: float = inf
    """The bytes that the candidate needs that needs the fewest, of those that were tried."""
    searched: int = 0
    tried: int = 0
    over: list[StageCandidate] = field(default_factory=list)
    """Those that need more memory with the fastest layouts."""
    left_out: list[float] = field(default_factory=list)
    """The bounds of what was left out."""
    errors: list[Failure] = field(default_factory=list)
    best: FoundStages | None = None
    floor: UnitCosts | None = None
    """The costs on one device."""
    layouts: dict[Mesh, dict[int, UnitCosts]] = field(default_factory=dict)
    """The costs under the fastest layouts of each mesh, by the number of microbatches."""

    def run(self) -> FoundStages:
        """Return the fastest candidate.

        Raises:
            Failure: there is none, or none keeps to the memory.
        """
        mesh, _ = self.space.meshes[0]
        one = replace(mesh, axes=(("a", 1),), cluster=mesh.cluster and mesh.cluster.part(1))
        self.floor = self._costs(one, self.space.microbatches[0])
        for of in self._in_order():
            if self._is_open(of) and self._seems_better(of):
                self._try(of)
        for of in sorted(self.over, key=self._bound):
            is_left_out = self.best is not None and self.searches > 0
            if self._is_open(of) and self._left_out(self._bound(of), is_left_out):
                self._try(of, in_memory=True)
        if self.best is not None:
            return self.best
        if self.fewest < inf:
            raise Failure(
                f"expected stages within {self.limit:.0f} B on a device, got {self.fewest:.0f} B, "
                "the fewest that were found; use more devices, or a smaller batch"
            )
        raise self.errors[0] if self.errors else Failure("expected candidates, got none")

    @property
    def bound(self) -> float:
        """The seconds below which no candidate was left out."""
        assert self.best is not None
        return min([self.best.measured.seconds, *self.left_out])

    @property
    def summary(self) -> str:
        """The numbers of candidates that were looked at."""
        return (
            f"of {self.space.size} numbers of ranks, microbatches and chunks with a mesh, layouts "
            f"were searched for {self.searched}, schedules for {self.tried}"
        )

    def _in_order(self) -> Iterator[StageCandidate]:
        """Yield the candidates, schedules aside, in the order in which they are tried."""
        devices = max(m.size * p for m, p in self.space.meshes)

        def key(of: StageCandidate) -> tuple[Any, ...]:
            largest = max(size for _, size in of.mesh.axes)
            near = abs(log2(of.ranks) - log2(devices) / 3)
            few = abs(log2(of.microbatches) - log2(USUAL * of.ranks))
            return largest > LARGE, near, -of.ranks, few, of.microbatches, of.chunks, largest

        yield from sorted(
            (StageCandidate(mesh, ranks, m, chunks) for mesh, ranks in self.space.meshes
             for m, chunks in self.space.each(ranks)), key=key,
        )  # fmt: skip

    def _is_open(self, of: StageCandidate) -> bool:
        """Whether a candidate may be better than the best one."""
        bound = self._bound(of)
        best = inf if self.best is None else self.best.measured.seconds
        return self._left_out(bound, bound >= best * IMPROVEMENT)

    def _seems_better(self, of: StageCandidate) -> bool:
        """Whether a candidate is tried, if the number of searches is limited."""
        known = self.layouts.get(of.mesh, {})
        if not self.searches or self.best is None or of.microbatches in known:
            return True
        estimate = 0.0
        if known:
            near = min(known, key=lambda m: abs(log2(m) - log2(of.microbatches)))
            costs, ranks = known[near], of.ranks
            waits = sum(costs.forward) * (ranks - 1) / (ranks * of.chunks)
            work = near * sum(costs.seconds) + sum(costs.once)
            estimate = work / ranks + waits * near / of.microbatches
        return self._left_out(
            self._bound(of),
            self.searched >= self.searches or estimate >= self.best.measured.seconds,
        )

    def _left_out(self, bound: float, is_left_out: bool) -> bool:
        """Record the bound of a candidate that is left out; return whether it is not."""
        if is_left_out:
            self.left_out.append(bound)
        return not is_left_out

    def _bound(self, of: StageCandidate) -> float:
        """Return a bound of the seconds of a candidate."""
        found = 0.0
        if self.floor is not None:
            fewest = self.space.microbatches[0]
            found = step_bound(self.floor, fewest, of, of.mesh.size)
        for m, costs in self.layouts.get(of.mesh, {}).items():
            if of.microbatches % m == 0:
                found = max(found, step_bound(costs, m, of))
        return found

    def _costs(self, mesh: Mesh, microbatches: int) -> UnitCosts | None:
        known = self.layouts.setdefault(mesh, {})
        if microbatches not in known:
            self.searched += 1
            try:
                known[microbatches] = self.costs(mesh, microbatches, UNLIMITED)
            except Failure as e:
                self.errors.append(e)
        return known.get(microbatches)

    def _try(self, of: StageCandidate, in_memory: bool = False) -> None:
        """Search for layouts, and try each schedule. Where none keeps to the memory with the
        fastest layouts, others are searched for later: `in_memory`."""
        costs = self._costs(of.mesh, of.microbatches)
        if costs is None or not self._is_open(of):
            return
        cuts, orders = self.cuts(of.ranks * of.chunks, of.chunks), dict[str, Schedule]()
        if len(cuts) <= of.ranks * of.chunks:
            return
        if of.ranks > 1:
            orders = dict(self.space.named(of.ranks, of.microbatches, of.chunks))
        placed = {name: (s.placement, in_flight(s)) for name, s in orders.items()}
        if of.ranks == 1:
            placed = {"": ((0,), [[(1,)]])}
        if not placed:
            return

        def splits(costs: UnitCosts) -> dict[str, StageSplit]:
            segments = Segments.of(costs, cuts)
            return {name: split(segments, *on, self.limit) for name, on in placed.items()}

        def need(costs: UnitCosts) -> float:
            return min(s.need for s in splits(costs).values())

        if in_memory:
            costs = costs_in_memory(
                lambda memory: self.costs(of.mesh, of.microbatches, memory), need, self.limit
            )
        elif need(costs) > self.limit:
            self.fewest = min(self.fewest, need(costs))
            self.over.append(of)
            return
        self.tried += 1
        found = list[tuple[float, StageCandidate, StepEstimate]]()
        for name, each in splits(costs).items():
            self.fewest = min(self.fewest, each.need)
            if each.cuts is None:
                continue
            at = tuple(cuts[i] for i in each.cuts)
            seconds = step_seconds(costs, of.mesh, at, orders.get(name), of.microbatches)
            candidate = of._replace(schedule=name)
            found.append((seconds, candidate, StepEstimate(seconds, each.need, at)))
        by_bytes = ranked(found, lambda each: each[0], lambda each: each[2].bytes)
        for _, (seconds, candidate, estimate) in by_bytes:
            if self.measure is None:
                self._offer(candidate, estimate, StepMeasure(seconds, estimate.bytes))
            elif self.best is None or seconds * (1 - MARGIN) < self.best.measured.seconds:
                try:
                    measured = self.measure(candidate, estimate.cuts)
                except Failure as e:
                    self.errors.append(e)
                    continue
                self._offer(candidate, estimate, measured)

    def _offer(
        self, candidate: StageCandidate, estimate: StepEstimate, measured: StepMeasure
    ) -> None:
        """Keep a candidate if it is the best so far."""
        self.fewest = min(self.fewest, measured.bytes)
        before = inf if self.best is None else self.best.measured.seconds
        if measured.bytes <= self.limit and measured.seconds < before * IMPROVEMENT:
            self.best = FoundStages(candidate, estimate, measured)
            self.report(f"{candidate}: {measured.seconds:.6g} s")


def step_bound(costs: UnitCosts, microbatches: int, of: StageCandidate, devices: int = 1) -> float:
    """Return a bound of the seconds of a candidate, by the costs of a step with a number of
    microbatches that divides its own. `devices`: those of a stage, if the costs are of one."""
    loop, once = (x / devices for x in (microbatches * sum(costs.seconds), sum(costs.once)))
    bound = (loop + once) / of.ranks
    if of.ranks > 1 and of.chunks == 1 and loop:
        forward = microbatches * sum(costs.forward) / devices
        bound = max(bound, waiting_bound(loop, forward, of.microbatches, of.ranks))
    return bound * (1 - costs.slack)


def waiting_bound(loop: float, forward: float, microbatches: int, ranks: int) -> float:
    """Return a bound of the seconds of a loop with one stage on each rank, for any split of its
    ops, of which the forward part has the same share everywhere.

    Rank r waits for the forward part of the stages before, h_r, and then works: T >= h_r + m w_r.
    The split for which all of these are equal has the minimum T. With f = forward / loop it has
    T - h_(r+1) = (T - h_r) (1 - f / m), and the sum of all w_r is T (1 - (1 - f / m)^p) / f.
    """
    share = forward / loop
    if not share:
        return loop / ranks
    return share * loop / microbatches / (1 - (1 - share / microbatches) ** ranks)


def step_seconds(
    costs: UnitCosts, mesh: Mesh, cuts: Sequence[int], schedule: Schedule | None, microbatches: int
) -> float:
    """Return the estimated seconds of a step whose stages begin at these ops; without a schedule
    in one stage."""
    if schedule is None:
        return microbatches * sum(costs.seconds) + sum(costs.once)
    timeline = simulate(schedule, costs_of_stages(costs, mesh, cuts))
    once = sums_of_stages(costs.once, cuts)
    return max(
        runs[-1].end + sum(once[s] for s, r in enumerate(schedule.placement) if r == rank)
        for rank, runs in enumerate(timeline.ranks)
    )
