"""Bucket elimination: the minimum of a sum of costs, variable by variable.

    a - b - c    eliminate b: min_b (table_ab + unary_b + table_bc), a table of a and c
    a - c

Each variable is replaced by a table of its neighbours: the minimum over its values (Dechter 1999).
That is exact, and exponential only in the width of the graph. Where a table would have more than
`cap` entries, the costs of the variable are divided into groups, each minimised by itself, which
gives a bound: mini-buckets (Dechter and Rish 2003).

Each combination of tables is eliminated once. Repeated layers have the same arrays, so the time
hardly grows with their number.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heapify, heappop, heappush
from math import inf, prod
from operator import itemgetter

import numpy as np

from shardir.algebra.arrays import Table
from shardir.search.problem.problem import CostProblem, identities, identity, improve

Variables = tuple[int, ...]

MAX_CACHED = 1 << 15
"""The entries of a table that is summed up at once: 256 KiB."""


@dataclass(frozen=True)
class Solution:
    """The value of each variable, the cost of these values, and a lower bound of the minimum."""

    choice: list[int]
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """The relative difference of objective and bound."""
        return 0.0 if self.objective == self.bound else 1 - self.bound / self.objective


@dataclass(eq=False, slots=True)
class _Factor:
    variables: Variables
    table: Table
    number: int
    """Equal for factors with the same table."""

    def at(self, choice: Sequence[int], v: int) -> Table:
        """Return the costs of the values of v, for a choice of all other variables."""
        return self.table[tuple([slice(None) if u == v else choice[u] for u in self.variables])]

    def broadcast(self, variables: Variables) -> Table:
        """Return the table with a dimension for each of `variables`, of size 1 for the factor's
        missing ones."""
        mine = self.variables
        order = [mine.index(u) for u in variables if u in mine]
        shape = [self.table.shape[mine.index(u)] if u in mine else 1 for u in variables]
        return self.table.transpose(order).reshape(shape)


def eliminate(problem: CostProblem, cap: int) -> Solution:
    """Return the minimum; with mini-buckets, a solution and a bound."""
    elimination = Elimination(problem)
    elimination.run(cap)
    choice = elimination.choice({})
    if not elimination.exact:
        improve(problem, problem.neighbours(), choice)
    objective = problem.cost(choice)
    bound = objective if elimination.exact else min(elimination.bound, objective)
    return Solution(choice, objective, bound)


def fits(sizes: Sequence[int], pairs: Iterable[tuple[int, int]], cap: int) -> bool:
    """Whether bucket elimination makes no table of more than `cap` entries.

    Args:
        sizes: the number of values of each variable.
        pairs: the variables that share tables.
    """
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in pairs:
        if sizes[i] > 1 and sizes[j] > 1:
            near[i].add(j)
            near[j].add(i)
    weights = [_entries(near[v], sizes) for v in range(len(sizes))]
    heap = [(w, v) for v, w in enumerate(weights)]
    heapify(heap)
    remains = [True] * len(sizes)
    while heap:
        weight, v = heappop(heap)
        if not remains[v] or weight != weights[v]:
            continue
        if weight * sizes[v] > cap:
            return False
        remains[v] = False
        for u in near[v]:
            near[u] |= near[v]
            near[u] -= {u, v}
            weights[u] = _entries(near[u], sizes)
            heappush(heap, (weights[u], u))
    return True


class Elimination:
    """The elimination of variables, one after another.

    `bound` is a lower bound of the eliminated costs that no table of other variables has; `exact`:
    no bucket was divided.
    """

    def __init__(self, problem: CostProblem):
        self.sizes = sizes = [len(u) for u in problem.unary]
        self.factors: list[dict[_Factor, None]] = [{} for _ in sizes]
        self.near: list[set[int]] = [set() for _ in sizes]
        self.eliminated: dict[int, list[_Factor]] = {}
        self.bound, self.exact = 0.0, True
        self.numbers: dict[tuple, int] = {}
        names = identities([*problem.unary, *problem.pairs.values()])
        numbers = {i: self.numbers.setdefault(key, len(self.numbers)) for i, key in names.items()}
        for i, costs in enumerate(problem.unary):
            self.put(_Factor((i,), costs, numbers[id(costs)]))
        for ends, table in problem.pairs.items():
            variables = tuple([u for u in ends if sizes[u] > 1]) or ends[:1]
            costs = table if len(variables) == 2 else table.reshape([sizes[u] for u in variables])
            self.put(_Factor(variables, costs, numbers[id(table)]))

    def put(self, factor: _Factor) -> None:
        for u in factor.variables:
            self.factors[u][factor] = None
            self.near[u].update(factor.variables)
            self.near[u].discard(u)

    def run(self, cap: int, max_neighbours: float = inf) -> None:
        """Eliminate all variables, with mini-buckets where a table would have more than `cap`
        entries; or, without mini-buckets, all of at most `max_neighbours`. The variable that leaves
        the smallest table comes first."""
        sizes, near, factors = self.sizes, self.near, self.factors
        weights = [_entries(near[v], sizes) for v in range(len(sizes))]
        heap = [(w, v) for v, w in enumerate(weights)]
        heapify(heap)
        found: dict[tuple, tuple[Table, int]] = {}
        while heap:
            weight, v = heappop(heap)
            if v in self.eliminated or weight != weights[v]:
                continue
            if max_neighbours < inf and (len(near[v]) > max_neighbours or weight * sizes[v] > cap):
                continue
            bucket = self.eliminated[v] = list(factors[v])
            for factor in bucket:
                for u in factor.variables:
                    if u != v:
                        del factors[u][factor]
            for u in near[v]:
                near[u].discard(v)
            exact = weight * sizes[v] <= cap
            groups = [(tuple(sorted(near[v])), bucket)] if exact else _groups(bucket, v, sizes, cap)
            self.exact = self.exact and exact
            for others, group in groups:
                position = {u: i for i, u in enumerate((*others, v))}
                keyed = [((tuple([position[u] for u in f.variables]), f.number), f) for f in group]
                keyed.sort(key=itemgetter(0))
                key = tuple([k for k, _ in keyed])
                if key not in found:
                    minimum = _minimum([f.broadcast((*others, v)) for _, f in keyed])
                    name = identity(minimum)
                    found[key] = minimum, self.numbers.setdefault(name, len(self.numbers))
                if others:
                    self.put(_Factor(others, *found[key]))
                else:
                    self.bound += float(found[key][0])
            for u in near[v]:
                weights[u] = _entries(near[u], sizes)
                heappush(heap, (weights[u], u))

    def rest(self) -> tuple[CostProblem, dict[int, int]]:
        """Return the problem of the other variables, and the number of each of them in it. One more
        variable, of one value, has the cost `bound`."""
        of = {
            v: i
            for i, v in enumerate(v for v in range(len(self.sizes)) if v not in self.eliminated)
        }
        found, tables = CostProblem(), dict[Variables, list[Table]]()
        factors = dict.fromkeys(f for v in of for f in self.factors[v])
        for factor in sorted(factors, key=lambda f: f.number):
            tables.setdefault(factor.variables, []).append(factor.table)
        sums = {variables: reduce(found.plus, summands) for variables, summands in tables.items()}
        found.unary = [*(sums[v,] for v in of), np.array([self.bound])]
        found.pairs = {(of[i], of[j]): sums[i, j] for i, *js in sums for j in js}
        return found, of

    def choice(self, chosen: Mapping[int, int]) -> list[int]:
        """Return the best value of each variable, for the values `chosen` of the other ones."""
        choice = [chosen.get(v, 0) for v in range(len(self.sizes))]
        for v, bucket in reversed(self.eliminated.items()):
            choice[v] = int(reduce(np.add, [f.at(choice, v) for f in bucket]).argmin())
        return choice


def _minimum(tables: Sequence[Table]) -> Table:
    """Return the minimum of a sum of tables over its last dimension: in parts along the first one,
    each small enough for the processor's cache."""
    shape = tuple(map(max, *[t.shape for t in tables])) if len(tables) > 1 else tables[0].shape
    if len(shape) == 1 or prod(shape) <= MAX_CACHED:
        return np.minimum.reduce(reduce(np.add, tables), axis=-1)
    found, rows = np.empty(shape[:-1]), max(MAX_CACHED // prod(shape[1:]), 1)
    for i in range(0, shape[0], rows):
        parts = [t if len(t) == 1 else t[i : i + rows] for t in tables]
        np.minimum.reduce(reduce(np.add, parts), axis=-1, out=found[i : i + rows])
    return found


def _entries(variables: set[int], sizes: Sequence[int]) -> int:
    return prod([sizes[u] for u in variables])


def _groups(
    bucket: list[_Factor], v: int, sizes: list[int], cap: int
) -> Iterator[tuple[Variables, list[_Factor]]]:
    """Yield groups of a variable's factors, each of which fits into one table, with the group's
    other variables."""
    groups: list[tuple[set[int], list[_Factor]]] = []
    for factor in sorted(bucket, key=lambda f: -len(f.variables)):
        for variables, group in groups:
            if _entries(variables.union(factor.variables), sizes) <= cap:
                variables.update(factor.variables)
                group.append(factor)
                break
        else:
            groups.append((set(factor.variables), [factor]))
    for variables, group in groups:
        yield tuple(sorted(variables - {v})), group
