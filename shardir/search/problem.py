"""The sum of costs that a search makes least: variables, and tables of costs of pairs.

minimise  sum_i unary_i[x_i]  +  sum_ij table_ij[x_i, x_j]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Problem:
    """Variables, each with the cost of each of its values, and tables of costs of pairs. All costs
    are finite."""

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

    def only(self, allowed: Sequence[np.ndarray]) -> "Problem":
        """The same with these values of each variable alone."""
        return Problem(
            [u[k] for u, k in zip(self.unary, allowed, strict=True)],
            {(i, j): t[np.ix_(allowed[i], allowed[j])] for (i, j), t in self.pairs.items()},
        )

    def cost(self, choice: Sequence[int]) -> float:
        """What a solution costs."""
        total = sum(float(u[x]) for u, x in zip(self.unary, choice, strict=True))
        return total + sum(float(t[choice[i], choice[j]]) for (i, j), t in self.pairs.items())


def improve(problem: Problem, choice: list[int]) -> None:
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
