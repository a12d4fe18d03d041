"""The simulator of schedules, and the lower bounds of their time."""

import random
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.algebra.schedule_orders import fastest, random_costs

from shardir.algebra.schedules import (
    Action,
    PipelineCosts,
    Schedule,
    lower_bound,
    schedule,
    search,
    simulate,
)
from shardir.diagnostics import ShardirError


def equal_costs(s: Schedule, transfer: float = 0.0) -> PipelineCosts:
    return PipelineCosts.equal(s.ranks, s.stages // s.ranks, transfer=transfer)


def ends_by_paths(s: Schedule, c: PipelineCosts) -> dict[Action, float]:
    """Return the end of each action, as the longest path to it."""
    before = {a: b for o in s.orders for b, a in zip((None, *o), o, strict=False)}
    split = {a for o in s.orders for a in o if a.kind == "I"}

    @cache
    def end(a: Action) -> float:
        k, stage = a.microbatch, a.stage
        begin = 0.0 if (b := before[a]) is None else end(b)
        own = {
            "F": c.forward[stage], "I": c.input[stage], "W": c.weight[stage],
            "B": c.input[stage] + c.weight[stage],
        }[a.kind]  # fmt: skip
        other = stage - 1 if a.kind == "F" else stage + 1
        if a.kind != "W" and 0 <= other < s.stages:
            needed = Action(other, "F", k)
            if a.kind != "F":
                needed = Action(other, "I" if Action(other, "I", k) in split else "B", k)
            moved = s.placement[other] != s.placement[stage]
            begin = max(begin, end(needed) + moved * c.transfer[min(stage, other)])
        return begin + own

    return {a: end(a) for a in before}


# The rows of a table that was made with another simulator, on the orders of torch: the makespan, or
# with a transfer of 0.1 that, and the peak in flight, with one byte for all stages of a rank.
NAMED = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1),
    ("interleaved-zb", 2), ("zbv", 2), ("dualpipev", 2), ("interleaved-zb", 4),
]  # fmt: skip
FIGURES = {
    (4, 8, 0.0): (33.0, 33.0, 28.5, 26.25, 27.0, 25.5, 25.5, 25.5, 24.75),
    (8, 16, 0.0): (69, 69, 58.5, 53.25, 55, 51.5, 51.5, 51.5, 49.75),
    (8, 16, 0.1): (70.4, 73.0, 61.5, 59.45, 57.8, 55.1, 54.8, 55.2, 54.95),
}
PEAKS = {4: (8, 4, 5.5, 4.75, 4, 4, 4, 4.5, 4), 8: (16, 8, 11.5, 9.75, 8, 8, 8, 8.5, 8)}


@pytest.mark.parametrize("case", FIGURES)
def test_figures_of_another_simulator(case: tuple[int, int, float]) -> None:
    ranks, count, transfer = case
    for (name, chunks), makespan, held in zip(NAMED, FIGURES[case], PEAKS[ranks], strict=True):
        s = schedule(name, ranks, count, chunks)
        found = simulate(s, equal_costs(s, transfer))
        assert found.makespan == pytest.approx(makespan), name
        assert max(found.peak_bytes) == held, name
        assert max(found.peak_in_flight) == held * chunks, name
        assert found.bubble == pytest.approx(1 - 3 * count / makespan), name


def test_times_are_the_longest_paths() -> None:
    chance = random.Random(0)
    for name, chunks in (*NAMED, ("zb-h2", 1), ("v-half", 2), ("looped-bfs", 3)):
        s = schedule(name, 3, 6, chunks)
        c = random_costs(s.stages, chance)
        found = simulate(s, c)
        expected = ends_by_paths(s, c)
        for order, runs in zip(s.orders, found.ranks, strict=True):
            assert [run.action for run in runs] == list(order)
            assert [run.end for run in runs] == pytest.approx([expected[a] for a in order])
        assert found.makespan == pytest.approx(max(expected.values()))


def test_what_is_held_is_counted_while_it_runs() -> None:
    chance = random.Random(1)
    for name, chunks in NAMED:
        s = schedule(name, 2, 4, chunks)
        found = simulate(s, random_costs(s.stages, chance))
        for rank, runs in enumerate(found.ranks):
            position = {run.action: k for k, run in enumerate(runs)}
            intervals = [
                (k, position.get(a._replace(kind="W"), position.get(a._replace(kind="B"))), a)
                for a, k in position.items() if a.kind == "F"
            ]  # fmt: skip
            held = [
                [a for k, last, a in intervals if last is not None and k <= at <= last]
                for at in range(len(runs))
            ]
            assert found.peak_in_flight[rank] == max(map(len, held))
            sizes = [sum(found.costs.memory[a.stage] for a in each) for each in held]
            assert found.peak_bytes[rank] == max(sizes)


def test_laws_of_named_schedules() -> None:
    for ranks, count in product((1, 2, 3, 4, 8, 9), (1, 2, 8, 32)):
        s = schedule("1f1b", ranks, count)
        found = simulate(s, equal_costs(s))
        assert found.peak_in_flight == [min(count, ranks - r) for r in range(ranks)]
        if ranks > 1:
            for name, share in (("v-half", 2), ("v-min", 3)):
                s = schedule(name, ranks, count, 2)
                found = simulate(s, equal_costs(s))
                assert max(found.peak_bytes) <= -(-ranks // share) + 1, (name, ranks)
        s = schedule("zb-h2", ranks, count)
        found = simulate(s, equal_costs(s))
        assert max(found.peak_in_flight) <= 2 * ranks - 1
        for runs in found.ranks if count >= 2 * ranks - 1 else ():
            assert runs[-1].end - runs[0].begin == 3 * count, "no rank pauses"


def test_costs_that_cannot_be() -> None:
    s = schedule("1f1b", 2, 2)
    with pytest.raises(ShardirError, match="expected costs of 2 stages, got costs of 4"):
        simulate(s, PipelineCosts.equal(2, 2))
    with pytest.raises(ShardirError, match="expected 1 costs of transfer for 2 stages, got 2"):
        PipelineCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ShardirError, match="costs of weight that are 0 or more, got"):
            PipelineCosts((1.0,), (1.0,), (wrong,), (), (1.0,))
    with pytest.raises(ShardirError, match="got a cycle"):
        simulate(Schedule.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), PipelineCosts.equal(2))


# ---- the bound ----


def test_the_bound_is_below_the_fastest_order() -> None:
    chance = random.Random(0)
    met = 0
    for ranks, count in ((2, 2), (2, 3), (3, 2), (1, 3), (2, 2), (3, 2)):
        c = random_costs(ranks, chance)
        limits = [m * chance.randint(1, 2) for m in c.memory]
        for memory in (None, limits):
            best = fastest(ranks, count, c, memory)
            bound = lower_bound(range(ranks), count, c, memory)
            assert bound <= best + 1e-9, (c, memory)
            met += bound >= best - 1e-9
    assert met >= 4, "a bound that is never met is of no use"


def test_the_bound_of_equal_stages_is_the_formula() -> None:
    """(p - 1) (F / v + transfer) + m (F + I + W), for several microbatches."""
    for ranks, chunks, transfer in product((2, 4, 8), (1, 2), (0.0, 0.1)):
        c = PipelineCosts.equal(ranks, chunks, (1.0, 1.15, 0.85), transfer)
        expected = (ranks - 1) * (1 / chunks + transfer) + 32 * 3
        placements = [[s % ranks for s in range(c.stages)]]
        if chunks == 2:
            placements.append([*range(ranks), *reversed(range(ranks))])
        for placement in placements:
            assert lower_bound(placement, 32, c) == pytest.approx(expected)


def test_few_microbatches_meet_the_bound() -> None:
    """Fewer than there are ranks: the last stage computes F and I of all of them, between the first
    results of all other stages and the last gradient's way back; at last is W of the first."""
    for ranks, count, chunks, transfer in ((4, 2, 2, 0.1), (8, 4, 1, 0.0), (8, 4, 2, 0.1)):
        c = PipelineCosts.equal(ranks, chunks, (1.0, 1.15, 0.85), transfer)
        way = (c.stages - 1) * (2.15 / chunks + 2 * transfer)
        expected = way + count * 2.15 / chunks + 0.85 / chunks
        loop = [s % ranks for s in range(c.stages)]
        assert lower_bound(loop, count, c) == pytest.approx(expected)
        assert search(ranks, count, c).gap == 0.0


def test_named_schedules_meet_the_bound_where_they_are_optimal() -> None:
    for name, chunks in (("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2), ("dualpipev", 2)):
        for ranks, count in ((2, 8), (4, 8), (8, 16)):
            s = schedule(name, ranks, count, chunks)
            c = equal_costs(s)
            assert simulate(s, c).makespan == lower_bound(s.placement, count, c), name
    s = schedule("zbv", 8, 16, 2)
    c = PipelineCosts.equal(8, 2, (1.0, 1.15, 0.85))
    t = simulate(s, c)
    assert t.makespan == pytest.approx(lower_bound(s.placement, 16, c, t.peak_bytes))


# ---- the drawing ----

PICTURES = {"1f1b": 1, "zbv": 2}
"""The schedules drawn in docs/understand/pipeline.md, with their stages on each rank."""
FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def picture(name: str) -> str:
    s = schedule(name, 4, 6, PICTURES[name])
    return simulate(s, equal_costs(s)).svg()


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_page_are_current(name: str) -> None:
    """`python test/algebra/test_schedule_simulation.py` writes them."""
    assert (FOLDER / f"{name}.svg").read_text() == picture(name)


def test_a_drawing_has_a_row_for_each_rank_and_a_box_for_each_action() -> None:
    s = schedule("zbv", 4, 8, 2)
    found = simulate(s, equal_costs(s))
    root = ElementTree.fromstring(found.svg())
    space = {"s": "http://www.w3.org/2000/svg"}
    boxes = root.findall("s:g", space)
    titles = [b.findtext("s:title", "", space).split(":")[0] for b in boxes]
    assert sorted(titles) == sorted(str(a) for o in s.orders for a in o)
    rows: dict[str, list[tuple[float, float]]] = {}
    for b in boxes:
        box = b.find("s:rect", space)
        assert box is not None
        x, width = float(box.get("x", "")), float(box.get("width", ""))
        rows.setdefault(box.get("y", ""), []).append((x, x + width))
    assert len(rows) == 4
    for row in rows.values():
        row.sort()
        assert all(a[1] <= b[0] + 0.11 for a, b in pairwise(row)), "overlap"


if __name__ == "__main__":
    for name in PICTURES:
        (FOLDER / f"{name}.svg").write_text(picture(name))
