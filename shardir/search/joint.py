"""The search for the mesh of a stage, the number of stages, the microbatches and the schedule.

All numbers are enumerated. What need not be looked at is ruled out by a bound of the seconds of a
step, which is compared with the best step so far, less `gap`:

1. Numbers of ranks, those near the cube root of all devices first, and meshes of the devices of a
   stage. The layouts of a mesh are searched for with the fewest microbatches. A step with more of them does not take less time for a
   sample, and the work of all ranks takes them the time of all ops, divided by their number: that
   is a bound for any number of microbatches and any schedule. It holds for a mesh that has twice
   the devices along an axis too: two of its devices can be simulated by one, in twice the time.
   So the bound of a mesh is that of its halves, if they were searched, until it is itself.
2. On a mesh, the numbers of microbatches and of stages on a rank, in the order of rough estimates.
   With one stage on each rank, ranks wait for their first microbatch (`waiting_bound`). If the
   bound is low enough, the layouts are searched for again, with these microbatches, within the
   memory.
3. For these layouts each named schedule: the ops are split into stages (stages.py), and the step is
   simulated. If programs are to be measured, those are lowered whose estimates are below the best
   step by less than `MARGIN`; otherwise the estimate decides.

The bound of a plan of layouts is less than its time by the gap of their search.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from math import inf, log2
from typing import NamedTuple

from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import PipelineCosts, Schedule, named_schedules, simulate
from shardir.diagnostics import Failure
from shardir.search.in_flight import in_flight
from shardir.search.stage_costs import UNLIMITED, UnitCosts, costs_in_memory
from shardir.search.stages import Segments, StageSplit, split

MARGIN = 0.05
"""The part by which the program of a candidate may be faster than its estimate."""


USUAL = 4
"""The microbatches for each rank that are tried first: ranks wait for a tenth of the time or so."""


class Candidate(NamedTuple):
    """What is chosen; `mesh` is that of one stage. Without stages `schedule` is empty."""

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

    candidate: Candidate
    estimate: StepEstimate
    measured: StepMeasure


@dataclass
class Space:
    """What is enumerated.

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
        gap: the part by which a candidate that is left out may be faster.
    """

    space: Space
    costs: Callable[[Mesh, int, int], UnitCosts]
    cuts: Callable[[int, int], Sequence[int]]
    limit: float
    measure: Callable[[Candidate, Sequence[int]], StepMeasure] | None
    report: Callable[[str], object]
    gap: float = 0.0
    fewest: float = inf
    """The bytes that the candidate needs that needs the fewest, of those that were tried."""
    searched: int = 0
    tried: int = 0
    left_out: list[float] = field(default_factory=list)
    """The bounds of what was left out."""
    errors: list[Failure] = field(default_factory=list)

    best: FoundStages | None = None
    known: dict[Mesh, float] = field(default_factory=dict)
    """A bound of the seconds of a step on each mesh."""
    layouts: dict[Mesh, dict[int, UnitCosts]] = field(default_factory=dict)
    """The costs under the fastest layouts of each mesh, by the number of microbatches."""

    def run(self) -> FoundStages:
        """Return the fastest candidate.

        Raises:
            Failure: there is none, or none keeps to the memory.
        """
        devices = max(m.size * p for m, p in self.space.meshes)
        numbers = {p for _, p in self.space.meshes}
        for ranks in sorted(numbers, key=lambda p: (abs(log2(p) - log2(devices) / 3), -p)):
            meshes = [m for m, p in self.space.meshes if p == ranks if self._mesh(m, ranks)]
            for mesh, (m, chunks) in sorted(
                product(meshes, self.space.each(ranks)), key=lambda each: self._order(ranks, *each)
            ):
                if self._is_open(self._bound(of := Candidate(mesh, ranks, m, chunks))):
                    self._numbers(of)
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
        """How many candidates were looked at."""
        return (
            f"of {self.space.size} numbers of ranks, microbatches and chunks with a mesh, layouts "
            f"were searched for {self.searched}, schedules for {self.tried}"
        )

    def _is_open(self, bound: float) -> bool:
        """Whether candidates with a bound may be better than the best one by more than the gap."""
        if self.best is None or bound < self.best.measured.seconds * (1 - self.gap):
            return True
        self.left_out.append(bound)
        return False

    def _mesh(self, mesh: Mesh, ranks: int) -> bool:
        """Search for layouts on a mesh. Return whether candidates with it may be good enough."""
        bound = max((self.known.get(half, 0.0) for half in halves(mesh)), default=0.0)
        self.known[mesh] = bound
        if not self._is_open(bound):
            return False
        fewest = self.space.microbatches[0]
        if (costs := self._costs(mesh, fewest)) is None:
            return False
        self.known[mesh] = max(bound, step_bound(costs, fewest, fewest, ranks, 2))
        return True

    def _order(self, ranks: int, mesh: Mesh, numbers: tuple[int, int]) -> tuple[float, float]:
        """Return the key of the order in which numbers of microbatches are tried: first those with
        which ranks wait a little, and samples are not split more than that needs."""
        m, chunks = numbers
        return abs(log2(m) - log2(USUAL * ranks)), self._bound(Candidate(mesh, ranks, m, chunks))

    def _bound(self, of: Candidate) -> float:
        """Return a bound of the seconds of a candidate, by the layouts that are known on its mesh:
        those for the largest number of microbatches that divides its own."""
        found = self.layouts[of.mesh]
        most = max(m for m in found if of.microbatches % m == 0)
        return step_bound(found[most], most, of.microbatches, of.ranks, of.chunks)

    def _costs(self, mesh: Mesh, microbatches: int) -> UnitCosts | None:
        known = self.layouts.setdefault(mesh, {})
        if microbatches not in known:
            self.searched += 1
            try:
                known[microbatches] = self.costs(mesh, microbatches, UNLIMITED)
            except Failure as e:
                self.errors.append(e)
        return known.get(microbatches)

    def _numbers(self, of: Candidate) -> None:
        """Search for layouts within the memory, and try each schedule."""
        if self._costs(of.mesh, of.microbatches) is None or not self._is_open(self._bound(of)):
            return
        orders = dict[str, Schedule]()
        if of.ranks > 1:
            orders = dict(self.space.named(of.ranks, of.microbatches, of.chunks))
        cuts = self.cuts(of.ranks * of.chunks, of.chunks)
        if (of.ranks > 1 and not orders) or len(cuts) <= of.ranks * of.chunks:
            return
        self.tried += 1
        placed = {name: (s.placement, in_flight(s)) for name, s in orders.items()}
        placed = placed or {"": ((0,), [[(1,)]])}

        def splits(costs: UnitCosts) -> dict[str, StageSplit]:
            segments = Segments.of(costs, cuts)
            return {name: split(segments, *on, self.limit) for name, on in placed.items()}

        def need(costs: UnitCosts) -> float:
            return min(s.need for s in splits(costs).values())

        costs = costs_in_memory(
            lambda memory: self.costs(of.mesh, of.microbatches, memory), need, self.limit
        )
        found = list[tuple[float, Candidate, StepEstimate]]()
        for name, each in splits(costs).items():
            self.fewest = min(self.fewest, each.need)
            if each.cuts is None:
                continue
            at = tuple(cuts[i] for i in each.cuts)
            seconds = step_seconds(costs, of.mesh, at, orders.get(name), of.microbatches)
            candidate = of._replace(schedule=name)
            found.append((seconds, candidate, StepEstimate(seconds, each.need, at)))
        for seconds, candidate, estimate in sorted(found):
            if self.measure is None:
                self._offer(candidate, estimate, StepMeasure(seconds, estimate.bytes))
            elif self._is_open(seconds * (1 - MARGIN)):
                try:
                    measured = self.measure(candidate, estimate.cuts)
                except Failure as e:
                    self.errors.append(e)
                    continue
                self._offer(candidate, estimate, measured)

    def _offer(self, candidate: Candidate, estimate: StepEstimate, measured: StepMeasure) -> None:
        """Keep a candidate if it is the best so far."""
        self.fewest = min(self.fewest, measured.bytes)
        before = inf if self.best is None else self.best.measured.seconds
        if measured.bytes <= self.limit and measured.seconds < before * IMPROVEMENT:
            self.best = FoundStages(candidate, estimate, measured)
            self.report(f"{candidate}: {measured.seconds:.6g} s")


def halves(mesh: Mesh) -> Iterator[Mesh]:
    """Yield the meshes with half of the devices along an axis."""
    cluster = mesh.cluster and mesh.cluster.part(mesh.size // 2) if mesh.size > 1 else None
    for i, (name, size) in enumerate(mesh.axes):
        if size % 2 == 0:
            axes = (*mesh.axes[:i], (name, size // 2), *mesh.axes[i + 1 :])
            yield replace(mesh, axes=axes, cluster=cluster)


def step_bound(costs: UnitCosts, fewest: int, microbatches: int, ranks: int, chunks: int) -> float:
    """Return a bound of the seconds of a step, by the costs of one with the fewest microbatches."""
    loop, once = fewest * sum(costs.seconds), sum(costs.once)
    bound = (loop + once) / ranks
    if ranks > 1 and chunks == 1 and loop:
        bound = max(bound, waiting_bound(loop, fewest * sum(costs.forward), microbatches, ranks))
    return bound * (1 - costs.slack)


def waiting_bound(loop: float, forward: float, microbatches: int, ranks: int) -> float:
    """Return a bound of the seconds of a loop with one stage on each rank, for any split of its
    ops, of which the forward part has the same share everywhere.

    Rank r waits for the forward part of the stages before, h_r, and then works: T >= h_r + m w_r.
    The split for which all of these are equal has the least T. With f = forward / loop it has
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

    def of_stages(each: Sequence[float]) -> tuple[float, ...]:
        total = [0.0, *accumulate(each)]
        return tuple(total[b] - total[a] for a, b in pairwise(cuts))

    if schedule is None:
        return microbatches * sum(costs.seconds) + sum(costs.once)
    seconds, forward, weight = map(of_stages, (costs.seconds, costs.forward, costs.weight))
    both = zip(seconds, forward, weight, strict=True)
    outermost = mesh.cluster_or_default.levels[-1]
    moved = tuple(outermost.latency + costs.crossing[i] / outermost.bandwidth for i in cuts[1:-1])
    timeline = simulate(schedule, PipelineCosts(
        forward, tuple(max(0.0, s - f - w) for s, f, w in both), weight, moved,
        (0.0,) * len(seconds),
    ))  # fmt: skip
    once = of_stages(costs.once)
    return max(
        runs[-1].end + sum(once[s] for s, r in enumerate(schedule.placement) if r == rank)
        for rank, runs in enumerate(timeline.ranks)
    )
