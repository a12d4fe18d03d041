"""The least of a sum of costs, each of one choice or of a pair of choices.

    minimise  sum_i unary_i[x_i]  +  sum_ij table_ij[x_i, x_j]

Bucket elimination (Dechter 1999): one variable after another goes, and leaves the least that it
costs for each choice of its neighbours. The sum is exact, and the work exponential only in the
width of the graph, which programs have little of. Where the table that a variable would leave has
more than `cap` entries, its costs are minimised in several groups, each for itself (mini-buckets,
Dechter and Rish 2003): what comes out is then a bound from below, and the solution is one for
which choices were made by these bounds and improved one at a time. Either way `objective` is what
the solution costs, and no solution costs less than `bound`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import heapify, heappop, heappush
from math import inf, prod
from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
Scope = tuple[int, ...]

CAP = 1 << 24
"""Entries of the largest table: 128 MiB."""


@dataclass
class Problem:
    """Variables, each with the cost of each of its values, and tables of costs of pairs. Infinite
    costs forbid."""

    unary: list[Table] = field(default_factory=list)
    pairs: dict[tuple[int, int], Table] = field(default_factory=dict)

    def variable(self, costs: Sequence[float] | Table) -> int:
        """A new variable, by the costs of its values."""
        self.unary.append(np.asarray(costs, dtype=np.float64))
        return len(self.unary) - 1

    def add(self, i: int, j: int, table: Table) -> None:
        """Adds table[x_i, x_j] to the sum; j may be i."""
        if i == j:
            self.unary[i] = self.unary[i] + np.diagonal(table)
            return
        if i > j:
            i, j, table = j, i, table.T
        have = self.pairs.get((i, j))
        self.pairs[i, j] = table if have is None else have + table

    def cost(self, choice: Sequence[int]) -> float:
        """What a solution costs."""
        total = sum(float(u[x]) for u, x in zip(self.unary, choice, strict=True))
        return total + sum(float(t[choice[i], choice[j]]) for (i, j), t in self.pairs.items())


@dataclass(frozen=True)
class Solution:
    """The value of each variable. `objective` is infinite where none was found that is allowed."""

    choice: list[int]
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """By how much of it the objective may be above the least."""
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / abs(self.objective) if self.objective < inf else inf


@dataclass(frozen=True, eq=False)
class _Factor:
    scope: Scope
    table: Table

    def at(self, choice: Sequence[int], v: int) -> Table:
        """The costs of the values of v, all other variables being chosen."""
        return self.table[tuple(slice(None) if u == v else choice[u] for u in self.scope)]

    def spread(self, scope: Scope) -> Table:
        """The table with the dimensions of `scope`, of size 1 where it lacks the variable."""
        order = [self.scope.index(u) for u in scope if u in self.scope]
        shape = [self.table.shape[self.scope.index(u)] if u in self.scope else 1 for u in scope]
        return self.table.transpose(order).reshape(shape)


def solve(problem: Problem, cap: int = CAP) -> Solution:
    """The least, or with tables of at most `cap` entries a solution and a bound.

    The variable that leaves the smallest table goes first.
    """
    sizes = [len(u) for u in problem.unary]
    touching: list[dict[_Factor, None]] = [{} for _ in sizes]
    near: list[set[int]] = [set() for _ in sizes]

    def put(factor: _Factor) -> None:
        for u in factor.scope:
            touching[u][factor] = None
            near[u].update(factor.scope)
            near[u].discard(u)

    for i, costs in enumerate(problem.unary):
        put(_Factor((i,), costs))
    for scope, table in problem.pairs.items():
        put(_Factor(scope, table))
    weights = [_entries(near[v], sizes) for v in range(len(sizes))]
    heap = [(w, v) for v, w in enumerate(weights)]
    heapify(heap)
    gone: list[tuple[int, list[_Factor]]] = []
    left = [True] * len(sizes)
    bound, exact = 0.0, True
    while heap:
        weight, v = heappop(heap)
        if not left[v] or weight != weights[v]:
            continue
        left[v] = False
        bucket = list(touching[v])
        gone.append((v, bucket))
        for factor in bucket:
            for u in factor.scope:
                if u != v:
                    del touching[u][factor]
        for u in near[v]:
            near[u].discard(v)
        groups = list(_groups(bucket, v, sizes, cap))
        exact = exact and len(groups) == 1
        for scope, group in groups:
            total = reduce(np.add, [f.spread((*scope, v)) for f in group])
            least = total.min(axis=-1)
            if scope:
                put(_Factor(scope, least))
            else:
                bound += float(least)
        for u in near[v]:
            weights[u] = _entries(near[u], sizes)
            heappush(heap, (weights[u], u))
    choice = [0] * len(sizes)
    for v, bucket in reversed(gone):
        choice[v] = int(sum(f.at(choice, v) for f in bucket).argmin())  # type: ignore[union-attr]
    if not exact:
        _improve(problem, choice)
    objective = problem.cost(choice)
    return Solution(choice, objective, objective if exact else min(bound, objective))


def _entries(scope: set[int], sizes: list[int]) -> int:
    return prod(sizes[u] for u in scope)


def _groups(
    bucket: list[_Factor], v: int, sizes: list[int], cap: int
) -> Iterator[tuple[Scope, list[_Factor]]]:
    """The costs of a variable, those that fit into one table together, with the other variables
    of each group; one group where all do."""
    groups: list[tuple[set[int], list[_Factor]]] = []
    for factor in sorted(bucket, key=lambda f: -len(f.scope)):
        for scope, group in groups:
            if prod(sizes[u] for u in scope.union(factor.scope)) <= cap:
                scope.update(factor.scope)
                group.append(factor)
                break
        else:
            groups.append((set(factor.scope), [factor]))
    for scope, group in groups:
        yield tuple(sorted(scope - {v})), group


def _improve(problem: Problem, choice: list[int]) -> None:
    """Changes one variable at a time for the better, until that does not help."""
    near: list[list[tuple[int, Table]]] = [[] for _ in choice]
    for (i, j), table in problem.pairs.items():
        near[i].append((j, table))
        near[j].append((i, table.T))
    changed = True
    while changed:
        changed = False
        for v, unary in enumerate(problem.unary):
            costs = unary + sum(t[:, choice[u]] for u, t in near[v])
            best = int(costs.argmin())
            if costs[best] < costs[choice[v]]:
                choice[v], changed = best, True
