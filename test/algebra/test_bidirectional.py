"""Plans whose ends meet in an exchange: as fast as brute force, and where A* ends early."""

from collections.abc import Container, Sequence
from itertools import pairwise, permutations
from math import inf
from random import Random

import numpy as np
from support.algebra.single_moves import single_moves
from support.extent import extent

from shardir.algebra.arrays import Table
from shardir.algebra.bidirectional import search_both_ends
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.moves import PlanCosts, RedistributionProblem
from shardir.algebra.notation import parse_layout
from shardir.algebra.redistribution import estimated_seconds
from shardir.algebra.routes import Routes
from shardir.algebra.steps import step_seconds, steps_seconds
from shardir.cost.clusters import load

BEFORE = (
    "all_slice",
    "all_reduce",
    "reduce_scatter",
    "replicated_to_partial",
    "sharded_to_partial",
)
AFTER = ("all_slice", "all_gather", "replicated_to_partial", "sharded_to_partial")


def test_both_ends_find_the_fastest_plan_with_an_exchange() -> None:
    """Between slices and reductions before, and slices and gathers after: all paths, by
    Floyd and Warshall over the moves of each part. Steps are over the problem's runs of
    axes."""
    mesh, shape = Mesh("m", (("a", 4), ("b", 4)), load("pod2048").part(16)), (6400, 4800)
    known = Routes(mesh, 2, "sum", mesh.cut(mesh.names, mesh.level_sub_axes))
    every, n = known.layouts, len(known.layouts)
    moves = [
        (i, j, step, step_seconds(mesh, shape, every[i], step, 4))
        for (i, j), step in single_moves(known).items() if step.kind in {*BEFORE, *AFTER}
    ]  # fmt: skip
    exchange = np.full((n, n), inf)
    np.fill_diagonal(exchange, 0)
    for i, j in permutations(range(n), 2):
        if every[i].partial == every[j].partial:
            step = CollectiveStep("exchange", exchange_axes(every[i], every[j]), every[j])
            exchange[i, j] = step_seconds(mesh, shape, every[i], step, 4)

    def joined(i: int, j: int, runs: Container[Axes]) -> float:
        """Return the minimum time from layout i to j by steps over some runs of axes."""
        head, tail = (paths(kinds, runs) for kinds in (BEFORE, AFTER))
        return float((head[i][:, None] + exchange + tail[:, j]).min())

    def paths(kinds: Sequence[str], runs: Container[Axes]) -> Table:
        table = np.full((n, n), inf)
        np.fill_diagonal(table, 0)
        for i, j, step, seconds in moves:
            if step.kind in kinds and step.axes in runs:
                table[i, j] = seconds
        for k in range(n):
            np.minimum(table, table[:, [k]] + table[[k]], out=table)
        return table

    random, exchanged = Random(0), 0
    for _ in range(extent(4, 25)):
        i, j = random.sample(range(n), 2)
        problem = RedistributionProblem.of(mesh, shape, every[i], every[j])
        found = search_both_ends(problem, 4, 1.0, PlanCosts(problem, 4))
        by_steps = steps_seconds(mesh, shape, problem.source, found.steps, 4)
        best = joined(i, j, problem.runs)
        np.testing.assert_allclose(found.seconds, by_steps, rtol=1e-9)
        assert by_steps <= best * (1 + 1e-9), (every[i], every[j])  # or by further cuts
        exchanged += any(step.kind == "exchange" for step in found.steps)
    assert exchanged > 1, "few plans have an exchange"


def test_both_ends_find_a_plan_as_fast_as_by_way_of_a_third_layout() -> None:
    """If A* from the source ends with a plan that takes longer: of 64 devices, each sum of four
    of which is to be split as neither end is."""
    mesh, shape = Mesh("m", (("a", 8), ("b", 8)), load("h200").part(64)), (32000, 32000)
    ends = "[{a:(1)2}, {b:(4)2}], partial sum {a:(2)4}", "[{a, b}, {}]", "[{b:(1)2, a:(1)4}, {}]"
    layouts = [parse_layout(f"@m, {end}") for end in ends]
    limit = sum(estimated_seconds(shape, mesh, *pair, 4) for pair in pairwise(layouts))
    problem = RedistributionProblem.of(mesh, shape, layouts[0], layouts[-1])
    assert 0 < search_both_ends(problem, 4, limit, PlanCosts(problem, 4)).seconds < limit
