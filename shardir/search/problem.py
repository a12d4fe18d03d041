"""The sum of costs that a search makes least: variables, and tables of costs of pairs.

    minimise  sum_i unary_i[x_i]  +  sum_ij table_ij[x_i, x_j]

Repeated blocks, the layers of a network, have the same arrays again and again: not equal ones, the
same objects. Everything that solves a problem does once what concerns the same arrays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]


Ends = list[tuple[int, Table]]
"""The variables that share tables with one, each with the table, the one's own values first."""


def same(table: Table) -> tuple:
    """Alike for views of the same numbers, as long as they live."""
    return table.__array_interface__["data"][0], table.shape, table.strides


def identities(tables: Iterable[Table]) -> dict[int, tuple]:
    """Return the identity of each array, by its id: computed once for each object."""
    return {i: same(t) for i, t in {id(t): t for t in tables}.items()}


@dataclass
class CostProblem:
    """Variables, each with the cost of each of its values, and tables of costs of pairs. All costs
    are finite."""

    unary: list[Table] = field(default_factory=list)
    pairs: dict[tuple[int, int], Table] = field(default_factory=dict)
    _sums: dict[tuple, tuple[Table, ...]] = field(default_factory=dict)

    def variable(self, costs: Sequence[float] | Table) -> int:
        """A new variable, by the costs of its values."""
        self.unary.append(np.asarray(costs, dtype=np.float64))
        return len(self.unary) - 1

    def add(self, i: int, j: int, table: Table) -> None:
        """Adds table[x_i, x_j] to the sum; j may be i."""
        if i == j:
            self.unary[i] = self.plus(self.unary[i], np.diagonal(table))
            return
        if i > j:
            i, j, table = j, i, table.T
        have = self.pairs.get((i, j))
        self.pairs[i, j] = table if have is None else self.plus(have, table)

    def plus(self, a: Table, b: Table) -> Table:
        """The same array for the same summands."""
        key = same(a), same(b)
        if key not in self._sums:
            self._sums[key] = a + b, a, b  # which live on, so that the key is theirs
        return self._sums[key][0]

    def only(self, allowed: Sequence[np.ndarray]) -> "CostProblem":
        """The same with these values of each variable alone."""
        known: dict[tuple, Table] = {}
        keys = [k.tobytes() for k in allowed]
        names = identities([*self.unary, *self.pairs.values()])
        left = CostProblem()
        for u, k, values in zip(self.unary, allowed, keys, strict=True):
            key = names[id(u)], values
            if key not in known:
                known[key] = u[k]
            left.unary.append(known[key])
        for (i, j), t in self.pairs.items():
            key = names[id(t)], keys[i], keys[j]
            if key not in known:
                known[key] = t[np.ix_(allowed[i], allowed[j])]
            left.pairs[i, j] = known[key]
        return left

    def cost(self, choice: Sequence[int]) -> float:
        """What a solution costs."""
        total = sum(float(u[x]) for u, x in zip(self.unary, choice, strict=True))
        return total + sum(float(t[choice[i], choice[j]]) for (i, j), t in self.pairs.items())

    def near(self) -> "list[Ends]":
        """Of each variable those that it shares tables with, its own values first in each."""
        found: list[list[tuple[int, Table]]] = [[] for _ in self.unary]
        turned: dict[int, Table] = {}
        for (i, j), table in self.pairs.items():
            if id(table) not in turned:
                turned[id(table)] = table.T
            found[i].append((j, table))
            found[j].append((i, turned[id(table)]))
        return found


def alike(problem: CostProblem, ends_of: Sequence[Ends], rounds: int) -> list[list[int]]:
    """After each round a number for each variable, the same for those that look the same: by their
    own costs and tables, then by what is at the other ends too, and so on (color refinement)."""
    names = identities(t for ends in ends_of for _, t in ends)
    near = [[(u, names[id(t)]) for u, t in ends] for ends in ends_of]
    colors: list[Any] = [same(u) for u in problem.unary]
    found: list[list[int]] = []
    for _ in range(rounds + 1):
        seen = [
            (c, tuple(sorted((t, found[-1][u] if found else 0) for u, t in ends)))
            for c, ends in zip(colors, near, strict=True)
        ]
        numbers = {c: i for i, c in enumerate(dict.fromkeys(seen))}
        colors = [numbers[c] for c in seen]
        found.append(colors)
    return found


def improve(problem: CostProblem, near: Sequence[Ends], choice: list[int]) -> None:
    """Changes one variable at a time for the better, until that does not help.

    Args:
        near: the problem's, which several improvements share.
    """
    changed = set(range(len(choice)))
    while changed:
        for v in sorted(changed):
            changed.discard(v)
            costs = problem.unary[v] + sum(t[:, choice[u]] for u, t in near[v])
            best = int(costs.argmin())
            if costs[best] < costs[choice[v]]:
                choice[v] = best
                changed.update(u for u, _ in near[v])
