"""The cheapest solution that keeps to a device's memory.

With a price for each live byte at some ops the problem has the same form as without a limit
(Lagrange multipliers; Everett 1963), and its lower bound, less the price of the limit, is a bound
for all solutions that keep to the limit.

1. The ops are those at which solutions had their largest peaks over the limit. The prices are those
   at which no mix of the solutions known so far is cheaper (prices.py); the solution for them joins
   the known ones (Kelley's cutting planes, 1960; Dantzig and Wolfe's columns, 1960). When one comes
   up again, prices give no better bound.
2. The solution for a price may be over the limit, or far below it. So each is changed until it
   keeps to the limit, and as long as it gets cheaper (adjust.py); not those of large problems.
3. Where the best solution is not near the bound, and the problem is small, its solutions are
   divided into two parts: a variable has one value, or one of the others. Of those that differ
   between the solutions of the cheapest mix it is the one whose bytes differ most in price. Each
   part has prices and a bound of its own; the part with the lowest bound is divided next (branch
   and bound).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Table
from shardir.search.problem.adjust import Adjuster
from shardir.search.problem.elimination import Solution
from shardir.search.problem.memory import LiveBytes, live, ops_of, priced
from shardir.search.problem.prices import prices
from shardir.search.problem.problem import CostProblem

MAX_PRICED_SOLUTIONS = 16
"""How many problems with prices are solved for all solutions, at most."""

PART_SOLUTIONS = 4
"""How many problems with prices are solved for a part of them, at most."""

MAX_PEAKS = 8
"""At how many ops a solution that is over the limit adds prices, at most: redistributions of one op
are at ops of their own."""

MAX_ADJUSTED = 2500
"""The variables of a problem whose solutions are adjusted, at most."""

FEW_PRICED_SOLUTIONS = 5
"""How many problems with prices are solved for larger ones, at most."""

MAX_PART_ENTRIES = 1 << 20
"""The entries of the tables of the problems that are solved for parts, in all."""

MAX_PART_SOLUTIONS = 128
"""How many problems are solved for parts, in all, at most."""

UNKEPT = 2
"""For how many of them one counts as long as no solution keeps to the limit: perhaps none does."""


class _Known(NamedTuple):
    """A solution, its cost, and its live bytes: of the arguments alone, then at each op."""

    choice: list[int]
    cost: float
    live: Table


@dataclass(order=True)
class _Part:
    """A part of the solutions: the `allowed` values of each variable.

    Attributes:
        bound: of the cost of its solutions that keep to the limit.
        known: some of its solutions.
        mix: those of the cheapest mix, and the solution for the last prices.
        price: the last prices of a byte: of the arguments alone, then at each op.
    """

    bound: float
    number: int
    allowed: list[np.ndarray] = field(compare=False)
    known: list[_Known] = field(compare=False)
    mix: list[list[int]] = field(compare=False, default_factory=list)
    price: Table = field(compare=False, default_factory=lambda: np.zeros(0))


def solve_within(
    problem: CostProblem,
    held: Sequence[LiveBytes],
    limit: int,
    solve: Callable[[CostProblem], Solution],
    gap: float = 0.0,
    choices: list[list[int]] | None = None,
) -> Solution:
    """Return the cheapest solution found that holds at most `limit` bytes at once; if there is
    none, the one that holds the fewest.

    Args:
        solve: solves a problem without a limit.
        gap: the relative gap of objective and bound that is enough.
        choices: solutions to begin with, whatever they hold; those for prices are added to them.
    """
    return _LimitedSearch(problem, held, limit, solve, gap).solution(
        [] if choices is None else choices
    )


class _LimitedSearch:
    """A problem with a limit, the best solution so far that keeps to it, and the one that holds the
    fewest bytes."""

    def __init__(
        self, problem: CostProblem, held: Sequence[LiveBytes], limit: int,
        solve: Callable[[CostProblem], Solution], gap: float,
    ):  # fmt: skip
        self.problem, self.held, self.limit = problem, held, limit
        self.solve, self.gap = solve, gap
        self.adjuster, self.ops = Adjuster(problem, held, limit), ops_of(held)
        self.adjusts = len(problem.unary) <= MAX_ADJUSTED
        tables = (*problem.unary, *problem.pairs.values())
        self.ceiling = sum(float(t.max()) for t in tables)
        self.remaining = min(MAX_PART_ENTRIES // sum(t.size for t in tables), MAX_PART_SOLUTIONS)
        self.best: _Known | None = None
        self.smallest, self.fewest = list[int](), inf

    def solution(self, choices: list[list[int]]) -> Solution:
        """Return the solution; those for the prices of all are added to `choices`."""
        everything = [np.arange(len(u)) for u in self.problem.unary]
        root = _Part(-inf, 0, everything, [self._known(choice) for choice in choices])
        self._price(root, MAX_PRICED_SOLUTIONS if self.adjusts else FEW_PRICED_SOLUTIONS)
        choices += [k.choice for k in root.known[len(choices) :]]
        parts, closed, numbers = [root], list[float](), 1
        while parts and self.remaining > 0 and self._is_open(parts[0]):
            part = heappop(parts)
            v = self._dividing(part)
            value = part.mix[0][v]
            for allowed in ([value], [x for x in part.allowed[v] if x != value]):
                inside = [k for k in part.known if k.choice[v] in allowed]
                values = [*part.allowed[:v], np.array(allowed), *part.allowed[v + 1 :]]
                half = _Part(part.bound, numbers, values, inside)
                numbers += 1
                solved = self._price(half, min(PART_SOLUTIONS, self.remaining))
                self.remaining -= solved if self.best else UNKEPT * solved
                if self._is_open(half):
                    heappush(parts, half)
                else:
                    closed.append(half.bound)
        choice = self.best.choice if self.best else self.smallest
        objective = self.problem.cost(choice)
        return Solution(
            choice, objective, min([*closed, *(part.bound for part in parts), objective])
        )

    def _is_open(self, part: _Part) -> bool:
        """Whether a part may have a better solution, and can be divided."""
        if not part.mix or all(len(values) == 1 for values in part.allowed):
            return False
        return self.best is None or self.best.cost - part.bound > self.gap * abs(self.best.cost)

    def _price(self, part: _Part, rounds: int) -> int:
        """Raise the bound of a part by prices, and offer the solutions for them. Return the number
        of problems that are solved."""
        at = list[int]()
        for k in part.known:
            self._add_peak(k, at)
        for i in range(rounds):
            costs = np.array([k.cost for k in part.known])
            excess = np.array([k.live[at] / self.limit - 1 for k in part.known])
            price, weights = prices(costs, excess.reshape(len(costs), len(at)), self.ceiling)
            part.price = np.zeros(self.ops)
            part.price[at] = price / self.limit
            problem = priced(self.problem, self.held, part.price)
            found = self.solve(problem if part.number == 0 else problem.restricted(part.allowed))
            choice = [int(a[x]) for a, x in zip(part.allowed, found.choice, strict=True)]
            part.bound = max(part.bound, found.bound - float(price.sum()))
            mixed = [k.choice for k, w in zip(part.known, weights, strict=True) if w > 0]
            part.mix, known = [choice, *mixed], self._known(choice)
            self._offer(known, part.mix)
            if self.best is not None:
                self._offer(self.best, [choice])
            is_known = any(choice == k.choice for k in part.known)
            if is_known or not self._is_open(part):
                return i + 1
            part.known.append(known)
            self._add_peak(known, at)
        return rounds

    def _offer(self, start: _Known, others: Sequence[list[int]]) -> None:
        """Adjust a solution to the limit, and retain it if it is the best so far."""
        found = start
        if self.adjusts:
            found = self._known(self.adjuster.adjusted(start.choice, others))
        bytes_ = float(found.live.max())
        if bytes_ < self.fewest:
            self.smallest, self.fewest = found.choice, bytes_
        if bytes_ <= self.limit and (self.best is None or found.cost < self.best.cost):
            self.best = found

    def _known(self, choice: list[int]) -> _Known:
        return _Known(choice, self.problem.cost(choice), live(self.held, choice))

    def _add_peak(self, known: _Known, at: list[int]) -> None:
        """Add the peaks of a solution to the ops with a price: the largest that are over the
        limit."""
        over = np.flatnonzero(known.live > self.limit)
        order = over[np.argsort(-known.live[over], kind="stable")]
        for peak in order[:MAX_PEAKS].tolist():
            if peak not in at:
                at.append(peak)

    def _dividing(self, part: _Part) -> int:
        """Return the variable by which a part is divided: the one whose bytes differ most in price
        between the solutions of the mix; if none differs, the one with most values."""
        differing = [
            v for v in range(len(part.allowed)) if len({choice[v] for choice in part.mix}) > 1
        ]
        if not differing:
            return max(range(len(part.allowed)), key=lambda v: len(part.allowed[v]))
        total = np.concatenate(([0.0], np.cumsum(part.price)))

        def spread(v: int) -> float:
            paid = [self._price_of(v, choice[v], total) for choice in part.mix]
            return max(paid) - min(paid)

        return max(differing, key=spread)

    def _price_of(self, v: int, value: int, total: Table) -> float:
        """Return the price of the most bytes that a value of a variable may hold.

        Args:
            total: the prices of a byte at all ops before each.
        """
        return sum(
            float(total[h.span.end + 2] - total[h.span.start + 1])
            * float(h.bytes.take(value, axis=h.variables.index(v)).max())
            for h in self.adjuster.holding[v]
        )
