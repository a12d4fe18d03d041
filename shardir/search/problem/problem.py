"""The sum of costs that the search minimises: variables, and tables of costs of pairs.

    minimise  sum_i unary_i[x_i]  +  sum_ij table_ij[x_i, x_j]

Equal arrays are one object, such as those of repeated layers, and of the steps of a recurrence,
which read other parts of a value. All solvers do their work once for each array.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from shardir.algebra.arrays import Table

Neighbours = list[tuple[int, Table]]
"""The variables that share a table with one, each with the table, rows for the one's values."""


def identity(table: Table) -> tuple:
    """Return a key that views of the same memory share, as long as it is allocated."""
    return table.__array_interface__["data"][0], table.shape, table.strides


def identities(tables: Iterable[Table]) -> dict[int, tuple]:
    """Return the identity of each array, by its id: computed once for each object."""
    return {i: identity(t) for i, t in {id(t): t for t in tables}.items()}


@dataclass
class CostProblem:
    """Variables, each with the cost of each of its values, and tables of costs of pairs. All costs
    are finite."""

    unary: list[Table] = field(default_factory=list)
    pairs: dict[tuple[int, int], Table] = field(default_factory=dict)
    _sums: dict[tuple, tuple[Table, ...]] = field(default_factory=dict)
    _named: dict[tuple, tuple[Table, Table]] = field(default_factory=dict)
    _equal: dict[tuple, Table] = field(default_factory=dict)

    def variable(self, costs: Sequence[float] | Table) -> int:
        """Add a variable, by the costs of its values, and return its number."""
        self.unary.append(self._shared(np.asarray(costs, dtype=np.float64)))
        return len(self.unary) - 1

    def add(self, i: int, j: int, table: Table) -> None:
        """Add table[x_i, x_j] to the sum; j may be i."""
        if i == j:
            self.unary[i] = self.plus(self.unary[i], np.diagonal(table))
            return
        if i > j:
            i, j, table = j, i, table.T
        table = self._shared(table)
        have = self.pairs.get((i, j))
        self.pairs[i, j] = table if have is None else self.plus(have, table)

    def plus(self, a: Table, b: Table) -> Table:
        """Return a + b."""
        key = identity(a), identity(b)
        if key not in self._sums:
            total = self._shared(a + b)
            self._sums[key] = total, a, b  # the summands too, so that no other gets their memory
        return self._sums[key][0]

    def _shared(self, table: Table) -> Table:
        """Return the first array with the entries of a table."""
        key = identity(table)
        if key not in self._named:
            entries = table.shape, sha256(table.tobytes()).digest()
            self._named[key] = self._equal.setdefault(entries, table), table
        return self._named[key][0]

    def copy(self) -> "CostProblem":
        """Return a problem to which more costs may be added, with the same tables."""
        return CostProblem([*self.unary], {**self.pairs})

    def restricted(self, allowed: Sequence[np.ndarray]) -> "CostProblem":
        """Return the problem with the allowed values of each variable only."""
        found: dict[tuple, Table] = {}
        keys = [k.tobytes() for k in allowed]
        names = identities([*self.unary, *self.pairs.values()])
        rest = CostProblem()
        for u, k, values in zip(self.unary, allowed, keys, strict=True):
            key = names[id(u)], values
            if key not in found:
                found[key] = u[k]
            rest.unary.append(found[key])
        for (i, j), t in self.pairs.items():
            key = names[id(t)], keys[i], keys[j]
            if key not in found:
                found[key] = t[np.ix_(allowed[i], allowed[j])]
            rest.pairs[i, j] = found[key]
        return rest

    def cost(self, choice: Sequence[int]) -> float:
        """Return the cost of a solution."""
        total = sum(float(u[x]) for u, x in zip(self.unary, choice, strict=True))
        return total + sum(float(t[choice[i], choice[j]]) for (i, j), t in self.pairs.items())

    def neighbours(self) -> list[Neighbours]:
        """Return the neighbours of each variable."""
        found: list[Neighbours] = [[] for _ in self.unary]
        transposed: dict[int, Table] = {}
        for (i, j), table in self.pairs.items():
            if id(table) not in transposed:
                transposed[id(table)] = table.T
            found[i].append((j, table))
            found[j].append((i, transposed[id(table)]))
        return found


def colours(problem: CostProblem, neighbours: Sequence[Neighbours], rounds: int) -> list[list[int]]:
    """Return a colour for each variable after each round of colour refinement: equal for variables
    with the same costs and tables, then with neighbours of the same colours too, and so on."""
    names = identities(t for ends in neighbours for _, t in ends)
    near = [[(u, names[id(t)]) for u, t in ends] for ends in neighbours]
    now: list[Any] = [identity(u) for u in problem.unary]
    found: list[list[int]] = []
    for _ in range(rounds + 1):
        refined = [
            (c, tuple(sorted((t, found[-1][u] if found else 0) for u, t in ends)))
            for c, ends in zip(now, near, strict=True)
        ]
        numbers = {c: i for i, c in enumerate(dict.fromkeys(refined))}
        now = [numbers[c] for c in refined]
        found.append(now)
    return found


def improve(problem: CostProblem, neighbours: Sequence[Neighbours], choice: list[int]) -> None:
    """Change one variable at a time to its cheapest value, until no change makes the solution
    cheaper."""
    changed = set(range(len(choice)))
    while changed:
        for v in sorted(changed):
            changed.discard(v)
            costs = problem.unary[v] + sum([t[:, choice[u]] for u, t in neighbours[v]])
            best = int(costs.argmin())
            if costs[best] < costs[choice[v]]:
                choice[v] = best
                changed.update(u for u, _ in neighbours[v])
