"""Planned redistributions: right on all ranks, never slower than a detour, within memory."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.algebra.random_routes import (
    LEVELLED,
    MESHES,
    Route,
    routes_of,
    time_of,
    two_levels,
)
from support.algebra.single_moves import single_moves
from support.extent import extent

from shardir.algebra.cluster import DEFAULT, Cluster, Level
from shardir.algebra.layout import Layout, Shape, is_countable
from shardir.algebra.mesh import Mesh, sizes_of
from shardir.algebra.notation import mesh_of, parse_axes, parse_layout
from shardir.algebra.redistribution import named_collectives, plan_redistribution
from shardir.algebra.routes import routes
from shardir.algebra.steps import step_form
from shardir.cost.clusters import load
from shardir.diagnostics import ShardirError
from shardir.interpret.redistribution import redistribute
from shardir.interpret.values import assemble, split
from shardir.tools import bench

laws = bench.load("laws")


# ---- right, and fast ----


@settings(max_examples=extent(20, 400), deadline=None, derandomize=True)
@given(routes_of(2, MESHES + LEVELLED))
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


@settings(max_examples=extent(5, 200), deadline=None, derandomize=True)
@given(routes_of(2, MESHES))
def test_the_largest_tensors_are_planned_as_smaller_ones(route: Route) -> None:
    """2^16 times the elements, up to the most that a tensor has, take 2^16 times as long: no count
    of elements or bytes overflows, of which a negative time would be a path without an end."""
    mesh, (first, *rest), (source, target) = route
    elements = first * prod(rest)
    if not elements or any(map(sizes_of, (*source.dims, *target.dims))):
        return
    k = 59 - (elements - 1).bit_length()
    small, large = (
        plan_redistribution((first << n, *rest), "f64", mesh, source, target) for n in (k - 16, k)
    )
    assert is_countable(large.shape) and not is_countable((*large.shape, 2))
    assert large.seconds == pytest.approx(small.seconds * 2**16, rel=0.01)
    assert large.bound_bytes == pytest.approx(small.bound_bytes * 2**16, rel=0.01)
    assert 0 <= large.bound_bytes <= large.received_bytes


def test_a_tensor_of_more_elements_than_are_counted_is_refused() -> None:
    """With 8 * 4 * (2^32 + 1)^2 elements the planner had no end."""
    mesh, n = mesh_of("m", "d = 4"), (1 << 32) + 1
    source, target = map(parse_layout, ("@m, [{}, {}, {d}, {}]", "@m, [{}, {d}, {}, {}]"))
    with pytest.raises(ShardirError, match=r"at most 2\^59 elements, got .*; make a dimension"):
        plan_redistribution((n, 4, 8, n), "f32", mesh, source, target)


@pytest.mark.parametrize("rows", [10, 12, 22])
def test_shards_that_need_not_nest_become_partial_after_a_gather(rows: int) -> None:
    """Each device gathers over one axis the rows that its neighbour has, and drops those that are
    of the other half: the others of its group have them."""
    mesh = Mesh("m", (("a", 2), ("b", 3)), Cluster((Level("all", 6, 2.0**30, 0.0),)))
    source, target = parse_layout("@m, [{b, a}]"), parse_layout("@m, [{a}], partial sum {b}")
    plan = plan_redistribution((rows,), "f32", mesh, source, target)
    assert plan.received_bytes == 4 * -(-rows // 6)
    value = np.arange(rows, dtype=np.float64)
    parts = redistribute(plan, split(value, source, mesh))
    np.testing.assert_array_equal(assemble(parts, target, mesh, (rows,)), value)


@settings(max_examples=extent(20, 300), deadline=None, derandomize=True)
@given(routes_of(3, MESHES))
def test_no_detour_is_faster(route: Route) -> None:
    mesh, shape, (a, b, c) = route

    def cost(x: Layout, y: Layout) -> float:
        return plan_redistribution(shape, "f32", mesh, x, y).seconds

    assert cost(a, c) <= (cost(a, b) + cost(b, c)) * (1 + 1e-9)


DETOURS = {
    "an axis that neither layout cuts": (
        Mesh("m", (("a", 4), ("b", 6))), (5, 7),
        "[{}, {}], partial max {a, b}", "[{b:(2)3}, {b:(1)2, a}]", "[{}, {}], partial sum {a, b}",
    ),
    "an exchange of all axes that are left": (
        Mesh("m", (("a", 16),), load("gloo").part(16)), (8000, 130, 5000),
        "[{}, {a:(1)8}, {}], partial sum {a:(8)2}", "[{a:(1)8}, {}, {}]", "[{a:(1)2}, {}, {}]",
    ),
}  # fmt: skip
"""Redistributions by way of a third layout. From partial maxima over 4 x 6 devices to partial sums,
by way of shards over 2 and 3 of the six: each of 24 devices reduces one element or two. From 130
columns over 8 devices to rows, of sums of two: all 16 have rows before these are gathered."""


@pytest.mark.parametrize("name", DETOURS)
def test_a_detour_of_uneven_shards_is_not_faster(name: str) -> None:
    mesh, shape, *texts = DETOURS[name]
    first, third, last = (parse_layout(f"@m, {text}") for text in texts)

    def cost(x: Layout, y: Layout) -> float:
        return plan_redistribution(shape, "f32", mesh, x, y).seconds

    assert cost(first, last) <= (cost(first, third) + cost(third, last)) * (1 + 1e-9)


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


# ---- seconds and bytes ----

BYTES_ALONE = Level("all", 8, 1e9, 1e-9)
"""Links of nearly no latency."""


@pytest.mark.parametrize(
    ("axes", "shape", "source", "target", "received"),
    [
        (
            (("d", 8),), (4096, 32), "[{d:(4)2}, {}], partial sum {d:(1)4}", "[{d:(1)2}, {}]",
            458752,
        ),
        (
            (("a", 2), ("b", 4)), (1024, 1024), "[{}, {}], partial sum {a, b}", "[{a}, {b}]",
            7 * 2**19,
        ),
    ],
)  # fmt: skip
def test_without_latency_a_plan_receives_the_fewest_bytes(
    axes: tuple[tuple[str, int], ...], shape: Shape, source: str, target: str, received: int
) -> None:
    """By reduce-scatters alone, or one and an exchange. A plan is the fastest, so that with
    latencies it may receive more."""
    mesh = Mesh("m", axes, Cluster((BYTES_ALONE,)))
    have, want = (parse_layout(f"@m, {end}") for end in (source, target))
    assert plan_redistribution(shape, "f32", mesh, have, want).received_bytes == received


def test_an_all_reduce_and_a_slice_can_be_faster_than_a_reduce_scatter() -> None:
    """On a cluster on which a reduce-scatter takes longer than its formula; by hand. It receives
    blocks of its result, and packs those that are not contiguous, such as columns."""
    mesh, size = Mesh("m", (("a", 2), ("b", 2))), 4 * 1024**2
    level, times = DEFAULT.levels[0], DEFAULT.times

    def seconds(kind: str, messages: int, size: int, copied: int) -> float:
        assert DEFAULT.memory_bandwidth
        each = level.latency + size / 2 / level.bandwidth
        return times[kind] * messages * each + 2 * copied / DEFAULT.memory_bandwidth

    first_rows = seconds("reduce_scatter", 1, size, size // 2)
    then_columns = seconds("reduce_scatter", 1, size // 2, size // 2 + size // 4)
    reduced = seconds("all_reduce", 2, size // 2, 0)
    have, want = (parse_layout(f"@m, {t}") for t in ("[{}, {}], partial sum {a, b}", "[{a}, {b}]"))
    plan = plan_redistribution((1024, 1024), "f32", mesh, have, want)
    assert [step.kind for step in plan.steps] == ["reduce_scatter", "all_reduce", "all_slice"]
    assert plan.seconds == pytest.approx(first_rows + reduced)
    assert plan.seconds < first_rows + then_columns


# ---- memory ----


@settings(max_examples=extent(10, 30), deadline=None, derandomize=True)
@given(routes_of(2, [MESHES[0], MESHES[5], LEVELLED[1]]), st.integers(0, 600))
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
        "got one of 96 B at",
    )


@pytest.mark.parametrize(("options", "message"), list(refused()))
def test_requests_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    unsharded = parse_layout("@m, [{}, {}]")
    given: dict[str, Any] = {"dtype": "f32", "source": unsharded, "target": unsharded} | options
    with pytest.raises(ShardirError, match=message):
        plan_redistribution(shape=(4, 4), mesh=Mesh("m", (("a", 2),)), **given)


def test_a_move_costs_the_same_beside_unsharded_dimensions():
    """Of tensors of one dimension and of more, whichever are asked for first."""
    cluster = Cluster((Level("n", 4, 1e11, 1e-6), Level("p", 16, 1e9, 1e-5)))
    mesh = Mesh("m", (("a", 4), ("b", 4), ("c", 4)), cluster)
    one, two = routes(mesh, 1), routes(mesh, 2)
    assert one is not None and two is not None
    compared = 0
    for i, j in single_moves(one):
        source, target = (
            Layout("m", ((), *l.dims), l.partial, l.reduction)
            for l in (one.layouts[i], one.layouts[j])
        )
        if source in two.index and target in two.index:
            ends = two.index[source], two.index[target]
            for size in (1, 10**3, 10**8):
                many = two.single_move_seconds((64, 64 * size), 4)
                assert many[ends] == pytest.approx(
                    one.single_move_seconds((64**2 * size,), 4)[i, j]
                )
            compared += 1
    assert compared > 100
