"""The search of schedules: within memory, never slower than a named one, never below the bound."""

import random
from dataclasses import replace
from itertools import product

import pytest
from support.algebra.schedule_orders import fastest, random_costs
from support.extent import sampled

from shardir.algebra.schedules import (
    NAMES,
    PipelineCosts,
    Schedule,
    check,
    lower_bound,
    merged,
    schedule,
    search,
    simulate,
)
from shardir.algebra.schedules.filling import Filling, schedule_by_priority, split_orders
from shardir.algebra.schedules.searching import PRIORITIES, placements
from shardir.diagnostics import ShardirError

REAL = (1.0, 1.15, 0.85)
"""Seconds of F, I and W of which no two are equal."""


def named(ranks: int, microbatches: int, chunks: int) -> list[Schedule]:
    return [
        schedule(name, ranks, microbatches, chunks)
        for name, record in NAMES.items() if record.chunks in (None, chunks)
    ]  # fmt: skip


def holds(s: Schedule, costs: PipelineCosts, memory: list[float]) -> bool:
    held = simulate(s, costs).peak_bytes
    return all(h <= m + 1e-9 for h, m in zip(held, memory, strict=True))


def test_a_searched_schedule_is_at_or_below_the_named_ones() -> None:
    chance = random.Random(0)
    for ranks, chunks, share in ((2, 1, 1.0), (3, 2, 1.0), (2, 2, 1.5), (4, 1, 2.0)):
        costs = random_costs(ranks * chunks, chance)
        memory = [2 * share * ranks * chunks] * ranks
        found = search(ranks, ranks * 4, costs, memory, evaluations=20)
        check(found.schedule)
        assert holds(found.schedule, costs, memory)
        assert found.timeline == simulate(found.schedule, costs)
        assert found.bound <= found.timeline.makespan + 1e-9
        for s in named(ranks, ranks * 4, chunks):
            if holds(s, costs, memory):
                assert found.timeline.makespan <= simulate(s, costs).makespan + 1e-9
        again = search(ranks, ranks * 4, costs, memory, evaluations=20)
        assert again == found, "the result is the same on each run"


def test_the_fastest_order_is_found_where_all_can_be_tried() -> None:
    chance = random.Random(1)
    met = 0
    for ranks, count in ((2, 2), (2, 3), (3, 2), (2, 3), (3, 2), (2, 3)):
        costs = random_costs(ranks, chance)
        memory = [m * count for m in costs.memory]
        best = fastest(ranks, count, costs, memory)
        found = search(ranks, count, costs, memory, evaluations=100).timeline.makespan
        assert found >= best - 1e-9, "faster than any order"
        met += found <= best + 1e-9
    assert met >= 5


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "memory", "gap"),
    sampled([(4, 8, 2, 4, 0.01), (4, 8, 1, 8, 1e-9), (4, 16, 2, 4, 0.01), (8, 8, 2, 8, 0.02)], 1),
)
def test_searched_schedules_are_near_the_bound(
    ranks: int, microbatches: int, chunks: int, memory: int, gap: float
) -> None:
    """With unequal costs and transfers, where torch's own are up to 4% above it."""
    costs = PipelineCosts.equal(ranks, chunks, REAL, 0.1)
    found = search(ranks, microbatches, costs, [memory] * ranks)
    assert 0 <= found.gap + 1e-9 <= gap + 1e-9, found.timeline.makespan


def test_filling_keeps_the_order_of_forward_parts_and_stays_within_memory() -> None:
    too_small = 0
    for s in [*named(3, 6, 1), *named(3, 6, 2)]:
        costs = PipelineCosts.equal(3, s.stages // 3, REAL, 0.1)
        for limit in (3.5, 8.0):
            memory = [limit] * 3
            filled = Filling(s.placement, 6, costs, memory).fill(split_orders(s.orders), [0.0] * 3)
            if filled is None:
                assert limit == 3.5
                too_small += 1
                continue
            found = Schedule(s.stages, 3, 6, s.placement, filled.orders)
            check(found)
            assert holds(found, costs, memory)
            assert simulate(found, costs).makespan <= filled.makespan + 1e-9
            for order, base in zip(found.orders, s.orders, strict=True):
                assert [a for a in order if a.kind == "F"] == [a for a in base if a.kind == "F"]
                if limit == 8.0:
                    assert [a for a in order if a.kind != "W"] == split_orders((base,))[0]
    assert too_small == 2, "looped-bfs, whose first gradients are of the last microbatch"


def test_halves_are_one_action_where_the_step_takes_no_longer() -> None:
    """Of each microbatch for itself: B in the place of I or of W, and nothing else is moved."""
    mixed = 0
    for name, ranks, chunks in (("1f1b", 3, 1), ("interleaved", 2, 2), ("zb-h1", 3, 1)):
        for overhead in (0.0, 0.2):
            costs = replace(PipelineCosts.equal(ranks, chunks, REAL, 0.1), overhead=overhead)
            given = schedule(name, ranks, 6, chunks)
            halves = tuple(
                tuple(part for a in order for part in (
                    [a._replace(kind="I"), a._replace(kind="W")] if a.kind == "B" else [a]
                )) for order in given.orders
            )  # fmt: skip
            split = replace(given, orders=halves)
            found = merged(split, costs)
            check(found)
            before, after = simulate(split, costs), simulate(found, costs)
            assert after.makespan <= before.makespan + 1e-9
            assert holds(found, costs, before.peak_bytes)
            for order, base in zip(found.orders, halves, strict=True):
                assert [a for a in order if a.kind != "B"] == [a for a in base if a in order]
            joined = {(a.stage, a.microbatch) for o in found.orders for a in o if a.kind == "B"}
            mixed += any({(s, k) in joined for k in range(6)} == {True, False}
                         for s in range(found.stages))  # fmt: skip
            assert {(0, k) for k in range(6)} <= joined, "no stage waits for the first one"
    assert mixed


def test_a_search_with_an_overhead_of_actions_has_fewer_of_them() -> None:
    plain = PipelineCosts.equal(3, 2, (1.2, 1.2, 1.2), 0.1)
    costs, memory = replace(plain, overhead=0.1), [4.0] * 3
    found = search(3, 6, costs, memory, evaluations=50)
    check(found.schedule)
    assert holds(found.schedule, costs, memory)
    assert found.bound <= found.timeline.makespan + 1e-9
    without = search(3, 6, plain, memory, evaluations=50).schedule
    assert found.timeline.makespan < simulate(merged(without, costs), costs).makespan
    assert len(found.schedule.splits_backward) < len(without.splits_backward)
    with pytest.raises(ShardirError, match="costs of overhead that are 0 or more, got -1"):
        replace(plain, overhead=-1.0)


def test_orders_by_priorities_run_within_memory() -> None:
    for ranks, chunks, limit in product((2, 3), (1, 2, 3), (1.0, 1.5, 8.0)):
        costs = PipelineCosts.equal(ranks, chunks, REAL, 0.1)
        memory = [limit] * ranks
        for placement, kinds in product(placements(ranks, chunks), PRIORITIES):
            listed = schedule_by_priority(Filling(placement, 6, costs, memory), kinds, 0.5)
            assert listed is not None, "a microbatch of all stages of a rank fits"
            found = Schedule(costs.stages, ranks, 6, placement, listed.orders)
            check(found)
            assert holds(found, costs, memory)
            assert simulate(found, costs).makespan <= listed.makespan + 1e-9
            little = [0.9] * ranks
            assert schedule_by_priority(Filling(placement, 6, costs, little), kinds, 0.5) is None


def test_inputs_that_a_search_cannot_have() -> None:
    costs = PipelineCosts.equal(2, 2)
    with pytest.raises(ShardirError, match="ranks that divides the 4 stages, got 3"):
        search(3, 4, costs)
    with pytest.raises(ShardirError, match="expected the memory of 2 ranks, got 1"):
        search(2, 4, costs, [1.0])
    with pytest.raises(ShardirError, match=r"got 0\.1 bytes on a rank; use 2, which a named"):
        search(2, 4, costs, [0.1, 0.1])
    assert search(2, 4, costs).timeline.makespan == lower_bound((0, 1, 1, 0), 4, costs)
