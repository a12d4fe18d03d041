"""The solver of the search, against all solutions of small problems, and against MILP."""

from itertools import pairwise, product
from math import isclose
from typing import Any

import numpy as np
import pytest
from support.extent import sampled

from shardir.search.problem.elimination import Elimination, Solution, eliminate, fits
from shardir.search.problem.problem import CostProblem
from shardir.search.problem.relaxation import Relaxation, ends
from shardir.search.problem.solver import (
    MAX_TABLE_ENTRIES,
    PAIR_NEIGHBOURS,
    search_near_bound,
    solve,
)


def random_problem(seed: int, variables: int, edges: int, values: int = 4) -> CostProblem:
    """Return a problem whose costs are integers, so that sums are exact."""
    rng = np.random.default_rng(seed)
    problem = CostProblem()
    for _ in range(variables):
        problem.variable(rng.integers(0, 20, rng.integers(1, values + 1)).astype(float))
    for _ in range(edges):
        i, j = (int(k) for k in rng.integers(0, variables, 2))
        shape = len(problem.unary[i]), len(problem.unary[j])
        problem.add(i, j, rng.integers(-5, 20, shape).astype(float))
    return problem


def minimum(problem: CostProblem) -> float:
    """Return the minimum over all solutions."""
    return min(problem.cost(c) for c in product(*(range(len(u)) for u in problem.unary)))


@pytest.mark.parametrize("seed", sampled(range(60), 12))
def test_the_minimum_of_all_solutions_is_found(seed: int):
    problem = random_problem(seed, variables=2 + seed % 7, edges=seed % 13)
    found = solve(problem)
    assert found.objective == problem.cost(found.choice) == minimum(problem)
    assert found.bound == found.objective and found.gap == 0


@pytest.mark.parametrize("seed", sampled(range(30), 6))
@pytest.mark.parametrize("cap", [1, 4, 16])
def test_with_small_tables_the_minimum_is_between_bound_and_objective(seed: int, cap: int):
    problem = random_problem(seed, variables=7, edges=15)
    for found in (solve(problem, cap), eliminate(problem, cap)):
        assert found.bound <= minimum(problem) + 1e-9
        assert minimum(problem) <= found.objective == problem.cost(found.choice)


@pytest.mark.parametrize("seed", sampled(range(20), 4))
def test_the_ends_of_a_table_with_equal_rows_have_the_minima_of_all_rows(seed: int):
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(0, n, 2 * n) for n in rng.integers(1, 7, 2))
    table = rng.random((6, 6))[np.ix_(rows, columns)]
    of_rows, of_columns = ends(table)
    more, others = rng.random(len(columns)), rng.random(len(rows))
    assert (of_rows.minima(more) == (table - more).min(axis=1)).all()
    assert (of_columns.minima(others) == (table.T - others).min(axis=1)).all()


@pytest.mark.parametrize("seed", sampled(range(30), 6))
def test_a_relaxation_rules_out_nothing_that_is_better(seed: int):
    problem = random_problem(seed, variables=7, edges=12)
    relaxation = Relaxation(problem, [0] * 7)
    every = product(*(range(len(u)) for u in problem.unary))
    better = [c for c in every if problem.cost(c) < relaxation.objective] or [(0,) * 7]
    bounds = []
    for _ in range(5):
        relaxation.run(3)
        bounds.append(relaxation.bound())
        moved = relaxation.reparametrised()
        assert isclose(moved.cost(relaxation.choice), relaxation.objective, abs_tol=1e-9)
        allowed = relaxation.allowed(relaxation.margins())
        for mine, values in zip(allowed, zip(*better, strict=True), strict=True):
            assert {*values} <= {*mine}
        assert all(x in a for x, a in zip(relaxation.choice, allowed, strict=True))
    assert bounds[-1] <= minimum(problem) + 1e-9
    assert all(b >= a - 1e-9 for a, b in pairwise(bounds))


@pytest.mark.parametrize("seed", sampled(range(30), 6))
@pytest.mark.parametrize("cap", [1, 16, MAX_TABLE_ENTRIES])
def test_the_rest_after_variables_of_few_neighbours_costs_the_same(seed: int, cap: int):
    problem = random_problem(seed, variables=7, edges=4 + seed % 6)
    elimination = Elimination(problem)
    elimination.run(cap, PAIR_NEIGHBOURS)
    rest, of = elimination.rest()
    assert len(rest.unary) == len(of) + 1 and minimum(rest) == minimum(problem)
    for some in product(*(range(len(u)) for u in rest.unary)):
        full = elimination.choice({v: some[i] for v, i in of.items()})
        assert problem.cost(full) == rest.cost(some)


def test_a_tree_and_a_cycle_leave_nothing():
    problem = random_problem(0, variables=6, edges=0)
    for i, j in [(0, 1), (1, 2), (2, 3), (3, 0), (3, 4), (4, 5)]:
        problem.add(i, j, np.ones((len(problem.unary[i]), len(problem.unary[j]))))
    elimination = Elimination(problem)
    elimination.run(MAX_TABLE_ENTRIES, PAIR_NEIGHBOURS)
    assert elimination.rest()[1] == {} and elimination.bound == minimum(problem)


@pytest.mark.parametrize("seed", sampled(range(30), 6))
def test_near_the_bound_solutions_are_no_worse_and_within_the_gap_the_minimum(seed: int):
    problem = random_problem(seed, variables=7, edges=12)
    relaxation = Relaxation(problem, [0] * 7)
    relaxation.run(3)
    before = relaxation.objective
    assert search_near_bound(relaxation, relaxation.margins(), 0.25, MAX_TABLE_ENTRIES) == 0.25
    assert minimum(problem) <= relaxation.objective <= before
    assert search_near_bound(relaxation, relaxation.margins(), 1, MAX_TABLE_ENTRIES) == 1
    assert isclose(relaxation.objective, minimum(problem), abs_tol=1e-9)
    assert search_near_bound(relaxation, relaxation.margins(), 1, 0) < 1e-6


def test_values_are_ruled_out_until_tables_fit():
    """A grid of 6 x 6, whose tables would have 5^7 entries; 5^5 are allowed."""
    rng = np.random.default_rng(0)
    problem = CostProblem()
    for _ in range(36):
        problem.variable(rng.integers(0, 100, 5).astype(float))
    for i in range(36):
        for j in (i + 1, i + 6):
            if j < 36 and (j != i + 1 or j % 6):
                problem.add(i, j, rng.integers(0, 20, (5, 5)).astype(float))
    assert not fits([5] * 36, problem.pairs, 5**5)
    found = solve(problem, 5**5, gap=0)
    assert isclose(found.objective, solve(problem).objective) and found.gap < 1e-9


def test_no_table_is_larger_than_the_cap(monkeypatch: pytest.MonkeyPatch):
    problem, cap = random_problem(1, variables=30, edges=200), 300
    made: list[int] = []
    add = np.add

    def counted(*operands: np.ndarray) -> np.ndarray:
        out = add(*operands)
        made.append(out.size)
        return out

    monkeypatch.setattr("shardir.search.problem.elimination.np.add", counted)
    found = eliminate(problem, cap)
    assert max(made) <= cap
    assert found.bound <= found.objective


def test_nothing_costs_nothing():
    assert solve(CostProblem()) == Solution([], 0.0, 0.0)


def ladder(rungs: int, values: int, seed: int) -> CostProblem:
    """Return a problem of a forward and a backward chain, with an edge from each op to its
    gradient."""
    rng = np.random.default_rng(seed)
    problem = CostProblem()
    for _ in range(2 * rungs):
        problem.variable(rng.integers(0, 50, values).astype(float))
    for i in range(rungs):
        pairs = [(i, 2 * rungs - 1 - i)]
        if i + 1 < rungs:
            pairs += [(i, i + 1), (2 * rungs - 1 - i, 2 * rungs - 2 - i)]
        for a, b in pairs:
            problem.add(a, b, rng.integers(0, 50, (values, values)).astype(float))
    return problem


@pytest.mark.parametrize("seed", range(3))
def test_milp_finds_the_same_minimum(seed: int):
    problem = ladder(rungs=8, values=4, seed=seed)
    assert isclose(solve(problem).objective, by_milp(problem), abs_tol=1e-6)


def by_milp(problem: CostProblem) -> float:
    """Return the minimum by an integer program: a variable of 0 or 1 for each value, and for each
    pair of values."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    starts = np.cumsum([0, *(len(u) for u in problem.unary)])
    costs = [*np.concatenate(problem.unary)]
    rows: list[dict[int, float]] = []
    ends: Any = []
    for i, u in enumerate(problem.unary):
        rows.append({int(starts[i]) + x: 1.0 for x in range(len(u))})
        ends.append(1.0)
    for (i, j), table in problem.pairs.items():
        first = len(costs)
        costs += [*table.ravel()]
        at = first + np.arange(table.size).reshape(table.shape)
        for k, lines in ((i, at), (j, at.T)):
            for x, line in enumerate(lines):
                rows.append({**{int(c): 1.0 for c in line}, int(starts[k]) + x: -1.0})
                ends.append(0.0)
    matrix = np.zeros((len(rows), len(costs)))
    for r, row in enumerate(rows):
        for c, x in row.items():
            matrix[r, c] = x
    found = milp(
        np.array(costs), integrality=np.ones(len(costs)), bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, ends, ends),
    )  # fmt: skip
    assert found.success
    return float(found.fun)


def test_two_thousand_variables_are_solved_exactly():
    problem = ladder(rungs=1000, values=12, seed=0)
    found = solve(problem, MAX_TABLE_ENTRIES)
    assert found.gap == 0 and found.objective == problem.cost(found.choice)


def layers(count: int, seed: int) -> CostProblem:
    """Return a problem of repeated blocks: the same arrays in each, a chain through them, one
    variable with an edge to each of them, and other costs at both ends."""
    rng = np.random.default_rng(seed)
    unary = [rng.integers(0, 30, 4).astype(float) for _ in range(3)]
    inner = [rng.integers(0, 20, (4, 4)).astype(float) for _ in range(3)]
    onward, shared = (rng.integers(0, 20, (4, 4)).astype(float) for _ in range(2))
    problem = CostProblem()
    common = problem.variable(rng.integers(0, 9, 4).astype(float))
    before = problem.variable(rng.integers(0, 30, 4).astype(float))
    for _ in range(count):
        a, b, c = (problem.variable(u) for u in unary)
        for (i, j), table in zip([(a, b), (b, c), (a, c)], inner, strict=True):
            problem.add(i, j, table)
        problem.add(before, a, onward)
        problem.add(common, b, shared)
        before = c
    end = problem.variable(rng.integers(0, 30, 4).astype(float))
    problem.add(before, end, onward)
    return problem


def copied(problem: CostProblem) -> CostProblem:
    """Return a copy with arrays of its own for each variable and pair, so that nothing repeats."""
    return CostProblem(
        [u.copy() for u in problem.unary], {ij: t.copy() for ij, t in problem.pairs.items()}
    )


@pytest.mark.parametrize("seed", sampled(range(20), 4))
def test_repeated_layers_are_solved_as_if_they_were_not_repeated(seed: int):
    problem = layers(3 + seed, seed)
    best = eliminate(copied(problem), MAX_TABLE_ENTRIES).objective
    assert eliminate(problem, MAX_TABLE_ENTRIES).objective == best
    for cap in (4, 16, 64):
        found, gap = solve(problem, cap), 0.01
        assert found.bound <= best * (1 + 1e-9) and best <= found.objective
        assert found.objective == problem.cost(found.choice)
        near, less = (solve(problem, cap, gap, bounds=bounds) for bounds in (True, False))
        assert less.choice == near.choice
        assert less.bound <= best * (1 + 1e-9)
        assert less.gap <= max(near.gap, gap)
    assert isclose(solve(problem, 1024).objective, best)


@pytest.mark.parametrize("seed", sampled(range(20), 4))
def test_a_relaxation_of_layers_rules_out_nothing_that_is_better(seed: int):
    problem = layers(3 + seed, seed)
    best = eliminate(copied(problem), MAX_TABLE_ENTRIES)
    relaxation = Relaxation(problem, best.choice)
    assert len(relaxation.groups) < len(problem.unary) or seed < 4
    for _ in range(4):
        relaxation.run(4)
        assert relaxation.bound() <= best.objective + 1e-9
        assert isclose(relaxation.reparametrised().cost(relaxation.choice), best.objective)
        relaxation = relaxation.restricted(relaxation.allowed(relaxation.margins()))
        assert isclose(
            eliminate(copied(relaxation.problem), MAX_TABLE_ENTRIES).objective, best.objective
        )


@pytest.mark.parametrize("seed", sampled(range(20), 4))
def test_a_solution_of_folded_layers_costs_what_it_costs_in_all_of_them(seed: int):
    problem = layers(3 + seed, seed)
    relaxation = Relaxation(problem, [0] * len(problem.unary))
    rng = np.random.default_rng(seed)
    for _ in range(3):
        folded = relaxation.folded()
        assert len(folded.unary) == len(set(relaxation.unfolded(range(len(folded.unary)))))
        for _ in range(5):
            choice = [int(rng.integers(len(u))) for u in folded.unary]
            assert isclose(folded.cost(choice), problem.cost(relaxation.unfolded(choice)))
        relaxation.run(3)


def test_the_default_gap_leads_to_the_minimum_where_a_gap_of_a_fifth_stops_before():
    """Eight variables with a table for each pair, more than tables of 27 entries hold."""
    rng = np.random.default_rng(20)
    problem = CostProblem()
    for _ in range(8):
        problem.variable(rng.integers(0, 20, 3).astype(float))
    for i in range(8):
        for j in range(i):
            problem.add(i, j, rng.integers(0, 20, (3, 3)).astype(float))
    best = minimum(problem)
    assert solve(problem, 27).objective == best
    assert solve(problem, 27, gap=0.2).objective > 1.05 * best
