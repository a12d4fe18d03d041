"""Random layouts, one after the other, between which a tensor is redistributed; random clusters."""

from collections.abc import Iterator
from random import Random

from hypothesis import strategies as st

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.steps import step_seconds
from shardir.tools import bench
from support.strategies import with_sizes

laws = bench.load("laws")

MESHES = [
    Mesh("m", axes)
    for axes in (
        (("a", 2), ("b", 2)), (("a", 2), ("b", 3)), (("d", 6),), (("d", 8),), (("a", 4), ("b", 6)),
        (("a", 2), ("b", 2), ("c", 2)), (("a", 3), ("b", 2), ("c", 4)),
    )
]  # fmt: skip


def two_levels(inner: int, outer: int, latency: float = 1e-6) -> Cluster:
    """Links within a node ten times as fast as those between nodes."""
    node = Level("node", inner, 1e8, latency)
    return Cluster((node, Level("pod", outer, 1e7, 3 * latency)))


LEVELLED = [
    Mesh("m", (("a", 2), ("b", 2)), two_levels(2, 2)),
    Mesh("m", (("a", 2), ("b", 2), ("c", 2)), two_levels(4, 2)),
    Mesh("m", (("a", 2), ("b", 2), ("c", 2)), two_levels(2, 4, 0.0)),
    Mesh("m", (("d", 8),), two_levels(4, 2)),
    Mesh("m", (("a", 3), ("b", 4)), two_levels(4, 3)),
]
KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "exchange")


def random_cluster(devices: int, random: Random) -> Cluster:
    """One or two levels, the inner links perhaps the slower ones; perhaps no latencies; one kind
    of collectives takes less time than the formulas, the others more."""
    inner = random.choice([n for n in range(1, devices + 1) if devices % n == 0])
    levels = [
        Level(
            name, n, 10 ** random.uniform(8, 11), random.choice([0.0, 10 ** random.uniform(-9, -4)])
        )
        for name, n in (("node", inner), ("pod", devices // inner))
        if n > 1
    ]
    fast = random.choice(KINDS)
    factors = tuple((k, 10 ** random.uniform(*((-1, 0) if k == fast else (0, 1)))) for k in KINDS)
    speed = random.choice([None, 1e10])
    return Cluster(tuple(levels), memory_bandwidth=speed, collectives=factors)


SHAPES = [(5, 7), (8, 8), (12, 1), (1, 3), (2, 3, 4), (24,), (0, 4)]
EVEN_OR_NOT = [(8, 8), (5, 7), (64,), (48,)]


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, rank: int, partial: bool) -> Layout:
    """Any split over some sub-axes of the mesh's axes; perhaps partial over one more."""
    sub_axes: list[Axis] = []
    for name, size in mesh.axes:
        cut = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        parts = [Axis(name, 1, cut), Axis(name, cut, size // cut)]
        sub_axes += [a for a in parts if a.size > 1]
    order = draw(st.permutations(sub_axes))
    retained: tuple[Axis, ...] = ()
    if partial and order and draw(st.booleans()):
        n = draw(st.integers(1, min(2, len(order))))
        retained, order = tuple(order[:n]), order[n:]
    dims: list[tuple[Axis, ...]] = [()] * rank
    for a in order[: draw(st.integers(0, len(order)))]:
        d = draw(st.integers(0, rank - 1))
        dims[d] = (*dims[d], a)
    reduction = draw(st.sampled_from(["sum", "sum", "max", "min", "mean"])) if retained else "sum"
    return Layout(mesh.name, tuple(dims)).with_partial(retained, reduction)


Route = tuple[Mesh, Shape, list[Layout]]
"""The layouts between which a tensor of a shape is redistributed, one after the other."""


@st.composite
def routes_of(draw: st.DrawFn, stops: int, meshes: list[Mesh]) -> Route:
    mesh, shape = draw(st.sampled_from(meshes)), draw(st.sampled_from(SHAPES))
    drawn = [draw(layouts(mesh, len(shape), True)) for _ in range(stops)]
    return mesh, shape, [draw(with_sizes(mesh, shape, layout)) for layout in drawn]


def time_of(mesh: Mesh, shape: Shape, layout: Layout, steps: list[CollectiveStep]) -> float:
    """The planner's own price of some steps."""
    total = 0.0
    for step in steps:
        total += step_seconds(mesh, shape, layout, step, 4)
        layout = step.layout
    return total


def even_problems(
    cluster: str, count: int, extra: int = 0
) -> Iterator[tuple[RedistributionProblem, Random]]:
    """Random redistributions on a ready-made cluster whose mesh divides each dimension without
    `extra` elements, with the source of what else is random about them."""
    for case in range(count):
        random = Random(f"{cluster} {case}")
        mesh, rank = laws.random_mesh(cluster, random), random.choice([1, 2, 3])
        shape = tuple(mesh.size * random.choice([1, 3, 16]) + extra for _ in range(rank))
        ends = (laws.random_layout(mesh, rank, random) for _ in range(2))
        yield RedistributionProblem.of(mesh, shape, *ends), random
