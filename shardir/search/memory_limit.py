"""The cheapest solution that keeps to a device's memory.

With a price for each live byte at some ops the problem has the same form as without a limit
(Lagrange multipliers; Everett 1963), and its lower bound, less the price of the limit, is a bound
for all solutions that keep to the limit.

1. The ops are those at which solutions had their peaks. The prices are those at which no mix of the
   solutions known so far is cheaper (prices.py); the solution for them joins the known ones
   (Kelley's cutting planes, 1960; Dantzig and Wolfe's columns, 1960). When one comes up again,
   prices give no better bound.
2. The solution for a price may be over the limit, or far below it. So each is changed until it
   keeps to the limit, and as long as it gets cheaper (adjust.py).
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from shardir.search.adjust import Adjuster
from shardir.search.elimination import Solution
from shardir.search.memory import LiveBytes, live, ops_of, priced
from shardir.search.prices import prices
from shardir.search.problem import CostProblem, Table

MAX_PRICED_SOLUTIONS = 16
"""How many problems with prices are solved, at most."""


class _Known(NamedTuple):
    """A solution, its cost, and its live bytes: of the arguments alone, then at each op."""

    choice: list[int]
    cost: float
    live: Table


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
    adjuster = Adjuster(problem, held, limit)
    ceiling = sum(float(t.max()) for t in (*problem.unary, *problem.pairs.values()))
    known, at = list[_Known](), list[int]()
    best, bound, smallest, fewest = None, -inf, list[int](), inf

    def learn(choice: list[int]) -> _Known:
        """Add a solution to the known ones, and its peak to the ops with a price."""
        found = _Known(choice, problem.cost(choice), live(held, choice))
        known.append(found)
        if found.live.max() > limit and (peak := int(found.live.argmax())) not in at:
            at.append(peak)
        return found

    choices = [] if choices is None else choices
    for choice in choices:
        learn(choice)
    for _ in range(MAX_PRICED_SOLUTIONS):
        costs = np.array([k.cost for k in known])
        excess = np.array([k.live[at] / limit - 1 for k in known]).reshape(len(known), len(at))
        price, weights = prices(costs, excess, ceiling)
        each = np.zeros(ops_of(held))
        each[at] = price / limit
        found = solve(priced(problem, held, each))
        bound = max(bound, found.bound - float(price.sum()))
        mixed = [k.choice for k, w in zip(known, weights, strict=True) if w > 0]
        for start in (found.choice, *([best.choice] if best else [])):
            choice = adjuster.adjusted(start, [found.choice, *mixed])
            bytes_, cost = float(live(held, choice).max()), problem.cost(choice)
            if bytes_ < fewest:
                smallest, fewest = choice, bytes_
            if bytes_ <= limit and (best is None or cost < best.objective):
                best = Solution(choice, cost, -inf)
        if best is not None and best.objective - bound <= gap * best.objective:
            break
        if any(found.choice == k.choice for k in known):
            break
        learn(found.choice)
        choices.append(found.choice)
    best = best or Solution(smallest, problem.cost(smallest), -inf)
    return Solution(best.choice, best.objective, min(bound, best.objective))
