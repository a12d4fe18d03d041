"""From one layout to another: the collectives and slices that lead there in the least time.

Layouts are the places, moves the ways between them, and the seconds that a move takes on the
mesh's links their lengths: a plan is a shortest path. It is looked for (A*) only where the best of
a few known plans takes longer than what no plan can do without. These are the named collectives in
a fixed order, and one exchange in which each device fetches exactly what it lacks, before it
perhaps the reduction of contributions; so no layout is out of reach. Where links differ, the best
plan of whole axes (routes.py) is known too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import prod

from shardir.algebra.bound import MAX_COUNTED_DEVICES, bound, latency_bound, seconds_bound
from shardir.algebra.cluster import BYTES, Cluster
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh, sizes_of
from shardir.algebra.moves import Recipe, RedistributionProblem
from shardir.algebra.routes import routes
from shardir.algebra.steps import (
    elements,
    step_form,
    step_memory,
    step_received,
    step_seconds,
)
from shardir.algebra.transitions import check_reachable
from shardir.diagnostics import ShardirError, coded

MAX_EXPANDED = 400
"""How many layouts a search goes on from at most, and on many devices a tenth of them: then the
best plan so far serves."""

IMPROVEMENT = 1 - 1e-9
"""What takes less time: not what rounding makes of the same."""


@dataclass(frozen=True)
class Redistribution:
    """A planned redistribution of a tensor of global `shape`, and what it costs."""

    shape: Shape
    dtype: str
    mesh: Mesh
    source: Layout
    target: Layout
    steps: tuple[CollectiveStep, ...]

    @property
    def received_bytes(self) -> int:
        """What the device that receives most receives, step by step."""
        return _received(self.shape, self.mesh, self.source, self.steps)[0] * BYTES[self.dtype]

    @property
    def bound_bytes(self) -> int:
        """What a device must receive in any plan."""
        return bound(self.mesh, self.shape, self.source, self.target) * BYTES[self.dtype]

    @property
    def peak_bytes(self) -> int:
        """The most that lives on one device at once: a step's operand, its result, its buffers."""
        return _peak(self.shape, self.mesh, self.source, self.steps) * BYTES[self.dtype]

    @property
    def seconds(self) -> float:
        """The time of all steps on the mesh's cluster."""
        return sum(_seconds(self.shape, self.mesh, self.source, self.steps, BYTES[self.dtype]))

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
    """Plans one redistribution.

    Args:
        shape: of the whole tensor.
        dtype: of an element, as types spell it: f32.
        cluster: the devices and links of the mesh, if not those that it has itself.
        memory: the bytes that may live on a device at once.

    Raises:
        ShardirError: a layout or the cluster does not fit the mesh or the shape (it names the
            invariant), there is no such element type, or no plan needs as little memory.
    """
    if dtype not in BYTES:
        raise ShardirError(f"no element type {dtype}; there are {', '.join(BYTES)}")
    if cluster is not None:
        if not isinstance(cluster, Cluster):
            raise ShardirError(
                "the cluster is a Cluster, such as shardir.cost.clusters.load gives, "
                f"not {cluster!r}"
            )
        mesh = replace(mesh, cluster=cluster)
    mesh.check_cluster()
    for layout in (source, target):
        if layout.mesh != mesh.name:
            found = f"expected a layout of mesh @{mesh.name}, got [{layout}]"
            raise ShardirError(coded("R3", found))
        layout.check(mesh, shape)
    check_reachable(source, target)
    source, target = source.simplified(mesh), target.simplified(mesh)
    steps = plan(shape, mesh, source, target, BYTES[dtype], memory)
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
    """The steps from `source` to `target` for a tensor of global `shape`.

    Raises:
        ShardirError: no plan keeps to `memory`.
    """
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
            f"no plan from [{source}] to [{target}] keeps to {memory} B on a device; "
            f"the least that one needs is {needed} B"
        )
    return _joined(mesh, found)


def _path(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, itemsize: int
) -> list[CollectiveStep] | None:
    """The shortest path over layouts of whole axes, if both ends are such and even."""
    if any(map(sizes_of, (*source.dims, *target.dims))):
        return None  # only an exchange takes a value whose sizes are spelled out
    source, target = source.simplified(mesh), target.simplified(mesh)
    reduction = source.reduction if source.partial else target.reduction
    known = routes(mesh, len(shape), reduction)
    return known.steps(shape, itemsize, source, target) if known else None


def _joined(mesh: Mesh, steps: tuple[CollectiveStep, ...]) -> tuple[CollectiveStep, ...]:
    """The steps in normal form, where slices of a dimension that follow each other are one."""
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


Entry = tuple[float, int, int, float, Layout, int, tuple[CollectiveStep, ...]]
"""(least time of a plan this way, steps, serial number, time so far, where, what is kept alive,
the steps)"""


class Search:
    """The quickest plan for a problem whose steps all keep to `memory`; `refused` is the least that
    one which does not needs."""

    def __init__(self, problem: RedistributionProblem, itemsize: int, memory: int | None):
        self.problem, self.itemsize, self.memory = problem, itemsize, memory
        self.refused = -1
        self.best: tuple[float, tuple[CollectiveStep, ...]] | None = None

    def run(self) -> tuple[CollectiveStep, ...] | None:
        p = self.problem
        for steps in _candidates(p, self.itemsize):
            self.offer(steps)
        least = seconds_bound(p.mesh, p.shape, p.source, p.target, self.itemsize)
        if self.best is None or least < self.best[0] * IMPROVEMENT:
            self.look()
        return None if self.best is None else self.best[1]

    def offer(self, steps: list[CollectiveStep]) -> None:
        layout, held, seconds = self.problem.source, self.held(), 0.0
        for step in steps:
            found = self.after(layout, step, held)
            if found is None:
                return
            seconds, held, layout = seconds + found[0], found[1], step.layout
        if self.best is None or seconds < self.best[0] * IMPROVEMENT:
            self.best = seconds, tuple(steps)

    def held(self) -> int:
        p = self.problem
        return 0 if self.memory is None else elements(p.mesh, p.shape, p.source)

    def after(self, layout: Layout, step: CollectiveStep, held: int) -> tuple[float, int] | None:
        """The time of a step, and what its result keeps alive; None where it needs too much."""
        p = self.problem
        if self.memory is not None:
            peak, held = step_memory(p.mesh, p.shape, layout, step, held)
            if (needed := peak * self.itemsize) > self.memory:
                self.refused = needed if self.refused < 0 else min(needed, self.refused)
                return None
        return step_seconds(p.mesh, p.shape, layout, step, self.itemsize), held

    def look(self) -> None:
        """A* from the source, as far as a plan can still be quicker than the best."""
        p, serial = self.problem, count()
        seen = {(p.source, self.held()): 0.0}
        bounds: dict[Layout, float] = {}
        todo: list[Entry] = [(0.0, 0, next(serial), 0.0, p.source, self.held(), ())]
        for _ in range(MAX_EXPANDED if p.mesh.size <= MAX_COUNTED_DEVICES else MAX_EXPANDED // 10):
            if not todo:
                return
            least, n, _, so_far, layout, held, steps = heappop(todo)
            if self.best is not None and least >= self.best[0] * IMPROVEMENT:
                return
            if layout == p.target:
                self.best = so_far, steps
                return
            if so_far > seen[layout, held]:
                continue
            best = float("inf") if self.best is None else self.best[0] * IMPROVEMENT
            for step in p.moves(layout):
                started = so_far + self.latency(step)
                if started >= best - latency_bound(p.mesh, step.layout, p.target):
                    continue
                rest = bounds.get(step.layout)
                if rest is None:
                    rest = bounds[step.layout] = seconds_bound(
                        p.mesh, p.shape, step.layout, p.target, self.itemsize
                    )
                limit = best - rest
                if self.memory is None:  # then nothing is held, and no path but the best is of use
                    limit = min(limit, seen.get((step.layout, held), limit))
                if started >= limit:
                    continue
                found = self.after(layout, step, held)
                if found is None:
                    continue
                seconds, key = so_far + found[0], (step.layout, found[1])
                if seconds < limit and seconds < seen.get(key, float("inf")):
                    seen[key] = seconds
                    entry = seconds + rest, n + 1, next(serial), seconds
                    heappush(todo, (*entry, *key, (*steps, step)))

    def latency(self, step: CollectiveStep) -> float:
        mesh = self.problem.mesh
        return step.forms(mesh)[0].latency if step.communicates(mesh) else 0.0


def _candidates(problem: RedistributionProblem, itemsize: int) -> Iterator[list[CollectiveStep]]:
    """Known plans, the preferred one first."""
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
        recipe.contribute()
        yield recipe.steps
    path = _path(p.shape, p.mesh, p.source, p.target, itemsize)
    if path is not None:
        yield path


def received(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> tuple[int, int]:
    """Elements that one device receives, and the number of collectives, by the plan."""
    return _received(shape, mesh, source, plan(shape, mesh, source, target))


def seconds(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, itemsize: int = 4
) -> tuple[float, float]:
    """What the plan takes: for its bytes, and for its collectives."""
    steps = plan(shape, mesh, source, target, itemsize)
    return _seconds(shape, mesh, source, steps, itemsize)


def named_collectives(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout
) -> list[CollectiveStep]:
    """The plan of named collectives alone, in their fixed order."""
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
) -> tuple[float, float]:
    moving = starting = 0.0
    layout = source
    for step in steps:
        if step.communicates(mesh):
            form = step_form(mesh, shape, layout, step, itemsize)
            moving += form.rate * prod(shape) * itemsize
            starting += form.latency
        layout = step.layout
    return moving, starting


def _peak(shape: Shape, mesh: Mesh, source: Layout, steps: tuple[CollectiveStep, ...]) -> int:
    layout, held = source, elements(mesh, shape, source)
    most = held
    for step in steps:
        peak, held = step_memory(mesh, shape, layout, step, held)
        most, layout = max(most, peak), step.layout
    return most
