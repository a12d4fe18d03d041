"""A bound of a problem's least cost, and what it rules out.

Costs are moved between a variable and the tables that it is in, which changes no solution's cost,
so that the sum of the least entries of all grows: one variable after another collects the least
costs of its tables and deals them out again to those that come later (sequential reweighted
message passing, Kolmogorov 2006 and 2015). That sum is the bound. A value is ruled out where the
bound with it is above what a known solution costs.
"""

from dataclasses import dataclass

import numpy as np

from shardir.search.problem import Problem, Table, improve

LESS = 1 + 1e-9
"""What is above by rounding alone is not above."""


@dataclass
class _Edge:
    """A table between two variables, and what it gave to each of them."""

    ends: tuple[int, int]
    tables: tuple[Table, Table]
    given: list[Table]

    def least(self, side: int) -> Table:
        """For each value of the variable on a side, the least of the table, other gifts aside."""
        return (self.tables[side] - self.given[1 - side]).min(axis=1)


class Relaxation:
    """The bound of a problem, and the best solution that is known."""

    def __init__(self, problem: Problem, choice: list[int] | None = None):
        self.problem = problem
        self.edges = [
            _Edge(ends, (t, t.T), [np.zeros(t.shape[0]), np.zeros(t.shape[1])])
            for ends, t in problem.pairs.items()
        ]
        self.near: list[list[tuple[_Edge, int]]] = [[] for _ in problem.unary]
        for e in self.edges:
            for side in (0, 1):
                self.near[e.ends[side]].append((e, side))
        self.choice = choice if choice is not None else [int(u.argmin()) for u in problem.unary]
        improve(problem, self.choice)
        self.objective = problem.cost(self.choice)

    def own(self, v: int) -> Table:
        """The costs of a variable's values, with what its tables gave to it."""
        total = self.problem.unary[v].copy()
        for e, side in self.near[v]:
            total += e.given[side]
        return total

    def run(self, rounds: int) -> None:
        """Rounds of collecting and dealing out, forwards and backwards; after each a solution."""
        n = len(self.near)
        for _ in range(rounds):
            self._pass(range(n), 1, None)
            choice = [0] * n
            self._pass(range(n - 1, -1, -1), -1, choice)
            improve(self.problem, choice)
            self.found(choice)

    def _pass(self, order: range, ahead: int, choice: list[int] | None) -> None:
        for v in order:
            near = self.near[v]
            for e, side in near:
                e.given[side] = e.least(side)
            total = self.own(v)
            later = [(e, s) for e, s in near if (e.ends[1 - s] - v) * ahead > 0]
            if choice is not None:
                costs = self.problem.unary[v].copy()
                for e, side in near:
                    u = e.ends[1 - side]
                    costs += e.given[side] if (u - v) * ahead > 0 else e.tables[side][:, choice[u]]
                choice[v] = int(costs.argmin())
            share = total / max(len(later), len(near) - len(later), 1)
            for e, side in later:
                e.given[side] = e.given[side] - share

    def moved(self) -> Problem:
        """The problem with the costs where they are now: its solutions cost the same, and bounds
        of parts of it add up to more."""
        return Problem(
            [self.own(v) for v in range(len(self.near))],
            {e.ends: e.tables[0] - e.given[0][:, None] - e.given[1] for e in self.edges},
        )

    def found(self, choice: list[int]) -> None:
        """Keeps a solution if it is the best so far."""
        if (cost := self.problem.cost(choice)) < self.objective:
            self.choice, self.objective = choice, cost

    def bound(self) -> float:
        """What no solution costs less than."""
        tables = sum(float((e.least(0) - e.given[0]).min()) for e in self.edges)
        return tables + sum(float(self.own(v).min()) for v in range(len(self.near)))

    def allowed(self) -> list[np.ndarray]:
        """For each variable the values with which a better solution may exist, and its own."""
        bound, found = self.bound(), []
        for v, near in enumerate(self.near):
            own = self.own(v)
            without, total = float(own.min()), own.copy()
            for e, side in near:
                least = e.least(side) - e.given[side]
                without += float(least.min())
                total += least
            keep = bound - without + total <= self.objective * LESS
            keep[self.choice[v]] = True
            found.append(np.flatnonzero(keep))
        return found
