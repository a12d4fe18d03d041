"""Redistributions: the collectives and slices of minimum estimated time between two layouts.

    layouts                     [..., x] splits a dimension over the axes x; P(a) is partial over a
    moves, single steps (moves.py)
      1. [..., x, a] -> [..., x]                 all_gather
      2. [..., x] -> [..., x, a]                 all_slice, local
      3. [x, a; y] -> [x; y, a]                  all_to_all
      4. [..., x] P(a) -> [..., x]               all_reduce
      5. [..., x] P(a) -> [..., x, a]            reduce_scatter
      6. [..., x] -> [..., x] P(a)               replicated_to_partial, local
      7. [..., x, a] -> [..., x] P(a)            sharded_to_partial, local
      8. [..., x] -> [..., y]                    exchange: each device fetches what it lacks
    price                       the seconds of a move in its fastest form, with packing (steps.py)
    search                      a plan is a shortest path: layouts are nodes, moves are edges
      table                     routes.py: even layouts over a mesh's axes, all layouts of few axes
      candidates                plan_candidates.py: moves 1 to 7 in a fixed order, or one exchange
      A*                        planner.py, with the lower bound of bound.py

Devices communicate from their own memory. If a layout is `on host`, a copy precedes the first
collective of the plan, or follows the last one, at the step with the smallest shard.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from shardir.algebra.bound import bound
from shardir.algebra.cluster import BYTES, Cluster
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.garbage import no_gc
from shardir.algebra.layout import MOST_ELEMENTS, Layout, Shape, is_countable
from shardir.algebra.mesh import Mesh
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.plan_candidates import FixedOrder, known_path
from shardir.algebra.planner import Search
from shardir.algebra.steps import (
    elements,
    step_memory,
    step_received,
    steps_seconds,
)
from shardir.algebra.transitions import check_reachable
from shardir.diagnostics import ShardirError, coded


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
        return (
            _received_elements(self.shape, self.mesh, self.source, self.steps)[0]
            * BYTES[self.dtype]
        )

    @property
    def bound_bytes(self) -> int:
        """A lower bound of `received_bytes` of any plan."""
        return bound(self.mesh, self.shape, self.source, self.target) * BYTES[self.dtype]

    @property
    def peak_bytes(self) -> int:
        """The maximum over the steps of operand, result and buffers on one device."""
        return _peak_elements(self.shape, self.mesh, self.source, self.steps) * BYTES[self.dtype]

    @property
    def seconds(self) -> float:
        """The estimated seconds of all steps on the mesh's cluster."""
        return steps_seconds(self.mesh, self.shape, self.source, self.steps, BYTES[self.dtype])

    def __str__(self) -> str:
        lines = [f"[{self.source}] -> [{self.target}]"]
        lines += [f"  {s}" for s in self.steps] or ["  nothing"]
        lines.append(
            f"  receives {self.received_bytes} B (at least {self.bound_bytes} B), "
            f"peak {self.peak_bytes} B, {self.seconds:.3g} s"
        )
        return "\n".join(lines)


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
        dtype: the element type, as in the IR: f32.
        cluster: devices and links, by default the mesh's own.
        memory: the maximum bytes of a device.

    Raises:
        ShardirError: a layout or the cluster does not fit the mesh or the shape (the message has
            the code of the invariant), the element type is unknown, or no plan is within `memory`.
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
    if not is_countable(shape):
        raise ShardirError(
            f"expected a shape of at most {MOST_ELEMENTS}, got {shape}; make a dimension smaller"
        )
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
    """Return the steps from `source` to `target`, in normal form, for a tensor of global `shape`.

    Raises:
        ShardirError: no plan is within `memory`.
    """
    source, target = source.simplified(mesh), target.simplified(mesh)
    if source.host or target.host:
        steps = plan(shape, mesh, source.on_device, target.on_device, itemsize, memory)
        return _with_copies(shape, mesh, source, target, steps)
    if memory is None and (known := known_plan(shape, mesh, source, target, itemsize)) is not None:
        return known
    with no_gc():
        problem = RedistributionProblem.of(mesh, shape, source, target)
        return _merge_slices(mesh, _search(problem, itemsize, memory))


@lru_cache(maxsize=65536)
def known_plan(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, itemsize: int
) -> tuple[CollectiveStep, ...] | None:
    """Return the plan between two normal forms that is a path of a table; None if no table has
    it."""
    path = known_path(shape, mesh, source, target, itemsize)
    return None if path is None else _merge_slices(mesh, tuple(path))


def _search(
    problem: RedistributionProblem, itemsize: int, memory: int | None
) -> tuple[CollectiveStep, ...]:
    """Return the fastest plan of a search.

    Raises:
        ShardirError: no plan is within the memory.
    """
    search = Search(problem, itemsize, memory)
    steps = search.run()
    if steps is None:
        needed = search.refused
        while (smaller := Search(problem, itemsize, needed)).run() is None:
            needed = smaller.refused
        raise ShardirError(
            f"expected a plan from [{problem.source}] to [{problem.target}] within {memory} B on a "
            f"device, got one of {needed} B at the minimum; use as many"
        )
    return steps


def _with_copies(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, steps: tuple[CollectiveStep, ...]
) -> tuple[CollectiveStep, ...]:
    """Return the steps of a plan in device memory, with the host copies that its ends need.

    A copy stands where the shard is smallest; among equal shards a copy from the host first, a copy
    to the host last.
    """
    moving = [i for i, step in enumerate(steps) if step.communicates(mesh)]
    if source.host and target.host and not moving:
        return tuple(replace(s, layout=s.layout.on_host) for s in steps)
    layouts = [source.on_device, *(s.layout for s in steps)]
    sizes = [elements(mesh, shape, layout) for layout in layouts]
    first, last = (moving[0], moving[-1] + 1) if moving else (len(steps), 0)
    up = min(range(first + 1), key=sizes.__getitem__) if source.host else -1
    down = min(range(len(steps), last - 1, -1), key=sizes.__getitem__) if target.host else -1
    copied: list[CollectiveStep] = []
    on_host = source.host
    for i, layout in enumerate(layouts):
        if i:
            step = steps[i - 1]
            copied.append(replace(step, layout=layout.on_host) if on_host else step)
        if i in (up, down):
            on_host = not on_host
            copied.append(CollectiveStep("copy", (), layout.on_host if on_host else layout))
    return tuple(copied)


def _merge_slices(mesh: Mesh, steps: tuple[CollectiveStep, ...]) -> tuple[CollectiveStep, ...]:
    """Return the steps in normal form, with consecutive slices of one dimension merged."""
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


def received(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> tuple[int, int]:
    """Return the elements that one device receives by the plan, and the number of collectives."""
    return _received_elements(shape, mesh, source, plan(shape, mesh, source, target))


@lru_cache(maxsize=65536)
def estimated_seconds(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, itemsize: int
) -> float:
    """Return the estimated seconds of the planned redistribution."""
    steps = plan(shape, mesh, source, target, itemsize)
    return steps_seconds(mesh, shape, source, steps, itemsize)


def named_collectives(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout
) -> list[CollectiveStep]:
    """Return the plan of named collectives in their fixed order."""
    return FixedOrder(RedistributionProblem.of(mesh, shape, source, target)).run()


def _received_elements(
    shape: Shape, mesh: Mesh, source: Layout, steps: tuple[CollectiveStep, ...]
) -> tuple[int, int]:
    """Return the elements that one device receives, and the number of collectives."""
    total, layout = 0, source
    for step in steps:
        total += step_received(mesh, shape, layout, step)
        layout = step.layout
    return total, sum(s.communicates(mesh) for s in steps)


def _peak_elements(
    shape: Shape, mesh: Mesh, source: Layout, steps: tuple[CollectiveStep, ...]
) -> int:
    """Return the maximum over the steps of the elements that live on one device."""
    layout, retained = source, elements(mesh, shape, source)
    maximum = retained
    for step in steps:
        peak, retained = step_memory(mesh, shape, layout, step, retained)
        maximum, layout = max(maximum, peak), step.layout
    return maximum
