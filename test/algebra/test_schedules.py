"""Schedules of pipelines: their text, the named ones, and the check that they can run."""

import random
import re
from collections.abc import Iterator
from itertools import product

import pytest
from support.extent import extent
from support.torch_schedules import torch_orders, validates
from torch.distributed.pipelining.schedules import _Action

from shardir.algebra.schedules import (
    NAMES,
    Action,
    Orders,
    PipelineCosts,
    Schedule,
    check,
    lower_bound,
    parse_action,
    parse_orders,
    schedule,
    simulate,
)
from shardir.diagnostics import ShardirError

TEXTS = ("0F0", "3SEND_F1", "12RECV_B10", "2I4", "1W0", "7B3", "1UNSHARD", "1REDUCE_GRAD0")


def all_named(most: int = extent(4, 5)) -> Iterator[tuple[str, Schedule]]:
    """Yield the named schedules of few ranks, microbatches and stages, where they exist."""
    for name, ranks, count, chunks in product(NAMES, range(1, most), range(1, 2 * most), (1, 2, 3)):
        try:
            yield name, schedule(name, ranks, count, chunks)
        except ShardirError as e:
            assert "expected" in str(e), e


def progresses(s: Schedule) -> bool:
    """Whether the ranks get to the end, each running its actions in order as soon as it can."""
    left = [list(o) for o in s.orders]
    done: set[tuple[int, str, int | None]] = set()

    def has(stage: int, kinds: str, microbatch: int | None) -> bool:
        return any((stage, k, microbatch) in done for k in kinds)

    def ready(a: Action) -> bool:
        if a.kind == "F":
            return a.stage == 0 or has(a.stage - 1, "F", a.microbatch)
        if a.kind == "W":
            return has(a.stage, "I", a.microbatch)
        after = a.stage == s.stages - 1 or has(a.stage + 1, "IB", a.microbatch)
        return after and has(a.stage, "F", a.microbatch)

    moved = True
    while moved:
        moved = False
        for order in left:
            while order and ready(order[0]):
                done.add(tuple(order.pop(0)))
                moved = True
    return not any(left)


# ---- text ----


@pytest.mark.parametrize("text", TEXTS)
def test_an_action_reads_and_prints_as_in_torch(text: str) -> None:
    ours, theirs = parse_action(text), _Action.from_str(text)
    assert theirs is not None
    assert str(ours) == str(theirs) == text
    expected = (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index)
    assert tuple(ours) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0X0", "expected B, F, I, RECV_B, RECV_F, REDUCE_GRAD, RESHARD, SEND_B, SEND_F, UNSHARD"),
        ("0SEND_G0", "did you mean SEND_"),
        ("F0", "expected an action, got 'F0'; write a stage, a kind and a microbatch"),
        ("0F", "expected a microbatch after F, got '0F'"),
        ("0F0 1F0", "expected an action, got '0F0 1F0'"),
        ("٣F0", "expected an action"),
    ],
)
def test_text_that_is_no_action_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ShardirError, match=re.escape(message)):
        parse_action(text)


def test_cells_may_be_empty_and_hold_overlapped_actions() -> None:
    text = ",0F0,,(0F1;0B0)OVERLAP_F_B, 0B1\n\n"
    expected = ("0F0", "0F1", "0B0", "0B1")
    assert parse_orders(text) == (tuple(map(parse_action, expected)),)


def test_all_errors_of_a_text_are_reported() -> None:
    with pytest.raises(ShardirError) as e:
        Schedule.parse("0F0,0Q0\n1F0,x")
    lines = str(e.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1"]
    with pytest.raises(ShardirError, match="rank 0: expected B, F, I or W, got 0SEND_F0; drop it"):
        Schedule.parse("0F0,0SEND_F0,0B0")
    with pytest.raises(ShardirError, match="stages 0 to 2, got none of stage 1"):
        Schedule.parse("0F0,0B0,2F0,2B0")
    with pytest.raises(ShardirError, match="expected actions, got none"):
        Schedule.parse("")


def test_a_schedule_is_its_text() -> None:
    for _, s in all_named():
        assert Schedule.parse(str(s)) == s


# ---- named schedules ----

COUNTS = extent((2, 3, 4, 7, 8), (2, 3, 4, 7, 8, 10, 16, 32))
"""Of microbatches."""


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("gpipe", (1,)),
        ("1f1b", (1,)),
        ("looped-bfs", (1, 2, 3)),
        ("interleaved", (1, 2, 4)),
        ("zb-h1", (1,)),
        ("interleaved-zb", (2, 3, 4)),
        ("zbv", (2,)),
        ("dualpipev", (2,)),
    ],
)
def test_named_schedules_are_those_of_torch(name: str, chunks: tuple[int, ...]) -> None:
    compared = 0
    for ranks, count, v in product((1, 2, 3, 4, 8), COUNTS, chunks):
        try:
            theirs = torch_orders(name, ranks, count, v)
        except ValueError:  # torch cannot have it
            continue
        assert schedule(name, ranks, count, v).orders == theirs, (ranks, count, v)
        compared += 1
    assert compared > 10


def test_named_schedules_can_run() -> None:
    for name, s in all_named():
        check(s)
        assert progresses(s), name
        assert validates(s), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zb-v", 4, 8, 2), "got 'zb-v'; did you mean zbv?"),
        (("1f1b", 0, 8, 1), "1f1b: expected ranks = 1 or more, got 0; use 1 or more"),
        (("gpipe", 4, 8, 2), "expected chunks = 1, the number of stages on each rank, got 2"),
        (("zbv", 4, 8, 1), "expected chunks = 2, the number of stages on each rank, got 1; use 2"),
        (("interleaved", 4, 9, 2), "in 2 rounds of equal size on 4 ranks, got 9; use 8 or 10"),
        (("dualpipev", 4, 7, 2), "expected at least 8 microbatches, as many as stages, got 7"),
    ],
)
def test_numbers_that_a_schedule_cannot_have(
    arguments: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(ShardirError, match=re.escape(message)):
        schedule(*arguments)


# ---- check ----


def errors(text: str) -> list[str]:
    with pytest.raises(ShardirError) as e:
        check(Schedule.parse(text))
    return str(e.value).splitlines()


def test_all_errors_of_a_schedule_are_reported() -> None:
    assert errors("0F0,0B0,0B0,0F1,0W1,0I1,1B1\n1F0,1I0,1F1,1F1") == [
        "rank 0: expected 1B1 on rank 1; move it there",
        "stage 0, microbatch 0: expected B once, or I and W once each, got B 2 times, I never, "
        "W never; write one of the two",
        "stage 0, microbatch 1: expected I before W, got W first; exchange them",
        "stage 1, microbatch 0: expected B once, or I and W once each, got B never, I once, "
        "W never; write one of the two",
        "stage 1, microbatch 1: expected F once, got it 2 times; write 1F1",
        "stage 1, microbatch 1: expected B once, or I and W once each, got B never, I never, "
        "W never; write one of the two",
    ]
    wrong = Schedule(2, 1, 0, (0, 5), ())
    with pytest.raises(ShardirError) as e:
        check(wrong)
    assert str(e.value).splitlines() == [
        "expected at least one microbatch, got 0; use 1 or more",
        "expected an order for each of 1 ranks, got 0; add the missing ones or drop the others",
        "stage 1: expected a rank from 0 to 0, got 5; use one",
    ]


def test_a_cycle_is_printed_as_its_actions() -> None:
    assert errors("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1") == [
        "expected an order that can run, got a cycle: "
        "0B0 -> 0F1 -> 1F1 -> 1B0 -> 0B0; move one of them in its order"
    ]


def test_forward_parts_alone_can_run() -> None:
    named = schedule("interleaved", 2, 4, 2)
    alone = named.forward()
    assert str(alone) == "0F0,0F1,2F0,2F1,0F2,0F3,2F2,2F3\n1F0,1F1,3F0,3F1,1F2,1F3,3F2,3F3"
    check(alone)
    costs = PipelineCosts.equal(2, 2, (4.0, 0.0, 0.0))
    assert simulate(alone, costs).makespan == lower_bound(alone.placement, 4, costs) == 18.0
    assert errors("0F0,0F1\n1F0") == [
        "stage 1, microbatch 1: expected F once, got it never; write 1F1"
    ]


def changed(orders: Orders, chance: random.Random) -> Orders:
    """Return orders with some actions exchanged, moved to another rank, dropped, or repeated."""
    found = [list(o) for o in orders]
    for _ in range(chance.randint(1, 3)):
        order = chance.choice(found)
        i, j = (chance.randrange(len(order)) for _ in range(2))
        match chance.choice("xxxxxmdr"):
            case "x":
                order[i], order[j] = order[j], order[i]
            case "m":
                order.insert(j, order.pop(i))
            case "d" if len(order) > 1:
                del order[i]
            case _:
                chance.choice(found).insert(0, order[j])
    return tuple(map(tuple, found))


def test_the_check_accepts_exactly_what_can_run() -> None:
    """Compared with torch's check of numbers, and with ranks that run their orders."""
    chance = random.Random(0)
    bases = [s for _, s in all_named(4)]
    accepted = 0
    number = extent(200, 10_000)
    for _ in range(number):
        base = chance.choice(bases)
        s = Schedule(
            base.stages, base.ranks, base.microbatches, base.placement, changed(base.orders, chance)
        )
        if s.is_forward:
            continue  # torch's have backward parts
        once = all(len(o) == len(set(o)) for o in s.orders)  # torch counts sets
        runs = once and all(s.orders) and validates(s) and progresses(s)
        try:
            check(s)
        except ShardirError as e:
            assert not runs, e
        else:
            assert runs, s.csv()
            accepted += 1
    assert number / 20 < accepted < number * 19 / 20, accepted
