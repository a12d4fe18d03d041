"""Planned redistributions and the bytes of exchanges against brute force."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import prod
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.algebra.random_routes import (
    EVEN_OR_NOT,
    LEVELLED,
    MESHES,
    Route,
    layouts,
    routes_of,
    time_of,
)
from support.extent import extent, sampled

from shardir.algebra.bound import seconds_bound
from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.collectives import CollectiveStep, Transfer
from shardir.algebra.exchange import pieces
from shardir.algebra.forms import copying
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.planner import Search
from shardir.algebra.redistribution import named_collectives, plan_redistribution
from shardir.algebra.routes import Routes, routes
from shardir.algebra.traffic import fetched, sent
from shardir.cost.clusters import load


@settings(max_examples=extent(15, 200), deadline=None, derandomize=True)
@given(routes_of(2, MESHES + LEVELLED))
def test_an_exchange_sends_and_fetches_these_elements(route: Route) -> None:
    """Counts by dimension, against those of every piece on every rank."""
    mesh, shape, ends = route
    source, target = (l.complete for l in ends)
    gone, levels = [0] * mesh.size, len(mesh.cluster_or_default.levels)
    cases = set()
    for rank in range(mesh.size):
        case = [0] * levels
        for p in pieces(mesh, shape, source, target, rank):
            if p.holder != rank:
                gone[p.holder] += p.elements
                case[_level(mesh.cluster_or_default.units, rank, p.holder)] += p.elements
        cases.add(tuple(case))
    crossing = mesh.clash(tuple({*mesh.cut(source.used, target.used), *target.used}))
    assert sent(mesh, shape, source, target) == max(gone)
    if crossing is None:
        assert set(fetched(mesh, shape, source, target)) == cases


def price(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> float:
    """The time by the forms, of bytes that are counted by shards, or piece by piece on each rank;
    with packing."""
    n = mesh.extent(step.axes)
    if not step.communicates(mesh):
        return 0.0
    buffers = step.record.buffers(Transfer(mesh, shape, before, step, typical=True))
    packing = copying(4 * buffers, mesh)
    levels, units = mesh.cluster_or_default.levels, mesh.cluster_or_default.units
    after, have = prod(step.layout.local_shape(mesh, shape)), prod(before.local_shape(mesh, shape))
    ring = {"all_reduce": have, "reduce_scatter": n * after, "all_gather": n * have}
    forms = step.forms(mesh)
    if step.kind in ring:
        return packing + min(form.latency + form.rate * 4 * ring[step.kind] for form in forms)
    slowest = 0.0
    for rank in range(mesh.size):
        slowest = max(slowest, sum(
            4 * p.elements / levels[_level(units, rank, p.holder)].bandwidth
            for p in pieces(mesh, shape, before.complete, step.layout.complete, rank)
            if p.holder != rank
        ))  # fmt: skip
    return packing + forms[0].latency + slowest


def _level(units: tuple[int, ...], rank: int, other: int) -> int:
    return next(i for i, unit in enumerate(units) if rank // unit == other // unit)


def shortest(
    problem: RedistributionProblem, among: Callable[[Layout], bool] = lambda _: True
) -> float:
    """Dijkstra over all layouts that moves lead to, or those `among` them."""
    serial = count()
    todo = [(0.0, next(serial), problem.source)]
    done: set[Layout] = set()
    while todo:
        so_far, _, layout = heappop(todo)
        if layout == problem.target:
            return so_far
        if layout in done:
            continue
        done.add(layout)
        for step in problem.moves(layout):
            if step.layout not in done and among(step.layout):
                more = price(problem.mesh, problem.shape, layout, step)
                heappush(todo, (so_far + more, next(serial), step.layout))
    raise AssertionError("no path")


@settings(max_examples=extent(10, 60), deadline=None, derandomize=True)
@given(st.data())
def test_the_plan_is_the_shortest_path(data: st.DataObject) -> None:
    """Of all paths; between even layouts of full axes, where an axis crosses levels or another
    split is uneven, of the paths over such layouts."""
    some = [MESHES[0], MESHES[2], LEVELLED[0], LEVELLED[1], LEVELLED[3]]
    mesh, shape = data.draw(st.sampled_from(some)), data.draw(st.sampled_from(EVEN_OR_NOT))
    source, target = (data.draw(layouts(mesh, len(shape), True)) for _ in range(2))
    plan = plan_redistribution(shape, "f32", mesh, source, target)
    found, layout, total = plan.seconds, source, 0.0
    for step in plan.steps:
        total += price(mesh, shape, layout, step)
        layout = step.layout
    assert found == pytest.approx(total, rel=1e-6)
    problem = RedistributionProblem.of(mesh, shape, source, target)
    reduction = source.reduction if source.partial else target.reduction
    known = routes(mesh, len(shape), reduction)
    assert known is not None

    def of_full_axes(layout: Layout) -> bool:
        return layout.simplified(mesh) in known.index and layout.even(mesh, shape)

    restricted = of_full_axes(source) and of_full_axes(target)
    if not restricted or (
        not mesh.level_sub_axes and all(n % mesh.size == 0 for n in shape)
    ):  # the planner knows more exchanges than `moves`
        assert found <= shortest(problem) * (1 + 1e-6)
    else:
        ends = source.simplified(mesh), target.simplified(mesh)
        problem = RedistributionProblem(mesh, shape, *ends)  # not cut at levels
        assert found <= shortest(problem, of_full_axes) * (1 + 1e-6)


@pytest.mark.parametrize(
    "cluster", [load("ascend910"), Cluster((Level("all", 8, 1e9, 1e-9),))], ids=["levels", "bytes"]
)
def test_no_path_over_any_sub_axes_is_faster(cluster: Cluster) -> None:
    """Of all paths over all layouts of the three sub-axes of 8 devices; also of those that a plan
    is not searched among."""
    mesh, random = Mesh("m", (("d", 8),), cluster), Random(0)
    every = Routes(mesh, 2, "sum", tuple(Axis("d", pre, 2) for pre in (1, 2, 4)))
    assert len(every.layouts) == 92
    for rows in (8, 32768):
        shape = (rows, 8)
        found = every.seconds(shape, 4)
        for _ in range(extent(12, 1000)):
            i, j = (random.randrange(len(every.layouts)) for _ in range(2))
            plan = plan_redistribution(shape, "f32", mesh, every.layouts[i], every.layouts[j])
            assert plan.seconds <= found[i, j] * (1 + 1e-9) + 1e-18, str(plan)


@pytest.mark.parametrize("rows", extent([4096], [1, 4, 4096]))
def test_all_paths_at_once_are_the_plans(rows: int) -> None:
    """On two axes of equal links they are the plans of A*, where the tensor is split evenly; where
    it is not, there is none."""
    mesh, shape = Mesh("m", (("a", 2), ("b", 3))), (36, 36 * rows)
    known = routes(mesh, 2)
    assert known is not None and len(known.layouts) == 18
    found = known.seconds(shape, 4)
    for i, source in enumerate(known.layouts):
        for j, target in enumerate(known.layouts):
            plan = Search(RedistributionProblem.of(mesh, shape, source, target), 4, None).run()
            assert plan is not None
            best = time_of(mesh, shape, source, list(plan))
            assert found[i, j] == pytest.approx(best, rel=1e-9)
            path = known.steps(shape, 4, source, target)
            assert path is not None and (path[-1].layout if path else source) == target
            assert time_of(mesh, shape, source, path) == pytest.approx(found[i, j], rel=1e-9)
    uneven = known.seconds((7, 36), 4)[0]
    assert [np.isfinite(x) for x in uneven] == [not l.dims[0] for l in known.layouts]


@pytest.mark.parametrize(
    "cluster",
    sampled([Cluster((Level("n", 4, 1e11, 1e-6), Level("p", 2, 1e9, 1e-5))), None], 1),
)
def test_on_three_axes_they_are_between_the_bound_and_the_named_collectives(
    cluster: Cluster | None,
) -> None:
    mesh, shape = Mesh("m", (("a", 2), ("b", 2), ("c", 2)), cluster), (512, 512)
    known = routes(mesh, 2)
    assert known is not None and len(known.layouts) == 92
    found = known.seconds(shape, 4)
    for i, source in enumerate(known.layouts):
        for j, target in enumerate(known.layouts):
            if target.partial:
                continue
            problem = RedistributionProblem.of(mesh, shape, source, target)
            recipe = named_collectives(shape, mesh, source, target)
            minimum = seconds_bound(mesh, shape, problem.source, problem.target, 4)
            maximum = time_of(mesh, shape, source, recipe)
            assert minimum * (1 - 1e-9) <= found[i, j] <= maximum * (1 + 1e-9)
