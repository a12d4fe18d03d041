"""The least of a sum of costs, each of one choice or of a pair of choices.

    minimise  sum_i unary_i[x_i]  +  sum_ij table_ij[x_i, x_j]

Bucket elimination (Dechter 1999): one variable after another goes, and leaves the least that it
costs for each choice of its neighbours. That is exact, and the work exponential only in the width
of the graph. Where a table would have more than `cap` entries, a bound (relaxation.py) rules out
values first, until what is left fits. A solution to hold the bound against comes from mini-buckets
(Dechter and Rish 2003): the costs of a variable whose table would be too large are minimised in
several groups, each for itself, which gives another bound. Where that does not lead to an end
either, the best solution is the answer, and no solution costs less than the best bound.

The tables of layers that repeat are the same arrays, and so are the sums of the same: what was once
eliminated is not calculated again, and the time hardly grows with the number of layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heapify, heappop, heappush
from math import inf, prod

import numpy as np

from shardir.search.problem import Problem, Table, improve, same
from shardir.search.relaxation import Relaxation

Scope = tuple[int, ...]

CAP = 1 << 24
"""Entries of the largest table: 128 MiB."""

ROUGH = 1 << 18
"""Entries of the largest table while values are ruled out."""

STALLED, LESS = 3, 0.9
"""It ends where so many rounds leave more than this part of the gap."""

ROUNDS, NARROWINGS = 10, 16
"""How often costs are moved before values are ruled out, and how often that is done."""

GAP = 1e-4
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


def solve(problem: Problem, cap: int = CAP, gap: float = GAP, say: Say = nothing) -> Solution:
    """The least; or where that takes tables of more than `cap` entries, what is known to be within
    `gap` of it, or the best that was found."""
    return eliminate(problem, cap) if fits(problem, cap) else narrowed(problem, cap, gap, say)


def narrowed(problem: Problem, cap: int, gap: float, say: Say) -> Solution:
    """The same where the tables would be too large: values that a bound rules out go first, again
    and again."""
    allowed = [np.arange(len(u)) for u in problem.unary]
    left, bound = Relaxation(problem, [int(u.argmin()) for u in problem.unary]), -inf
    gaps: list[float] = []
    for _ in range(NARROWINGS):
        left.run(ROUNDS)
        rough = eliminate(left.moved(), min(cap, ROUGH))
        left.found(rough.choice)
        bound = max(bound, left.bound(), rough.bound)
        say(left.objective, bound)
        gaps.append(left.objective - bound)
        stalled = len(gaps) > STALLED and gaps[-1] > LESS * gaps[-1 - STALLED]
        if stalled or gaps[-1] <= gap * abs(left.objective):
            break
        keep = left.allowed()
        allowed = [a[k] for a, k in zip(allowed, keep, strict=True)]
        left = left.only(keep)
        if fits(left.problem, cap):
            found = eliminate(left.problem, cap)
            return _of(problem, allowed, found.choice, found.bound)
    return _of(problem, allowed, left.choice, bound)


def _of(
    problem: Problem, allowed: Sequence[np.ndarray], choice: Sequence[int], bound: float
) -> Solution:
    """A solution of what is left of a problem, as one of the problem."""
    whole = [int(a[x]) for a, x in zip(allowed, choice, strict=True)]
    objective = problem.cost(whole)
    return Solution(whole, objective, min(bound, objective))


def fits(problem: Problem, cap: int) -> bool:
    """Whether bucket elimination makes no table of more than `cap` entries."""
    sizes = [len(u) for u in problem.unary]
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in problem.pairs:
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


def eliminate(problem: Problem, cap: int) -> Solution:
    """Bucket elimination, with mini-buckets where a table would be too large; the variable that
    leaves the smallest table goes first."""
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
    for (i, j), table in problem.pairs.items():
        if sizes[i] == 1:
            put(_Factor((j,), table[0]))
        elif sizes[j] == 1:
            put(_Factor((i,), table[:, 0]))
        else:
            put(_Factor((i, j), table))
    weights = [_entries(near[v], sizes) for v in range(len(sizes))]
    heap = [(w, v) for v, w in enumerate(weights)]
    heapify(heap)
    gone: list[tuple[int, list[_Factor]]] = []
    left = [True] * len(sizes)
    bound, whole = 0.0, True
    known: dict[tuple, Table] = {}
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
        whole = whole and len(groups) == 1
        for scope, group in groups:
            place = {u: i for i, u in enumerate((*scope, v))}
            group.sort(key=lambda f: (tuple(place[u] for u in f.scope), same(f.table)))
            key = tuple((tuple(place[u] for u in f.scope), same(f.table)) for f in group)
            if key not in known:
                total = reduce(np.add, [f.spread((*scope, v)) for f in group])
                known[key] = total.min(axis=-1)
            least = known[key]
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
    if not whole:
        improve(problem, choice)
    objective = problem.cost(choice)
    return Solution(choice, objective, objective if whole else min(bound, objective))


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
