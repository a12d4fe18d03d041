"""The search for plans of even shards: its moves, times and bounds are those of the records, and no
path by single moves is faster than its plan."""

from collections import Counter
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from random import Random

import numpy as np
import pytest
from extent import extent
from random_routes import even_problems

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.even_moves import ALL_TO_ALL, GATHER, REDUCE, SCATTER
from shardir.algebra.even_search import EXPANDED, EvenSearch
from shardir.algebra.even_times import EXCHANGE, KINDS
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout, replicated
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.plan_costs import PlanCosts
from shardir.algebra.planner import Search
from shardir.algebra.redistribution import estimated_seconds, plan_redistribution
from shardir.algebra.routes import Routes
from shardir.algebra.steps import steps_seconds
from shardir.cost.clusters import load

UNLIMITED = 10**9


@pytest.mark.parametrize("cluster", ["pod2048", "h200", "gloo", "ascend910"])
def test_moves_times_and_bounds_are_those_of_the_records(cluster: str) -> None:
    """Every layout to which a single move leads is reached, at its price or less; each move that is
    made costs what its record says; and so do the bounds, also from the source. On gloo some axes
    have sizes of 3, which have no closed form in all places."""
    compared = 0
    for case, (problem, random) in enumerate(even_problems(cluster, extent(10, 300))):
        if case % 4 == 3:
            ends = (l.with_partial(l.partial, "max") for l in (problem.source, problem.target))
            problem = RedistributionProblem(problem.mesh, problem.shape, *ends)
        if not EvenSearch.fits(problem):
            continue
        search, exact = EvenSearch(problem, 4), PlanCosts(problem, 4)
        now = problem.source
        for _ in range(2):
            one = search.spelling.of_layout(now)
            made = search.moves.of(one)
            seconds = search.times.seconds(
                one[made.numbers], made.others, made.kinds, made.axes, made.dims
            )
            left = search.bound.seconds(made.others, search.target)
            so_far = search.bound.seconds(search.source, made.others)
            found = dict[Layout, float]()
            for i in random.sample(range(len(seconds)), len(seconds)):
                after = search.spelling.layout(made.others[i])
                found[after] = min(found.get(after, inf), seconds[i])
                if compared % 4 == 0:
                    if made.kinds[i] == EXCHANGE:
                        step = CollectiveStep("exchange", exchange_axes(now, after), after)
                    else:
                        axes = search.spelling.spelled(int(made.axes[i]))
                        (start, end), (dim, concat) = KINDS[made.kinds[i]], made.dims[i].tolist()
                        step = problem.move(start, end, now, axes, dim, concat)
                    assert step.layout == after
                    each = (
                        exact.seconds(now, step), exact.bound(after, problem.target),
                        exact.bound(problem.source, after),
                    )  # fmt: skip
                    some = seconds[i], left[i], so_far[i]
                    np.testing.assert_allclose(some, each, rtol=1e-11, err_msg=f"[{now}] {step}")
                compared += 1
            moves = [*problem.moves(now)]
            for move in random.sample(moves, min(len(moves), 20)):
                if move.layout != now:
                    assert found[move.layout] <= exact.seconds(now, move) * (1 + 1e-11), str(move)
            now = random.choice(moves).layout if moves else now
    assert compared > 300


@pytest.mark.parametrize("cluster", ["pod2048", "gloo"])
def test_moves_of_uneven_shards_take_the_times_of_their_records(cluster: str) -> None:
    """Each that is no exchange leads to the layout of its record, at the price of the padded
    shards."""
    compared = 0
    for problem, random in even_problems(cluster, extent(40, 300), extra=1):
        search, exact, now = EvenSearch(problem, 4), PlanCosts(problem, 4), problem.source
        one = search.spelling.of_layout(now)
        made = search.moves.of(one)
        seconds = search.times.seconds(
            one[made.numbers], made.others, made.kinds, made.axes, made.dims
        )
        named = np.flatnonzero(made.kinds != EXCHANGE).tolist()
        for i in random.sample(named, min(len(named), 20)):
            axes = search.spelling.spelled(int(made.axes[i]))
            (start, end), (dim, concat) = KINDS[made.kinds[i]], made.dims[i].tolist()
            step = problem.move(start, end, now, axes, dim, concat)
            assert step.layout == search.spelling.layout(made.others[i])
            assert seconds[i] == pytest.approx(exact.seconds(now, step), rel=1e-11), str(step)
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("cluster", ["pod2048", "h200"])
def test_no_exchange_of_a_dimension_of_one_element_is_estimated_too_long(cluster: str) -> None:
    """Nor is its bound. The devices that need the element may have it, where others with equal
    splits would have nothing: what is estimated too long is left out before it is counted."""
    compared, more = 0, 1 + 1e-9
    for problem, random in even_problems(cluster, extent(20, 200)):
        single = random.randrange(len(problem.shape))
        shape = tuple([1 if d == single else n for d, n in enumerate(problem.shape)])
        problem = RedistributionProblem(problem.mesh, shape, problem.source, problem.target)
        if not EvenSearch.fits(problem):
            continue
        search, now = EvenSearch(problem, 4), problem.source
        one = search.spelling.of_layout(now)
        made = search.moves.of(one)
        some = np.flatnonzero(made.kinds == EXCHANGE).tolist()
        for i in random.sample(some, min(len(some), 10)):
            others, after = made.others[[i]], search.spelling.layout(made.others[i])
            step = CollectiveStep("exchange", exchange_axes(now, after), after)
            seconds = steps_seconds(problem.mesh, shape, now, [step], 4)
            assert search.times.exchanges(one, others) <= seconds * more, step
            assert search.bound.seconds(one, others) <= seconds * more, step
            lowest = search.times.lowest(one, others).seconds(slice(1), slice(1))
            assert lowest <= seconds * more, step
            compared += 1
    assert compared > 30


def test_a_move_from_a_layout_leads_to_the_other() -> None:
    """Each all-to-all and each reduction from the source is among the moves to its result."""
    compared = 0
    for problem, random in even_problems("pod2048", extent(10, 300)):
        search = EvenSearch(problem, 4)
        source = search.spelling.keys(search.source)
        made = search.moves.of(search.source)
        some = np.flatnonzero(np.isin(made.kinds, (ALL_TO_ALL, REDUCE, SCATTER))).tolist()
        for i in random.sample(some, min(len(some), 10)):
            to = search.moves.to(made.others[[i]])
            same = (to.kinds == made.kinds[i]) & (to.axes == made.axes[i])
            same &= (to.dims == made.dims[i]).all(axis=1)
            assert source in search.spelling.keys(to.others)[same], made.some(np.array([i]))
            compared += 1
    assert compared > 20, "few moves"


def test_axes_are_gathered_at_once_in_the_order_of_the_mesh_or_the_reverse() -> None:
    mesh = Mesh("m", (("a", 2), ("b", 2), ("c", 2)), load("pod2048").part(8))
    unsharded = replicated("m", 1)
    search = EvenSearch(RedistributionProblem.of(mesh, (8,), unsharded, unsharded), 4)
    made = search.moves.to(search.target)
    codes = made.axes[made.kinds == GATHER].tolist()
    gathered = {"".join(a.name for a in search.spelling.spelled(code)) for code in codes}
    assert gathered == {"a", "b", "c", "ab", "abc", "cb", "cba"}


def test_what_splits_the_source_may_be_scattered_on_the_way_to_the_target() -> None:
    """It became partial before, so that it is reduced and scattered with others."""
    mesh = Mesh("m", (("a", 2), ("b", 2)), load("pod2048").part(4))
    source, target = (Layout("m", (tuple(map(Axis, axes)),)) for axes in ("a", "ba"))
    search = EvenSearch(RedistributionProblem.of(mesh, (4,), source, target), 4)
    made = search.moves.to(search.target)
    some = made.axes[made.kinds == SCATTER].tolist()
    assert [search.spelling.spelled(code) for code in some] == [(Axis("a"),)]


def test_a_search_that_ends_misses_no_plan_with_one_exchange() -> None:
    """It ends when no path is left from either end by which one may be faster, or at its limit."""
    ends = Counter[bool]()
    for problem, _ in even_problems("h200", extent(12, 100)):
        plans, search = Search(problem, 4, None), EvenSearch(problem, 4)
        plans.offer([*plans.fixed(problem.source, problem.target)])
        plans.meet_evenly(search)
        assert plans.best is not None
        limit = plans.best[0] * IMPROVEMENT
        both = search.from_source, search.to_target
        ended = all(paths.ended(limit) for paths in both)
        assert ended or max(paths.expanded for paths in both) >= EXPANDED[-1]
        assert not (ended and search.meetings(limit, 10**4))
        ends[ended] += 1
    assert ends[True] > 2


@pytest.mark.parametrize("cluster", ["pod2048", "gloo"])
def test_exchanges_between_all_ends_take_the_times_of_their_records(cluster: str) -> None:
    """And at least their bounds, which are near them; a slice takes none. On gloo some have no
    closed form."""
    bounds, times = list[float](), list[float]()
    for problem, random in even_problems(cluster, extent(10, 300)):
        search, exact = EvenSearch(problem, 4), PlanCosts(problem, 4)
        for paths in (search.from_source, search.to_target):
            paths.expand(inf)
        before, after = search.from_source.layouts, search.to_target.layouts
        every = slice(None)
        lowest = search.times.lowest(before, after).seconds(every, every)
        for _ in range(20):
            i, j = random.randrange(len(before)), random.randrange(len(after))
            found = float(search.times.meetings(before[[i]], after[[j]])[0])
            now, then = search.spelling.layout(before[i]), search.spelling.layout(after[j])
            step = CollectiveStep("exchange", exchange_axes(now, then), then)
            if found < inf and now.partial == then.partial:
                seconds = exact.seconds(now, step)
                assert found == pytest.approx(seconds, rel=1e-11), f"[{now}] {step}"
                assert lowest[i, j] <= found * (1 + 1e-11), f"[{now}] {step}"
                bounds.append(float(lowest[i, j]))
                times.append(seconds)
    ratios = [bound / time for bound, time in zip(bounds, times, strict=True) if time]
    assert len(ratios) > 20 and min(ratios) > 0.5


def test_ends_that_meet_without_communication_meet_in_slices() -> None:
    mesh = Mesh("m", (("a", 8), ("b", 8)), load("pod2048").part(64))
    source, target = Layout("m", ((Axis("a"),), ())), Layout("m", ((Axis("a"),), (Axis("b"),)))
    search = EvenSearch(RedistributionProblem.of(mesh, (64, 64), source, target), 4)
    ((step,),) = search.meetings(1.0, 1)
    assert step.kind == "all_slice" and step.layout.simplified(mesh) == target


@pytest.mark.parametrize("extra", [0, 1])
def test_scalars_and_vectors_are_planned_over_sub_axes(extra: int) -> None:
    """On 2,048 devices, whose axes have no tables; a reduction over half of an axis."""
    mesh = Mesh("m", (("a", 4), ("b", 8), ("c", 8), ("d", 8)), load("pod2048").part(2048))
    for shape in ((), (2048 + extra,)):
        complete = replicated("m", len(shape))
        partial = complete.with_partial((Axis("b", 1, 2),), "sum")
        found = plan_redistribution(shape, "f32", mesh, partial, complete)
        assert [step.kind for step in found.steps] == ["all_reduce"]


def dijkstra(problem: RedistributionProblem) -> float:
    """The time of the shortest path by single moves: none is pruned, all are priced by records."""
    exact, serial = PlanCosts(problem, 4), count()
    best, todo = {problem.source: 0.0}, [(0.0, next(serial), problem.source)]
    while todo:
        seconds, _, now = heappop(todo)
        if now == problem.target:
            return seconds
        if seconds > best[now]:
            continue
        for move in problem.moves(now):
            longer = seconds + exact.seconds(now, move)
            if longer < best.get(move.layout, inf):
                best[move.layout] = longer
                heappush(todo, (longer, next(serial), move.layout))
    return inf


@pytest.mark.parametrize(
    ("cluster", "sizes"), [("pod2048", (4, 4)), ("h200", (4, 4)), ("gloo", (3, 2, 2))], ids=str
)
def test_no_path_by_single_moves_is_faster(cluster: str, sizes: tuple[int, ...]) -> None:
    """Against all paths, none of which is pruned; also where the fastest plan is the limit."""
    mesh = Mesh("m", tuple(zip("abc", sizes, strict=False)))
    mesh = Mesh("m", mesh.axes, load(cluster).part(mesh.size))
    known = Routes(mesh, 2, "sum", mesh.cut(mesh.names, mesh.level_sub_axes))
    random = Random(f"{cluster} {sizes}")
    several = 0
    for _ in range(extent(3, 60)):
        shape = tuple(mesh.size * random.choice([1, 16, 500]) for _ in range(2))
        source, target = random.sample(known.layouts, 2)
        problem = RedistributionProblem.of(mesh, shape, source, target)
        search = EvenSearch(problem, 4)
        search.restart()
        proven, seconds = search.run(inf, UNLIMITED)
        assert proven
        assert seconds <= dijkstra(problem) * (1 + 1e-9), (source, target)
        steps = search.steps()
        by_steps = steps_seconds(mesh, shape, problem.source, steps, 4)
        np.testing.assert_allclose(seconds, by_steps, rtol=1e-9)
        assert (steps[-1].layout if steps else problem.source) == problem.target
        several += len(steps) > 1
        search.restart()
        assert search.run(seconds, UNLIMITED) == (True, seconds)
    assert several, "all plans are of one step"


def test_ends_may_meet_in_an_exchange_that_is_no_single_move() -> None:
    """The exchange puts b:(2)2 last, where the gather after it takes it away: 11% faster than the
    fastest path by single moves."""
    mesh, shape = Mesh("m", (("a", 8), ("b", 4)), load("pod2048").part(32)), (512, 16000, 512)
    (b1, b2), (a1, a2) = (mesh.split(Axis(n), 2) for n in "ba")
    source = Layout("m", ((b2, a1), (a2,), ())).with_partial((b1,))
    target = Layout("m", ((b1,), (b2,), ())).with_partial((Axis("a"),))
    after = [
        Layout("m", ((b2, a1, b1), (a2,), ())), Layout("m", ((b1, a1, b2), (a2,), ())),
        Layout("m", ((b1, a1), (a2,), ())),
    ]  # fmt: skip
    hops = [*pairwise((source, *after)), (after[-1], target)]
    by_hops = sum(estimated_seconds(shape, mesh, a, b, 4) for a, b in hops)
    assert estimated_seconds(shape, mesh, source, target, 4) <= by_hops * (1 + 1e-9)


def test_no_path_by_a_third_layout_is_faster_though_it_is_by_no_single_moves() -> None:
    """An exchange to the third layout: 13% faster than the fastest path by single moves."""
    mesh, shape = Mesh("m", (("a", 8), ("b", 8)), load("pod2048").part(64)), (32000, 64, 32000)
    (a4, a2), (b4, b2) = (mesh.split(Axis(n), 4) for n in "ab")
    source = Layout("m", ((Axis("a"), b2), (), (b4,)))
    third = Layout("m", ((), (Axis("b"),), (Axis("a"),)))
    target = Layout("m", ((Axis("b"),), (), (a4,))).with_partial((a2,))
    first, second, direct = (
        estimated_seconds(shape, mesh, x, y, 2)
        for x, y in ((source, third), (third, target), (source, target))
    )
    assert direct <= (first + second) * (1 + 1e-9)


def test_uneven_shards_over_several_sub_axes_of_16_devices_meet_in_an_exchange() -> None:
    """An exchange to the third layout, which leads away from the target's dimension of c."""
    mesh, shape = Mesh("m", (("a", 2), ("b", 2), ("c", 4)), load("h100").part(16)), (7, 100, 5000)
    a, b, c = map(Axis, "abc")
    source = Layout("m", ((mesh.split(c, 2)[1],), (a,), (b,)))
    third = Layout("m", ((), (a,), (c, b)))
    target = Layout("m", ((a,), (b,), ())).with_partial((c,))
    first, second, direct = (
        estimated_seconds(shape, mesh, x, y, 4)
        for x, y in ((source, third), (third, target), (source, target))
    )
    assert direct <= (first + second) * (1 + 1e-9)


def test_plans_of_vectors_cut_axes_that_neither_end_cuts() -> None:
    """All-reduces over the two parts of b, one after the other, are faster than one over b."""
    mesh, shape = Mesh("m", (("a", 8), ("b", 8)), load("h200").part(64)), (5000,)
    (a2, a4), b = mesh.split(Axis("a"), 2), Axis("b")
    source = Layout("m", ((a4,),)).with_partial((a2, b))
    third = Layout("m", ((a4,),)).with_partial((a2, mesh.split(b, 4)[1]))
    target = Layout("m", ((Axis("a"),),))
    first, second, direct = (
        estimated_seconds(shape, mesh, x, y, 4)
        for x, y in ((source, third), (third, target), (source, target))
    )
    assert direct <= (first + second) * (1 + 1e-9)
