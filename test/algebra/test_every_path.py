"""Plans against the shortest paths over all layouts, also of those that a plan is not searched
among."""

from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from support.algebra.single_moves import single_moves
from support.extent import extent, sampled

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.redistribution import plan_redistribution
from shardir.algebra.routes import Routes, routes
from shardir.algebra.steps import step_seconds
from shardir.cost.clusters import load

Paths = tuple[list[Layout], np.ndarray[Any, np.dtype[np.float64]]]


def nodes_of(inner: int, outer: int, latency: float) -> Cluster:
    """Links within a node ten times as fast as those between nodes."""
    levels = (Level("node", inner, 2e10, latency), Level("pod", outer, 2e9, 3 * latency))
    return Cluster(levels if outer > 1 else levels[:1])


def shortest_paths(mesh: Mesh, shape: Shape, cuts: list[tuple[Axis, ...]]) -> Paths:
    """The layouts over the sub-axes of each cut, and the times of the shortest paths over all
    of them: of the moves of each table, and of exchanges between any two."""
    found: dict[Layout, int] = {}
    steps: list[tuple[Layout, CollectiveStep]] = []
    for axes in cuts:
        table = Routes(mesh, len(shape), "sum", axes)
        for layout in table.layouts:
            found.setdefault(layout.simplified(mesh), len(found))
        steps += [
            (table.layouts[i], step)
            for (i, _), step in single_moves(table).items() if step.kind != "exchange"
        ]  # fmt: skip
    for before in found:
        for after in found:
            axes = exchange_axes(before, after)
            if axes and before.partial == after.partial:
                steps.append((before, CollectiveStep("exchange", axes, after)))
    seconds = np.full((len(found), len(found)), np.inf)
    np.fill_diagonal(seconds, 0.0)
    for before, step in steps:
        before, after = before.simplified(mesh), step.layout.simplified(mesh)
        if step.kind == "exchange" or nest(mesh, shape, before, after):
            ends = found[before], found[after]
            step = CollectiveStep(step.kind, mesh.simplify(step.axes), after, step.dim, step.concat)
            seconds[ends] = min(seconds[ends], step_seconds(mesh, shape, before, step, 4))
    for k in range(len(found)):
        seconds = np.minimum(seconds, np.add.outer(seconds[:, k], seconds[k]))
    return list(found), seconds


def nest(mesh: Mesh, shape: Shape, before: Layout, after: Layout) -> bool:
    """Whether shards of each dimension are parts of those of the other layout: both are even, or
    one is the dimension."""

    def even(n: int, axes: Axes) -> bool:
        return n % mesh.extent(axes) == 0

    ends = zip(shape, before.dims, after.dims, strict=True)
    return all(x == y or not x or not y or (even(n, x) and even(n, y)) for n, x, y in ends)


TWO_BY_TWO = [(Axis("a", 1, 2), Axis("a", 2, 2))]
CROSSING = [(Axis("a", 1, 2), Axis("a", 2, 3)), (Axis("a", 1, 3), Axis("a", 3, 2))]
CASES = [
    *((CROSSING, nodes_of(n, 6 // n, latency), rows)
      for n, latency in ((2, 0.0), (2, 1e-5), (3, 1e-6), (6, 1e-6)) for rows in (6, 6144)),
    *((TWO_BY_TWO, nodes_of(2, 2, 1e-7), rows) for rows in (10, 5000)),
]  # fmt: skip


@pytest.mark.parametrize(("cuts", "cluster", "rows"), sampled(CASES, 2))
def test_no_path_over_any_layouts_is_faster(
    cuts: list[tuple[Axis, ...]], cluster: Cluster, rows: int
) -> None:
    """The sub-axes of source, target and levels cross, or shards are uneven. Between layouts of a
    table of routes that has no others a plan is the shortest path over these alone."""
    mesh = Mesh("m", (("a", cluster.units[-1]),), cluster)
    shape = (6 * rows, 6) if cuts is CROSSING else (rows, 7, 100)
    layouts, seconds = shortest_paths(mesh, shape, cuts)
    known, random = routes(mesh, len(shape)), Random(f"{cluster} {rows}")
    assert known is not None
    compared = 0
    while compared < extent(12, 200):
        i, j = (random.randrange(len(layouts)) for _ in range(2))
        source, target = layouts[i], layouts[j]
        even = source.even(mesh, shape) and target.even(mesh, shape)
        if not (even and source in known.index and target in known.index):
            plan = plan_redistribution(shape, "f32", mesh, source, target)
            assert plan.seconds <= seconds[i, j] * (1 + 1e-9) + 1e-18, str(plan)
            compared += 1


@pytest.mark.parametrize(
    ("cluster", "sizes", "shape"),
    sampled([
        ("gloo", (3, 4), (100, 5000)), ("gloo", (2, 3, 2), (5000, 5000)), ("gloo", (8,), (7, 8)),
        ("gloo", (2, 2, 2), (7, 7)), ("pod2048", (32,), (5000, 7)), ("pod2048", (8, 4), (96, 9)),
        ("ascend910", (2, 2, 2), (64, 64)), ("gloo", (2, 2), (1024, 1024)),
    ], 2),
    ids=str,
)  # fmt: skip
def test_no_path_over_the_layouts_of_a_table_is_faster(
    cluster: str, sizes: tuple[int, ...], shape: Shape
) -> None:
    """Between all of them, also of uneven shards; each move priced by its record."""
    devices = prod(sizes)
    mesh = Mesh("m", tuple(zip("abc", sizes, strict=False)), load(cluster).part(devices))
    known = routes(mesh, len(shape))
    assert known is not None
    layouts, seconds = shortest_paths(mesh, shape, [known.axes])
    order = [known.index[layout] for layout in layouts]
    paths, _ = known.paths(shape, 4)
    np.testing.assert_allclose(paths[np.ix_(order, order)], seconds, rtol=1e-8)
