"""Planned redistributions: right on all ranks, the fastest, never below the bound."""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import combinations, count, pairwise
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from extent import extent
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import with_sizes

from shardir.algebra.bound import bound, seconds_bound
from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.collectives import CollectiveStep, Transfer
from shardir.algebra.exchange import pieces
from shardir.algebra.forms import copying
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axis, Mesh, sizes_of
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.notation import parse_axes, parse_layout
from shardir.algebra.redistribution import Search, named_collectives, plan_redistribution
from shardir.algebra.routes import Routes, routes
from shardir.algebra.steps import step_form, step_seconds
from shardir.algebra.traffic import fetched, sent
from shardir.cost.clusters import load, names
from shardir.diagnostics import ShardirError
from shardir.interpret.redistribution import redistribute
from shardir.interpret.values import assemble, split
from shardir.tools import bench

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
def random_routes(draw: st.DrawFn, stops: int, meshes: list[Mesh]) -> Route:
    mesh, shape = draw(st.sampled_from(meshes)), draw(st.sampled_from(SHAPES))
    drawn = [draw(layouts(mesh, len(shape), True)) for _ in range(stops)]
    return mesh, shape, [draw(with_sizes(mesh, shape, layout)) for layout in drawn]


# ---- right, and fast ----


@settings(max_examples=extent(120, 400), deadline=None, derandomize=True)
@given(random_routes(2, MESHES + LEVELLED))
def test_each_rank_ends_with_its_shard(route: Route) -> None:
    mesh, shape, (source, target) = route
    plan = plan_redistribution(shape, "f32", mesh, source, target)
    value = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    parts = redistribute(plan, split(value, plan.source, mesh))
    np.testing.assert_array_equal(assemble(parts, plan.target, mesh, shape), value)
    end = plan.steps[-1].layout if plan.steps else plan.source
    assert end.simplified(mesh) == plan.target
    assert plan.peak_bytes >= 4 * max(p.size for p in parts)
    assert plan.received_bytes >= plan.bound_bytes
    assert plan_redistribution(shape, "f32", mesh, source, source).steps == ()
    if any(map(sizes_of, (*source.dims, *target.dims))):
        return  # the recipe has no explicit sizes
    recipe = named_collectives(shape, mesh, source, target)
    assert plan.seconds <= time_of(mesh, shape, plan.source, recipe) * (1 + 1e-9)


@settings(max_examples=extent(90, 300), deadline=None, derandomize=True)
@given(random_routes(3, MESHES))
def test_no_detour_is_faster(route: Route) -> None:
    mesh, shape, (a, b, c) = route

    def cost(x: Layout, y: Layout) -> float:
        return plan_redistribution(shape, "f32", mesh, x, y).seconds

    assert cost(a, c) <= (cost(a, b) + cost(b, c)) * (1 + 1e-9)


@pytest.mark.parametrize("cluster", names())
def test_no_path_through_a_third_layout_is_faster(cluster: str) -> None:
    """On the ready-made clusters, between layouts over sub-axes, also where they cross levels."""
    found = laws.check("triangle", cluster, range(extent(4, 2000)), print)
    assert found and not any(r["violations"] for r in found), found


def time_of(mesh: Mesh, shape: Shape, layout: Layout, steps: list[CollectiveStep]) -> float:
    """The planner's own price of some steps."""
    total = 0.0
    for step in steps:
        total += step_seconds(mesh, shape, layout, step, 4)
        layout = step.layout
    return total


# ---- against brute force ----


@settings(max_examples=extent(60, 200), deadline=None, derandomize=True)
@given(random_routes(2, MESHES + LEVELLED))
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
    assert sent(mesh, shape, source, target) >= max(gone)
    if crossing is None:
        assert sent(mesh, shape, source, target) == max(gone)
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


@settings(max_examples=extent(20, 60), deadline=None, derandomize=True)
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
        for _ in range(extent(25, 1000)):
            i, j = (random.randrange(len(every.layouts)) for _ in range(2))
            plan = plan_redistribution(shape, "f32", mesh, every.layouts[i], every.layouts[j])
            assert plan.seconds <= found[i, j] * (1 + 1e-9) + 1e-18, str(plan)


@pytest.mark.parametrize("rows", [1, 4, 4096])
def test_all_paths_at_once_are_the_plans(rows: int) -> None:
    """On two axes of equal links they are the plans of A*, where the tensor is split evenly; where
    it is not, there is none."""
    mesh, shape = Mesh("m", (("a", 2), ("b", 4))), (64, 64 * rows)
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
    uneven = known.seconds((7, 8), 4)[0]
    assert [np.isfinite(x) for x in uneven] == [not l.dims[0] for l in known.layouts]


@pytest.mark.parametrize(
    "cluster", [None, Cluster((Level("n", 4, 1e11, 1e-6), Level("p", 2, 1e9, 1e-5)))]
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


def messages(addends: int, groups: list[list[int]], holders: list[int]) -> int:
    """The fewest messages after which each group of devices has all partial values among its
    members; device d begins with partial value holders[d], or with none (-1). A message is the sum
    of some that its sender knows; breadth first over all states of knowledge."""
    full = (1 << addends) - 1
    start = tuple(frozenset({1 << c} if c >= 0 else ()) for c in holders)

    def sums(known: frozenset[int]) -> set[int]:
        """The sums of disjoint known ones."""
        found = set()
        for n in range(1, len(known) + 1):
            for some in combinations(sorted(known), n):
                if sum(some) == np.bitwise_or.reduce(some) and sum(x.bit_count() for x in some) == (
                    sum(some).bit_count()
                ):
                    found.add(sum(some))
        return found

    def done(state: tuple[frozenset[int], ...]) -> bool:
        return all(full in sums(frozenset().union(*(state[d] for d in g))) for g in groups)

    level, seen, sent = {start}, {start}, 0
    while not any(done(s) for s in level):
        after = set()
        for state in level:
            for sender in range(len(state)):
                for message in sums(state[sender]):
                    for taker in range(len(state)):
                        if taker != sender and message not in state[taker]:
                            new = list(state)
                            new[taker] = state[taker] | {message}
                            after.add(tuple(new))
        level, sent = after - seen, sent + 1
        seen |= level
    return sent


@pytest.mark.parametrize(
    ("axes", "source", "target"),
    [
        ("d = 2", "partial sum {d}", ""), ("d = 3", "partial sum {d}", ""),
        ("a = 2, b = 2", "partial sum {a, b}", "partial sum {b}"),
        ("a = 2, b = 2", "partial sum {a}", "partial sum {b}"),
        ("a = 2, b = 2", "partial sum {a}", "partial sum {a, b}"),
        ("a = 2, b = 2", "partial sum {a}", ""),
    ],
)  # fmt: skip
def test_the_bound_of_a_reduction_is_the_fewest_messages(
    axes: str, source: str, target: str
) -> None:
    """One element, so that all messages are of it; the bound is the mean of all devices, or what
    one needs."""
    sizes = [part.split(" = ") for part in axes.split(", ")]
    mesh = Mesh("m", tuple((n, int(s)) for n, s in sizes))
    have, want = (parse_layout("@m, [{}]" + (f", {t}" if t else "")) for t in (source, target))
    holders = [mesh.index(rank, have.partial) for rank in range(mesh.size)]
    groups = [list(g) for g in mesh.groups(want.partial)]
    fewest = messages(mesh.extent(have.partial), groups, holders)
    many = 840  # elements, each as this one; a multiple of what the mean divides by
    minimum = bound(mesh, (many,), have, want)
    assert minimum * mesh.size <= fewest * many or minimum == many  # a true bound
    if not want.partial:
        assert minimum * mesh.size == max(fewest, mesh.size) * many  # and the mean of the fewest


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rings_reach_the_bound(n: int) -> None:
    """Reduce-scatter and all-reduce of even shards (Patarasuk and Yuan, 2009)."""
    mesh = Mesh("m", (("d", n),))
    partial = parse_layout("@m, [{}], partial sum {d}")
    for target, share in (("@m, [{d}]", n - 1), ("@m, [{}]", 2 * (n - 1))):
        plan = plan_redistribution((64,), "f32", mesh, partial, parse_layout(target))
        assert plan.received_bytes == plan.bound_bytes == 64 * 4 * share // n


# ---- clusters ----


def test_levels() -> None:
    mesh = Mesh("m", (("a", 2), ("b", 6)), two_levels(3, 4))
    mesh.check_cluster()
    levels = {t: mesh.level(parse_axes(t)) for t in ("a", "b", "b:(2)3", "b:(1)2", "a, b:(2)3")}
    assert levels == {"a": 1, "b": 1, "b:(2)3": 0, "b:(1)2": 1, "a, b:(2)3": 1}


def test_a_gather_over_two_levels_is_one() -> None:
    """Its hierarchical form costs the same as a gather over the slow links with small shards, and
    then one over the fast ones."""
    mesh = Mesh("m", (("slow", 2), ("fast", 4)), two_levels(4, 2))
    shape, unsharded = (4096, 4096), parse_layout("@m, [{}, {}]")
    for source in ("@m, [{fast, slow}, {}]", "@m, [{slow, fast}, {}]"):
        plan = plan_redistribution(shape, "f32", mesh, parse_layout(source), unsharded)
        assert [s.kind for s in plan.steps] == ["all_gather"]
        (gather,) = plan.steps
        form = step_form(mesh, shape, plan.source, gather, 4)
        assert form.name == "hierarchical"
    apart = [
        plan_redistribution(shape, "f32", mesh, parse_layout(a), parse_layout(b)).seconds
        for a, b in pairwise(["@m, [{fast, slow}, {}]", "@m, [{fast}, {}]", "@m, [{}, {}]"])
    ]
    assert sum(apart) == pytest.approx(plan.seconds)


def test_an_all_reduce_over_two_levels_is_one() -> None:
    """Its hierarchical form costs the same as a reduce-scatter, an all-reduce and a gather."""
    mesh, shape = Mesh("m", (("slow", 2), ("fast", 4)), two_levels(4, 2)), (1 << 20,)
    ends = ("[{}], partial sum {slow, fast}", "[{fast}], partial sum {slow}", "[{fast}]", "[{}]")
    stops = [parse_layout(f"@m, {end}") for end in ends]
    plan = plan_redistribution(shape, "f32", mesh, stops[0], stops[-1])
    assert [s.kind for s in plan.steps] == ["all_reduce"]
    assert step_form(mesh, shape, plan.source, plan.steps[0], 4).name == "hierarchical"
    apart = [plan_redistribution(shape, "f32", mesh, a, b).seconds for a, b in pairwise(stops)]
    assert sum(apart) == pytest.approx(plan.seconds)


# ---- memory ----


@settings(max_examples=extent(20, 30), deadline=None, derandomize=True)
@given(random_routes(2, [MESHES[0], MESHES[5], LEVELLED[1]]), st.integers(0, 600))
def test_a_plan_is_within_the_memory_or_refused(route: Route, memory: int) -> None:
    mesh, shape, (source, target) = route
    try:
        plan = plan_redistribution(shape, "f32", mesh, source, target, memory=memory)
    except ShardirError as e:
        needed = int(str(e).split("got one of ")[1].split()[0])
        assert needed > memory
        plan = plan_redistribution(shape, "f32", mesh, source, target, memory=needed)
        assert plan.peak_bytes == needed
    else:
        assert not plan.steps or plan.peak_bytes <= memory


# ---- the public call ----


def test_a_plan_as_text() -> None:
    mesh = Mesh("m", (("a", 2), ("b", 3)))
    source, target = parse_layout("@m, [{a}, {b}]"), parse_layout("@m, [{b, a}, {}]")
    assert str(plan_redistribution((5, 7), "f32", mesh, source, target)).splitlines() == [
        "[@m, [{a}, {b}]] -> [@m, [{b, a}, {}]]",
        "  exchange over {a, b} -> [@m, [{b, a}, {}]]",
        "  receives 28 B (at least 28 B), peak 140 B, 0.000675 s",
    ]


def refused() -> Iterator[tuple[dict[str, object], str]]:
    unsharded, rows = parse_layout("@m, [{}, {}]"), parse_layout("@m, [{a}, {}]")
    for text, code in (("[{a}]", "L1"), ("[{z}, {}]", "L2"), ("[{a}, {a}]", "L3")):
        yield {"target": parse_layout(f"@m, {text}")}, rf"\[{code}\]"
    yield {"target": parse_layout("@m, [{}, {}], partial any {a}")}, r"\[L4\]"
    yield {"dtype": "f8"}, "expected an element type, got f8; use f64, f32"
    yield (
        {"cluster": two_levels(2, 2)},
        r"\[M5\] expected a cluster of 2 devices for mesh @m, got 4",
    )
    yield (
        {"source": rows, "target": unsharded, "memory": 10},
        "got one of 1[0-9]+ B at",
    )


@pytest.mark.parametrize(("options", "message"), list(refused()))
def test_requests_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    unsharded = parse_layout("@m, [{}, {}]")
    given = {"dtype": "f32", "source": unsharded, "target": unsharded} | options
    with pytest.raises(ShardirError, match=message):
        plan_redistribution(shape=(4, 4), mesh=Mesh("m", (("a", 2),)), **given)


def test_a_move_costs_the_same_beside_unsharded_dimensions():
    """Of tensors of one dimension and of more, whichever are asked for first."""
    cluster = Cluster((Level("n", 4, 1e11, 1e-6), Level("p", 16, 1e9, 1e-5)))
    mesh = Mesh("m", (("a", 4), ("b", 4), ("c", 4)), cluster)
    one, two = routes(mesh, 1), routes(mesh, 2)
    assert one is not None and two is not None
    compared = 0
    for i, j in one.moves:
        source, target = (
            Layout("m", ((), *l.dims), l.partial, l.reduction)
            for l in (one.layouts[i], one.layouts[j])
        )
        if source in two.index and target in two.index:
            ends = two.index[source], two.index[target]
            for size in (1, 10**5, 10**10):
                assert two.each(size)[ends] == pytest.approx(one.each(size)[i, j])
            compared += 1
    assert compared > 100


def test_times_do_not_depend_on_what_was_planned_before() -> None:
    """The tables of all ranks share what is known of a mesh, of which a process retains some."""
    axes, cluster = (("a", 2), ("b", 2), ("c", 2)), two_levels(4, 2)

    def seconds(name: str, rank: int) -> Any:
        known = routes(Mesh(name, axes, cluster), rank)
        assert known is not None
        return known.seconds((64,) * rank, 4)

    alone = seconds("alone", 2)
    seconds("later", 3)
    for i in range(40):  # more meshes than are retained
        assert routes(Mesh(f"other {i}", axes, cluster), 1) is not None
    np.testing.assert_array_equal(seconds("later", 2), alone)
