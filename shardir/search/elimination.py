"""The least of a sum of costs, each of one choice or of a pair of choices.

    minimise  sum_i unary_i[x_i]  +  sum_ij table_ij[x_i, x_j]

Bucket elimination (Dechter 1999): one variable after another goes, and leaves the least that it
costs for each choice of its neighbours. That is exact, and the work exponential only in the width
of the graph. Where a table would have more than `cap` entries, the variables of at most two
neighbours go first, for what they leave is again of one choice or of a pair (Scholz and Eckstein
2002). Of the others a bound (relaxation.py) rules out values, until what is left fits.

Solutions to hold the bound against come from mini-buckets (Dechter and Rish 2003): the costs of a
variable whose table would be too large are minimised in several groups, each for itself, which
gives another bound; and from elimination among as many of the values nearest to the bound as fit.
Where that does not lead to an end, the best solution is the answer, and no solution costs less than
the best bound.

The tables of layers that repeat are the same arrays, and so are the sums of the same: what was once
eliminated is not calculated again, and the time hardly grows with the number of layers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heapify, heappop, heappush
from math import inf, prod
from operator import itemgetter

import numpy as np

from shardir.search.problem import CostProblem, Table, identities, improve, same
from shardir.search.relaxation import Margins, Relaxation

Scope = tuple[int, ...]

MAX_TABLE_ENTRIES = 1 << 24
"""Entries of the largest table: 128 MiB."""

MAX_FILTER_ENTRIES = 1 << 16
"""Entries of the largest table while values are ruled out."""

STALLED_ROUNDS, MIN_PROGRESS = 3, 0.9
"""It ends where so many rounds leave more than this part of the gap."""

PAIR_NEIGHBOURS = 2
"""A variable of so many neighbours leaves a table of a pair."""

MIN_GAP_PART = 1e-6
"""The part of the gap below which no smaller one is tried to look for a solution."""

ROUNDS, NARROWINGS = 10, 16
"""How often costs are moved before values are ruled out, and how often that is done."""

DEFAULT_GAP = 1e-4
"""The gap at which the search ends."""

Say = Callable[[float, float], object]
"""Told of the objective and the bound whenever they may be better."""


def nothing(objective: float, bound: float) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Solution:
    """The value of each variable, what that costs, and what no solution costs less than."""

    choice: list[int]
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """By how much of it the objective may be above the least."""
        return 0.0 if self.objective == self.bound else 1 - self.bound / self.objective


@dataclass(eq=False, slots=True)
class _Factor:
    scope: Scope
    table: Table
    number: int
    """The same for the same costs."""

    def at(self, choice: Sequence[int], v: int) -> Table:
        """The costs of the values of v, all other variables being chosen."""
        return self.table[tuple(slice(None) if u == v else choice[u] for u in self.scope)]

    def spread(self, scope: Scope) -> Table:
        """The table with the dimensions of `scope`, of size 1 where it lacks the variable."""
        order = [self.scope.index(u) for u in scope if u in self.scope]
        shape = [self.table.shape[self.scope.index(u)] if u in self.scope else 1 for u in scope]
        return self.table.transpose(order).reshape(shape)


def solve(
    problem: CostProblem, cap: int = MAX_TABLE_ENTRIES, gap: float = DEFAULT_GAP, say: Say = nothing
) -> Solution:
    """The least; or where that takes tables of more than `cap` entries, what is known to be within
    `gap` of it, or the best that was found."""
    if fits(problem, cap):
        return eliminate(problem, cap)
    easy = Elimination(problem)
    easy.run(cap, PAIR_NEIGHBOURS)
    rest, of = easy.rest()
    found = narrowed(rest, cap, gap, say)
    choice = easy.choice({v: found.choice[i] for v, i in of.items()})
    objective = problem.cost(choice)
    return Solution(choice, objective, min(found.bound, objective))


def narrowed(problem: CostProblem, cap: int, gap: float, say: Say) -> Solution:
    """The same where the tables would be too large: values that a bound rules out go first, again
    and again."""
    allowed = [np.arange(len(u)) for u in problem.unary]
    left, bound = Relaxation(problem, [int(u.argmin()) for u in problem.unary]), -inf
    gaps: list[float] = []
    part = 1 / len(allowed)
    for _ in range(NARROWINGS):
        left.run(ROUNDS)
        rough = eliminate(left.moved(), min(cap, MAX_FILTER_ENTRIES))
        left.found(rough.choice)
        margins = left.margins()
        part = refine(left, margins, 2 * part, min(cap, MAX_FILTER_ENTRIES))
        bound = max(bound, margins.bound, rough.bound)
        say(left.objective, bound)
        gaps.append(left.objective - bound)
        stalled = len(gaps) > STALLED_ROUNDS and gaps[-1] > MIN_PROGRESS * gaps[-1 - STALLED_ROUNDS]
        if stalled or gaps[-1] <= gap * abs(left.objective):
            break
        keep = left.allowed(margins)
        allowed = [a[k] for a, k in zip(allowed, keep, strict=True)]
        left = left.only(keep)
        if fits(left.problem, cap):
            found = eliminate(left.problem, cap)
            return _of(problem, allowed, found.choice, found.bound)
    return _of(problem, allowed, left.choice, bound)


def refine(left: Relaxation, margins: Margins, part: float, cap: int) -> float:
    """Looks for a better solution among the values that are within a part of the gap of the bound,
    each by itself, and those of the best: of the first part that fits of this, its half, and so on.
    Returns that part."""
    while True:
        keep = left.allowed(margins, part)
        if part < MIN_GAP_PART or _fits([len(k) for k in keep], left.problem.pairs, cap):
            break
        part /= 2
    found = eliminate(left.problem.only(keep), cap)
    left.found([int(k[x]) for k, x in zip(keep, found.choice, strict=True)])
    return part


def _of(
    problem: CostProblem, allowed: Sequence[np.ndarray], choice: Sequence[int], bound: float
) -> Solution:
    """A solution of what is left of a problem, as one of the problem."""
    whole = [int(a[x]) for a, x in zip(allowed, choice, strict=True)]
    objective = problem.cost(whole)
    return Solution(whole, objective, min(bound, objective))


def fits(problem: CostProblem, cap: int) -> bool:
    """Whether bucket elimination makes no table of more than `cap` entries."""
    return _fits([len(u) for u in problem.unary], problem.pairs, cap)


def _fits(sizes: Sequence[int], pairs: Iterable[tuple[int, int]], cap: int) -> bool:
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in pairs:
        if sizes[i] > 1 and sizes[j] > 1:
            near[i].add(j)
            near[j].add(i)
    weights = [_entries(near[v], sizes) for v in range(len(sizes))]
    heap = [(w, v) for v, w in enumerate(weights)]
    heapify(heap)
    left = [True] * len(sizes)
    while heap:
        weight, v = heappop(heap)
        if not left[v] or weight != weights[v]:
            continue
        if weight * sizes[v] > cap:
            return False
        left[v] = False
        for u in near[v]:
            near[u] |= near[v]
            near[u] -= {u, v}
            weights[u] = _entries(near[u], sizes)
            heappush(heap, (weights[u], u))
    return True


def eliminate(problem: CostProblem, cap: int) -> Solution:
    """Bucket elimination, with mini-buckets where a table would be too large."""
    going = Elimination(problem)
    going.run(cap)
    choice = going.choice({})
    if not going.whole:
        improve(problem, problem.near(), choice)
    objective = problem.cost(choice)
    return Solution(choice, objective, objective if going.whole else min(going.bound, objective))


class Elimination:
    """Variables that go one after another. `bound` is what those that have gone cost at least,
    besides what they left to others; `whole` says that no bucket was divided."""

    def __init__(self, problem: CostProblem):
        self.sizes = sizes = [len(u) for u in problem.unary]
        self.touching: list[dict[_Factor, None]] = [{} for _ in sizes]
        self.near: list[set[int]] = [set() for _ in sizes]
        self.gone: dict[int, list[_Factor]] = {}
        self.bound, self.whole = 0.0, True
        self.numbers: dict[tuple, int] = {}
        names = identities([*problem.unary, *problem.pairs.values()])
        numbers = {i: self.numbers.setdefault(key, len(self.numbers)) for i, key in names.items()}
        for i, costs in enumerate(problem.unary):
            self.put(_Factor((i,), costs, numbers[id(costs)]))
        for ends, table in problem.pairs.items():
            scope = tuple([u for u in ends if sizes[u] > 1]) or ends[:1]
            costs = table if len(scope) == 2 else table.reshape([sizes[u] for u in scope])
            self.put(_Factor(scope, costs, numbers[id(table)]))

    def number(self, table: Table) -> int:
        return self.numbers.setdefault(same(table), len(self.numbers))

    def put(self, factor: _Factor) -> None:
        for u in factor.scope:
            self.touching[u][factor] = None
            self.near[u].update(factor.scope)
            self.near[u].discard(u)

    def run(self, cap: int, most: float = inf) -> None:
        """Eliminates all, with mini-buckets where a table would have more than `cap` entries; or,
        of at most so many neighbours, all without them. The one that leaves the smallest table goes
        first."""
        sizes, near, touching = self.sizes, self.near, self.touching
        weights = [_entries(near[v], sizes) for v in range(len(sizes))]
        heap = [(w, v) for v, w in enumerate(weights)]
        heapify(heap)
        known: dict[tuple, tuple[Table, int]] = {}
        while heap:
            weight, v = heappop(heap)
            if v in self.gone or weight != weights[v]:
                continue
            if most < inf and (len(near[v]) > most or weight * sizes[v] > cap):
                continue
            bucket = self.gone[v] = list(touching[v])
            for factor in bucket:
                for u in factor.scope:
                    if u != v:
                        del touching[u][factor]
            for u in near[v]:
                near[u].discard(v)
            whole = weight * sizes[v] <= cap
            groups = [(tuple(sorted(near[v])), bucket)] if whole else _groups(bucket, v, sizes, cap)
            self.whole = self.whole and whole
            for scope, group in groups:
                place = {u: i for i, u in enumerate((*scope, v))}
                named = [((tuple([place[u] for u in f.scope]), f.number), f) for f in group]
                named.sort(key=itemgetter(0))
                key = tuple([k for k, _ in named])
                if key not in known:
                    total = reduce(np.add, [f.spread((*scope, v)) for _, f in named])
                    least = total.min(axis=-1)
                    known[key] = least, self.number(least)
                if scope:
                    self.put(_Factor(scope, *known[key]))
                else:
                    self.bound += float(known[key][0])
            for u in near[v]:
                weights[u] = _entries(near[u], sizes)
                heappush(heap, (weights[u], u))

    def rest(self) -> tuple[CostProblem, dict[int, int]]:
        """The problem of the variables that are left, and what each of them is there; one more of a
        single value costs what those that have gone do besides."""
        of = {v: i for i, v in enumerate(v for v in range(len(self.sizes)) if v not in self.gone)}
        found, tables = CostProblem(), dict[Scope, list[Table]]()
        factors = dict.fromkeys(f for v in of for f in self.touching[v])
        for factor in sorted(factors, key=lambda f: f.number):
            tables.setdefault(factor.scope, []).append(factor.table)
        sums = {scope: reduce(found.plus, summands) for scope, summands in tables.items()}
        found.unary = [*(sums[v,] for v in of), np.array([self.bound])]
        found.pairs = {(of[i], of[j]): sums[i, j] for i, *js in sums for j in js}
        return found, of

    def choice(self, chosen: Mapping[int, int]) -> list[int]:
        """The value of each variable, for those of the ones that are left."""
        choice = [chosen.get(v, 0) for v in range(len(self.sizes))]
        for v, bucket in reversed(self.gone.items()):
            choice[v] = int(sum(f.at(choice, v) for f in bucket).argmin())  # type: ignore[union-attr]
        return choice


def _entries(scope: set[int], sizes: Sequence[int]) -> int:
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
