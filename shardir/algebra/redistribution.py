"""Redistributions: the collectives and slices of minimum estimated time between two layouts.

A plan is a shortest path: layouts are nodes, moves are edges, and the length of a move is its
estimated time on the mesh's links. Between layouts of full axes that are even the path is known
(routes.py). Otherwise a few candidates are tried: the named collectives in a fixed order, and one
exchange in which each device fetches exactly the elements that it lacks, perhaps after a reduction
of partial values; so every layout can be reached. If the fastest of them is slower than the lower
bound, A* searches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from shardir.algebra.bound import bound, latency_bound, seconds_bound
from shardir.algebra.cluster import BYTES, Cluster
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh, sizes_of
from shardir.algebra.moves import Recipe, RedistributionProblem
from shardir.algebra.routes import routes
from shardir.algebra.steps import (
    elements,
    step_memory,
    step_received,
    step_seconds,
)
from shardir.algebra.transitions import check_reachable
from shardir.diagnostics import ShardirError, coded

MAX_PRICED = 3000
"""The number of steps that A* prices at the maximum. After them it prices as many again for a plan
that takes at most twice the minimum time: it counts the bound of what is left twice."""


@dataclass(frozen=True)
class Redistribution:
    """A planned redistribution of a tensor of global `shape`."""

    shape: Shape
    dtype: str
    mesh: Mesh
    source: Layout
    target: Layout
    steps: tuple[CollectiveStep, ...]

    @property
    def received_bytes(self) -> int:
        """The sum over the steps of the bytes received by the device that receives most."""
        return _received(self.shape, self.mesh, self.source, self.steps)[0] * BYTES[self.dtype]

    @property
    def bound_bytes(self) -> int:
        """The bytes that a device must receive in any plan."""
        return bound(self.mesh, self.shape, self.source, self.target) * BYTES[self.dtype]

    @property
    def peak_bytes(self) -> int:
        """The maximum over the steps of operand, result and buffers on one device."""
        return _peak(self.shape, self.mesh, self.source, self.steps) * BYTES[self.dtype]

    @property
    def seconds(self) -> float:
        """The estimated time of all steps on the mesh's cluster."""
        return _seconds(self.shape, self.mesh, self.source, self.steps, BYTES[self.dtype])

    def __str__(self) -> str:
        lines = [f"[{self.source}] -> [{self.target}]"]
        lines += [f"  {s}" for s in self.steps] or ["  nothing"]
        return "\n".join(
            [
                *lines,
                f"  receives {self.received_bytes} B (at least {self.bound_bytes} B), "
                f"peak {self.peak_bytes} B, {self.seconds:.3g} s",
            ]
        )


def plan_redistribution(
    shape: Shape,
    dtype: str,
    mesh: Mesh,
    source: Layout,
    target: Layout,
    cluster: Cluster | None = None,
    memory: int | None = None,
) -> Redistribution:
    """Plan one redistribution.

    Args:
        shape: the global shape.
        dtype: of an element, as types spell it: f32.
        cluster: the devices and links, if not those of the mesh.
        memory: the maximum number of bytes of a device.

    Raises:
        ShardirError: a layout or the cluster does not fit the mesh or the shape (the message has
            the code of the invariant), there is no such element type, or no plan is within
            `memory`.
    """
    if not isinstance(mesh, Mesh):
        raise ShardirError(f"expected a Mesh, got {mesh!r}; use shardir.algebra.mesh.Mesh")
    if dtype not in BYTES:
        raise ShardirError(f"expected an element type, got {dtype}; use {', '.join(BYTES)}")
    if cluster is not None:
        if not isinstance(cluster, Cluster):
            raise ShardirError(
                f"expected a Cluster, got {cluster!r}; use shardir.cost.clusters.load"
            )
        mesh = replace(mesh, cluster=cluster)
    mesh.check_cluster()
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ShardirError(f"expected a shape of integers of 0 or more, got {shape}")
    shape = tuple(shape)
    for layout in (source, target):
        if not isinstance(layout, Layout):
            raise ShardirError(
                f"expected a Layout, got {layout!r}; use shardir.algebra.notation.parse_layout"
            )
        if layout.mesh != mesh.name:
            found = f"expected a layout of mesh @{mesh.name}, got [{layout}]"
            raise ShardirError(coded("R3", found))
        layout.check(mesh, shape)
    check_reachable(source, target)
    steps = plan(shape, mesh, source, target, BYTES[dtype], memory)
    source, target = source.simplified(mesh), target.simplified(mesh)
    return Redistribution(shape, dtype, mesh, source, target, steps)


@lru_cache(maxsize=65536)
def plan(
    shape: Shape,
    mesh: Mesh,
    source: Layout,
    target: Layout,
    itemsize: int = 4,
    memory: int | None = None,
) -> tuple[CollectiveStep, ...]:
    """Return the steps from `source` to `target` for a tensor of global `shape`, between their
    normal forms.

    Raises:
        ShardirError: no plan is within `memory`.
    """
    source, target = source.simplified(mesh), target.simplified(mesh)
    if memory is None and (path := _path(shape, mesh, source, target, itemsize)) is not None:
        return _joined(mesh, tuple(path))
    problem = RedistributionProblem.of(mesh, shape, source, target)
    search = Search(problem, itemsize, memory)
    found = search.run()
    if found is None:
        needed = search.refused
        while (smaller := Search(problem, itemsize, needed)).run() is None:
            needed = smaller.refused
        raise ShardirError(
            f"expected a plan from [{source}] to [{target}] within {memory} B on a device, got "
            f"one of {needed} B at the minimum; use as many"
        )
    return _joined(mesh, found)


def _path(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, itemsize: int
) -> list[CollectiveStep] | None:
    """Return the shortest path over layouts of full axes; None unless both are such, and even."""
    if any(map(sizes_of, (*source.dims, *target.dims))):
        return None  # only an exchange has an operand with explicit sizes
    reduction = source.reduction if source.partial else target.reduction
    known = routes(mesh, len(shape), reduction)
    return known.steps(shape, itemsize, source, target) if known else None


def _joined(mesh: Mesh, steps: tuple[CollectiveStep, ...]) -> tuple[CollectiveStep, ...]:
    """Return the steps in normal form, consecutive slices of one dimension as one."""
    out: list[CollectiveStep] = []
    for s in steps:
        before = out[-1] if out else None
        local = s.kind == "replicated_to_partial" or (
            s.kind == "all_slice" and before and before.dim == s.dim
        )
        if before is not None and before.kind == s.kind and local:
            s = replace(s, axes=before.axes + s.axes)
            out.pop()
        out.append(replace(s, axes=mesh.simplify(s.axes), layout=s.layout.simplified(mesh)))
    return tuple(out)


class QueueEntry(NamedTuple):
    """A path that may lead to the fastest plan: the first to be followed is the smallest."""

    first: float
    """A lower bound of the time of a plan by this path; after MAX_PRICED steps with the bound of
    what is left twice."""
    length: int
    serial: int
    seconds: float
    """The time of the steps."""
    layout: Layout
    """The layout after them, and the elements that the value retains there."""
    retained: int
    steps: tuple[CollectiveStep, ...]
    following: CollectiveStep | None = None
    """One step more, which is not priced yet."""

    @property
    def ahead(self) -> Layout:
        """The layout after the last step."""
        return self.following.layout if self.following else self.layout


class Search:
    """The search for the fastest plan whose steps are all within `memory`; `refused` is the
    minimum memory of those that are not."""

    def __init__(self, problem: RedistributionProblem, itemsize: int, memory: int | None):
        self.problem, self.itemsize, self.memory = problem, itemsize, memory
        self.refused = -1
        self.best: tuple[float, tuple[CollectiveStep, ...]] | None = None
        self.bounds: dict[Layout, float] = {}

    def run(self) -> tuple[CollectiveStep, ...] | None:
        p = self.problem
        for steps in _candidates(p, self.itemsize):
            self.offer(steps)
        minimum = seconds_bound(p.mesh, p.shape, p.source, p.target, self.itemsize)
        if self.best is None or minimum < self.best[0] * IMPROVEMENT:
            self.expand()
        return None if self.best is None else self.best[1]

    def offer(self, steps: list[CollectiveStep]) -> None:
        """Take a plan if it is within the memory and faster than the best."""
        layout, retained, seconds = self.problem.source, self.retained(), 0.0
        for step in steps:
            found = self.after(layout, step, retained)
            if found is None:
                return
            seconds, retained, layout = seconds + found[0], found[1], step.layout
        if self.best is None or seconds < self.best[0] * IMPROVEMENT:
            self.best = seconds, tuple(steps)

    def retained(self) -> int:
        """Return the elements that the source retains."""
        p = self.problem
        return 0 if self.memory is None else elements(p.mesh, p.shape, p.source)

    def after(
        self, layout: Layout, step: CollectiveStep, retained: int
    ) -> tuple[float, int] | None:
        """Return the time of a step, and the elements that its result retains; None where it needs
        more than the memory."""
        p = self.problem
        if self.memory is not None:
            peak, retained = step_memory(p.mesh, p.shape, layout, step, retained)
            if (needed := peak * self.itemsize) > self.memory:
                self.refused = needed if self.refused < 0 else min(needed, self.refused)
                return None
        return step_seconds(p.mesh, p.shape, layout, step, self.itemsize), retained

    def expand(self) -> None:
        """Search by A* from the source, as long as a plan can be faster than the best. A step is
        priced when its bound is the lowest: most steps never are."""
        p, serial, weight, priced = self.problem, count(), 0, 0
        target, start = p.spelled(p.target), (p.spelled(p.source), self.retained())
        seen = {start: 0.0}
        todo = [QueueEntry(0.0, 0, next(serial), 0.0, *start, ())]
        while todo and priced < (weight + 1) * MAX_PRICED:
            first, n, _, so_far, layout, retained, steps, following = heappop(todo)
            best = float("inf") if self.best is None else self.best[0] * IMPROVEMENT
            if not weight and first >= best:
                return
            if so_far > seen[layout, retained]:
                continue
            if following is not None:
                priced += 1
                if (found := self.after(layout, following, retained)) is not None:
                    seconds, key = so_far + found[0], (following.layout, found[1])
                    rest = self.bound(following.layout)
                    if seconds < min(best - rest, seen.get(key, best)):
                        seen[key] = seconds
                        order = seconds + (weight + 1) * rest, n, next(serial)
                        heappush(todo, QueueEntry(*order, seconds, *key, (*steps, following)))
            elif layout == target:
                self.best = so_far, steps
                return
            else:
                for step, rest in self.following(layout, so_far, best):
                    limit, seconds = best - rest, so_far + self.latency(step)
                    if self.memory is None:  # nothing is retained, so only the fastest path counts
                        limit = min(limit, seen.get((step.layout, retained), limit))
                    if seconds < limit:
                        order = seconds + (weight + 1) * rest, n + 1, next(serial)
                        heappush(todo, QueueEntry(*order, so_far, layout, retained, steps, step))
            if not weight and priced == MAX_PRICED:
                weight = 1
                todo = [e._replace(first=e.first + self.bound(e.ahead)) for e in todo]
                heapify(todo)

    def following(
        self, layout: Layout, so_far: float, best: float
    ) -> Iterator[tuple[CollectiveStep, float]]:
        """Yield the moves by which a plan may be faster than `best`, each with the lower bound of
        the time after it."""
        p = self.problem
        for move in p.moves(layout):
            step = replace(move, layout=p.spelled(move.layout)) if p.crosses else move
            if so_far + self.latency(step) < best - latency_bound(p.mesh, step.layout, p.target):
                yield step, self.bound(step.layout)

    def bound(self, layout: Layout) -> float:
        """Return a lower bound of the time from a layout to the target."""
        p = self.problem
        if (found := self.bounds.get(layout)) is None:
            found = seconds_bound(p.mesh, p.shape, layout, p.target, self.itemsize)
            self.bounds[layout] = found
        return found

    def latency(self, step: CollectiveStep) -> float:
        mesh = self.problem.mesh
        return step.forms(mesh)[0].latency if step.communicates(mesh) else 0.0


def _candidates(problem: RedistributionProblem, itemsize: int) -> Iterator[list[CollectiveStep]]:
    """Yield plans that need no search, the preferred one first."""
    p = problem
    near = problem.near
    if near.target == problem.target:
        yield Recipe(problem).run()
    reductions = [Recipe.reduced]
    if near.left(near.source):
        reductions.append(Recipe.reduce)
    for reduce in reductions:
        recipe = Recipe(near)
        reduce(recipe)
        recipe.exchange(problem.target)
        recipe.make_partial()
        yield recipe.steps
    path = _path(p.shape, p.mesh, p.source, p.target, itemsize)
    if path is not None:
        yield path


def received(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> tuple[int, int]:
    """Return the elements that one device receives by the plan, and the number of collectives."""
    return _received(shape, mesh, source, plan(shape, mesh, source, target))


@lru_cache(maxsize=65536)
def estimated_seconds(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, itemsize: int
) -> float:
    """Return the estimated time of the planned redistribution."""
    steps = plan(shape, mesh, source, target, itemsize)
    return _seconds(shape, mesh, source, steps, itemsize)


def named_collectives(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout
) -> list[CollectiveStep]:
    """Return the plan of named collectives alone, in their fixed order."""
    return Recipe(RedistributionProblem.of(mesh, shape, source, target)).run()


def _received(
    shape: Shape, mesh: Mesh, source: Layout, steps: tuple[CollectiveStep, ...]
) -> tuple[int, int]:
    total, layout = 0, source
    for step in steps:
        total += step_received(mesh, shape, layout, step)
        layout = step.layout
    return total, sum(s.communicates(mesh) for s in steps)


def _seconds(
    shape: Shape, mesh: Mesh, source: Layout, steps: tuple[CollectiveStep, ...], itemsize: int
) -> float:
    total, layout = 0.0, source
    for step in steps:
        total += step_seconds(mesh, shape, layout, step, itemsize)
        layout = step.layout
    return total


def _peak(shape: Shape, mesh: Mesh, source: Layout, steps: tuple[CollectiveStep, ...]) -> int:
    layout, retained = source, elements(mesh, shape, source)
    maximum = retained
    for step in steps:
        peak, retained = step_memory(mesh, shape, layout, step, retained)
        maximum, layout = max(maximum, peak), step.layout
    return maximum
