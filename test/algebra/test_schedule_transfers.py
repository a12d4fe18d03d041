"""Transfers of schedules: where they are inserted, and the proof that they end."""

import random
from itertools import product

import pytest
import torch.distributed.pipelining.schedules as theirs
from support.algebra.simulated_ranks import ENDS, WRONG, SimulatedRanks
from support.extent import extent
from support.torch_schedules import our_actions, their_actions

from shardir.algebra.schedules import (
    NAMES,
    Orders,
    Schedule,
    check_transfers,
    orders_text,
    parse_orders,
    schedule,
    with_transfers,
)
from shardir.diagnostics import ShardirError

SCHEDULES = [
    schedule(name, ranks, ranks * 4, chunks)
    for name, ranks, chunks in product(NAMES, (1, 2, 3, 4), (1, 2, 3))
    if NAMES[name].chunks in (chunks, None)
]


def torch_lists(s: Schedule, deferred: bool = False) -> Orders:
    """Return the lists that torch makes of a schedule."""
    found = theirs._add_send_recv(
        their_actions(s.orders), stage_to_rank=s.placement.__getitem__, num_stages=s.stages
    )
    if deferred:
        found = theirs._defer_recv_ops(found, s.placement.__getitem__)
    return tuple(our_actions(found[r]) for r in range(s.ranks))


def test_transfers_are_those_of_torch_and_end() -> None:
    for s in SCHEDULES:
        lists = with_transfers(s)
        assert lists == torch_lists(s)
        for blocking in (False, True):
            assert check_transfers(parse_orders(orders_text(lists)), blocking) == s
            assert SimulatedRanks(s, lists, blocking).run() == ENDS
        theirs._simulate_comms_compute(their_actions(lists), s.placement.__getitem__, s.stages)


CASES = ((2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32))[: extent(4, 6)]
"""Ranks and microbatches."""


@pytest.mark.parametrize(
    ("name", "chunks", "wrong"),
    [
        ("1f1b", 1, []),
        ("interleaved", 2, []),
        ("interleaved", 4, []),
        ("looped-bfs", 2, []),
        ("interleaved-zb", 2, [(2, 4), (2, 8)]),
        ("interleaved-zb", 4, [(2, 4), (2, 8)]),
        ("zbv", 2, [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32)]),
        ("dualpipev", 2, [(4, 8), (4, 16), (8, 16), (8, 32)]),
    ],
)
def test_lists_of_torch_that_receive_other_values_are_refused(
    name: str, chunks: int, wrong: list[tuple[int, int]]
) -> None:
    """With defer_pp_recv=True, torch 2.13 trains wrong gradients on Gloo in such cases."""
    found = []
    for ranks, count in CASES:
        s = schedule(name, ranks, count, chunks)
        lists = torch_lists(s, deferred=True)
        outcome = SimulatedRanks(s, lists, blocking=False).run()
        try:
            check_transfers(lists)
        except ShardirError as e:
            assert "expected receives in the order of the sends" in str(e)
            assert outcome == WRONG
            found.append((ranks, count))
        else:
            assert outcome == ENDS
    assert found == [case for case in wrong if case in CASES]


def error(text: str, blocking: bool = False) -> str:
    with pytest.raises(ShardirError) as e:
        check_transfers(parse_orders(text), blocking)
    return str(e.value)


ONE = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"
V_SHAPED = (
    "0F0,0SEND_F0,2RECV_F0,2F0,2B0,2SEND_B0,0RECV_B0,0B0\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0"
)


def test_errors_of_transfers() -> None:
    check_transfers(parse_orders(ONE), blocking=True)
    check_transfers(parse_orders(f"0UNSHARD,{ONE}"), blocking=True)
    assert error(ONE.replace("0RECV_B0,", "").replace("1SEND_B0", "1SEND_B0,1SEND_B0")) == (
        "rank 0: expected 0RECV_B0 once, got it never; write it once\n"
        "rank 1: expected 1SEND_B0 once, got it 2 times; write it once"
    )
    assert error(f"{ONE},1SEND_F0") == (
        "rank 1: expected no 1SEND_F0, which has no other end; drop it"
    )
    assert error(ONE.replace("0F0,0SEND_F0", "0SEND_F0,0F0")) == (
        "rank 0: expected 0SEND_F0 after 0F0; move it there"
    )
    assert error(ONE.replace("1RECV_F0,1F0", "1F0,1RECV_F0")) == (
        "rank 1: expected 1RECV_F0 before 1F0; move it there"
    )
    assert check_transfers(parse_orders(V_SHAPED), blocking=True).placement == (0, 1, 0)
    late = "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1"
    assert error(f"{late}\n1RECV_F1,1RECV_F0,1F0,1B0,1F1,1B1,1SEND_B0,1SEND_B1") == (
        "rank 0 to rank 1: expected receives in the order of the sends, 1RECV_F0 for 0SEND_F0, "
        "got 1RECV_F1 first; exchange them"
    )


def test_a_cycle_of_transfers_is_printed() -> None:
    """Rank 0 sends 0F1 after 0B0 only, but rank 1 computes 1F1 before 1B0."""
    lists = (
        "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
    )
    assert (
        error(lists)
        == error(lists, blocking=True)
        == (
            "expected transfers that end, got a cycle of actions that wait for each other: "
            "1SEND_B0/0RECV_B0 -> 0B0 -> 0SEND_F1/1RECV_F1 -> 1F1 -> 1B0 -> 1SEND_B0/0RECV_B0; "
            "move one of them in its list"
        )
    )
    crossed = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    )
    assert check_transfers(parse_orders(crossed)).microbatches == 2
    assert error(crossed, blocking=True) == (
        "expected transfers that end, got a cycle of actions that wait for each other: "
        "0SEND_F1/1RECV_F1 -> 1SEND_B0/0RECV_B0 -> 0SEND_F1/1RECV_F1; move one of them in its list"
    )


def changed(lists: Orders, chance: random.Random) -> Orders:
    """Return lists in which some actions are elsewhere, or are missing, or are repeated."""
    found = [list(o) for o in lists]
    for _ in range(chance.randint(1, 2)):
        order = chance.choice(found)
        i = chance.randrange(len(order))
        j = min(len(order) - 1, max(0, i + chance.randint(-4, 4)))
        match chance.choice("xxxxmmmmmmdr"):
            case "x":
                order[i], order[j] = order[j], order[i]
            case "m":
                order.insert(j, order.pop(i))
            case "d":
                del order[i]
            case _:
                order.insert(j, order[i])
    return tuple(map(tuple, found))


def test_lists_are_accepted_exactly_if_ranks_come_to_their_end() -> None:
    chance = random.Random(0)
    bases = [(s, with_transfers(s)) for s in SCHEDULES if s.ranks > 1 and s.microbatches < 13]
    accepted, number = {False: 0, True: 0}, extent(150, 10_000)
    for _ in range(number):
        s, lists = chance.choice(bases)
        lists = changed(lists, chance)
        blocking = chance.random() < 0.5
        repeated = any(len(o) != len(set(o)) for o in lists)
        complete = sorted(a for o in lists for a in o if a.kind in "FIWB") == sorted(
            a for o in s.orders for a in o
        )
        ends = complete and not repeated and SimulatedRanks(s, lists, blocking).run() == ENDS
        try:
            check_transfers(lists, blocking)
        except ShardirError as e:
            assert not ends, e
            assert "expected" in str(e)
        else:
            assert ends, orders_text(lists)
            accepted[blocking] += 1
    assert min(accepted.values()) > number / 20, accepted
    assert sum(accepted.values()) < number * 3 / 4, accepted
