"""The bound of a redistribution: the fewest messages, where they can be counted; rings reach it."""

from itertools import combinations
from math import prod
from random import Random

import numpy as np
import pytest
from support.algebra.random_routes import random_cluster
from support.extent import extent

from shardir.algebra.bound import bound, latency_bound, refined, seconds_bound
from shardir.algebra.mesh import Mesh
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.notation import parse_layout
from shardir.algebra.redistribution import plan_redistribution
from shardir.algebra.steps import step_received, step_seconds
from shardir.tools import bench

laws = bench.load("laws")


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


@pytest.mark.parametrize(
    ("sizes", "rounds", "reached"),
    [
        ((2, 3), 3, True),
        ((2, 6), 4, True),
        ((5, 2), 4, True),
        ((4, 8), 5, True),
        ((5, 5), 5, False),
    ],
)
def test_the_bound_is_the_latency_of_an_exchange_over_all_axes(
    sizes: tuple[int, int], rounds: int, reached: bool
) -> None:
    """Rounds are integers, and the axes change places; of two odd primes the bound is less."""
    mesh = Mesh("m", tuple(zip("ab", sizes, strict=True)))
    source, target = (parse_layout(f"@m, [{ends}]") for ends in ("{a}, {b}", "{b}, {a}"))
    (link,) = mesh.cluster_or_default.levels
    found = latency_bound(mesh, *refined(mesh, source, target)) / link.latency
    assert found <= rounds * (1 + 1e-12)
    assert (found >= rounds * (1 - 1e-12)) == reached


@pytest.mark.parametrize("sizes", [(8,), (2, 2), (2, 3), (12,), (2, 2, 2), (5, 5)], ids=str)
def test_no_moves_are_below_the_bound(sizes: tuple[int, ...]) -> None:
    """One to three random moves, on clusters of random links and factors of collectives, against
    the bounds between the layouts where they begin and end. Complete values become partial too."""
    for case in range(extent(40, 2000)):
        random = Random(f"{sizes} {case}")
        axes = tuple(zip("abc", sizes, strict=False))
        mesh = Mesh("m", axes, random_cluster(prod(sizes), random))
        shape = tuple(random.choice([1, 3, mesh.size, 8 * mesh.size]) for _ in range(2))
        source, other = (laws.random_layout(mesh, 2, random) for _ in range(2))
        source = random.choice([source, source.complete])
        problem = RedistributionProblem.of(mesh, shape, source, other)
        for _ in range(3):
            now, received, seconds = problem.source, 0, 0.0
            for _ in range(random.randint(1, 3)):
                moves = list(problem.moves(now))
                local = [move for move in moves if not move.communicates(mesh)]
                if not moves:
                    break
                move = random.choice(random.choice([moves, local or moves]))
                received += step_received(mesh, shape, now, move)
                seconds += step_seconds(mesh, shape, now, move, 4)
                now = move.layout
                assert bound(mesh, shape, source, now) <= received
                minimum = seconds_bound(mesh, shape, *refined(mesh, source, now), 4)
                assert minimum <= seconds * (1 + 1e-9), (case, source, now)
