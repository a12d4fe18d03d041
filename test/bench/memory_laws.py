"""The law of memory: plans that keep to a limit, against a mixed-integer linear program.

The sum of costs that the search minimises, and its live bytes, are linear in a 0 or 1 for each
value of a variable, and in one for each pair of values in a table:

    minimise    the costs of the chosen values and pairs
    subject to  one value of each variable, pairs that agree with the values, and at each op at
                most `limit` live bytes

HiGHS solves it without anything of the search's own. The claims:

    bound <= MILP               no solution that keeps to the limit is below the search's bound
    objective <= 1.01 MILP      the search finds one that costs at most a hundredth more
"""

from collections.abc import Sequence
from math import inf
from random import Random

import numpy as np
from scipy.optimize import Bounds, milp
from scipy.sparse import coo_matrix

from bench.program_laws import ratio
from shardir import compile
from shardir.analysis.functions import mesh_of
from shardir.rewriting.composites import expand
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import resolve_markers
from shardir.search.graph.candidates import CandidateSource
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.graph.graph_bytes import live_bytes
from shardir.search.graph.latency_shares import LatencyShares
from shardir.search.graph.value_layouts import tied_values
from shardir.search.problem.memory import LiveBytes, live, ops_of
from shardir.search.problem.memory_limit import solve_within
from shardir.search.problem.problem import CostProblem
from shardir.search.problem.solver import solve

BOUND, OBJECTIVE = "bound <= MILP", "objective <= 1.01 MILP"

PARTS = 0.4, 0.98
"""The limits, as parts of the live bytes of the fastest plan."""

GAP = 2e-3
"""The gap at which the search stops."""

SLACK = 1.01
"""The cost of a plan over that of the best one, at most."""

SECONDS = 60.0
"""The time of HiGHS for one problem; then its best solution counts."""


class Linear:
    """Rows of a linear program over the values and pairs of a problem.

    The columns are the values of all variables, then the pairs of all tables.
    """

    def __init__(self, problem: CostProblem, held: Sequence[LiveBytes]):
        self.first = np.cumsum([0, *map(len, problem.unary)])
        tables = dict(problem.pairs)
        for h in held:
            if len(h.variables) == 2:
                i, j = sorted(h.variables)
                tables.setdefault((i, j), np.zeros((len(problem.unary[i]), len(problem.unary[j]))))
        at = int(self.first[-1])
        self.pair: dict[tuple[int, int], int] = {}
        costs = list(problem.unary)
        for ends, table in tables.items():
            self.pair[ends] = at
            at += table.size
            costs.append(table.ravel())
        self.costs = np.concatenate(costs)
        self.shapes = {ends: t.shape for ends, t in tables.items()}
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []

    def columns(self, variables: Sequence[int]) -> np.ndarray:
        """Return the columns of a variable's values, or of the pairs of two, as a table."""
        if len(variables) == 1:
            (v,) = variables
            return np.arange(self.first[v], self.first[v + 1])
        i, j = variables
        if i > j:
            return self.columns((j, i)).T
        shape = self.shapes[i, j]
        return self.pair[i, j] + np.arange(shape[0] * shape[1]).reshape(shape)


def minimum(problem: CostProblem, held: Sequence[LiveBytes], limit: int) -> list[int] | None:
    """Return the best solution within a limit that HiGHS finds; None if it finds none in time."""
    linear = Linear(problem, held)
    n = len(linear.costs)
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    low: list[float] = []
    high: list[float] = []

    def row(at: np.ndarray, factors: np.ndarray, minimum: float, maximum: float) -> None:
        rows.extend([len(low)] * at.size)
        columns.extend(at.ravel())
        entries.extend(factors.ravel())
        low.append(minimum)
        high.append(maximum)

    for v in range(len(problem.unary)):
        at = linear.columns((v,))
        row(at, np.ones(len(at)), 1.0, 1.0)
    for i, j in linear.pair:
        table = linear.columns((i, j))
        for v, pairs in ((i, table), (j, table.T)):
            for value, at in zip(linear.columns((v,)), pairs, strict=True):
                row(np.append(at, value), np.append(np.ones(len(at)), -1.0), 0.0, 0.0)
    used = np.zeros((ops_of(held) + 1, n))
    for h in held:
        at = linear.columns(h.variables).ravel()
        np.add.at(used[h.span.start + 1], at, h.bytes.ravel() / limit)
        np.add.at(used[h.span.end + 2], at, -h.bytes.ravel() / limit)
    for each in dict.fromkeys(map(bytes, np.cumsum(used, axis=0)[:-1].round(12))):
        factors = np.frombuffer(each)
        at = np.flatnonzero(factors)
        row(at, factors[at], -np.inf, 1.0)
    matrix = coo_matrix((entries, (rows, columns)), shape=(len(low), n))
    is_integer = np.zeros(n)
    is_integer[: linear.first[-1]] = 1
    scale = np.abs(linear.costs).max() or 1.0
    found = milp(
        linear.costs / scale, integrality=is_integer, bounds=Bounds(0, 1),
        constraints=(matrix.tocsr(), low, high),
        options={"time_limit": SECONDS, "mip_rel_gap": 1e-4},
    )  # fmt: skip
    if found.x is None:
        return None
    return [int(found.x[linear.columns((v,))].argmax()) for v in range(len(problem.unary))]


def claims(text: str, random: Random) -> dict[str, float]:
    """Return the ratio of each claim for a program and a limit of memory below its fastest plan's
    need; none if HiGHS finds no solution in time."""
    module = compile(text, "inline-calls,distributed-autodiff").module
    ((f, block),) = bodies(module)
    mesh = mesh_of(f, module)
    assert mesh is not None
    ties = tied_values(f, block)
    resolve_markers(block, None)
    expand(block, None)
    graph = CostGraph(block, CandidateSource(mesh), ties, counts_memory=True)
    problem, held = graph.problem_with(LatencyShares(1.0)), live_bytes(graph)
    need = float(live(held, solve(problem).choice).max())
    limit = int(need * random.uniform(*PARTS))
    best = minimum(problem, held, limit)
    if best is None:
        return {}
    cost = problem.cost(best)
    found = solve_within(problem, held, limit, solve, GAP)
    if live(held, found.choice).max() > limit:
        return {OBJECTIVE: inf}
    return {BOUND: ratio(found.bound, cost), OBJECTIVE: ratio(found.objective, SLACK * cost)}
