"""The cheapest solution that keeps to a device's memory.

The live bytes at a moment are a sum over variables, like the costs. With a price for each byte at
some moments the problem has the same form (Lagrange multipliers; Everett 1963): its solution is the
cheapest of all that hold no more at those moments. The moments are those at which solutions had
their peaks; the price is found by bisection. A lower bound of the priced problem, less the price of
the limit, is a bound for the solutions that keep to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardir.algebra.routes import Table
from shardir.analysis.storages import Span
from shardir.search.buckets import Solve
from shardir.search.elimination import Solution
from shardir.search.problem import CostProblem

MAX_PRICE_RAISES = 14
"""How many prices are tried, each four times the one before, until a solution keeps to the
limit."""

PRICE_BISECTIONS = 5
"""How many times the interval of the price is divided then, at its geometric mean."""


@dataclass(frozen=True)
class LiveBytes:
    """The bytes that the values of one or two variables hold, and the ops at which they do."""

    variables: tuple[int, ...]
    bytes: Table
    span: Span


class Peak(NamedTuple):
    """The maximum of live bytes, and the op at which it is reached."""

    bytes: int
    at: int


def peak(held: Sequence[LiveBytes], choice: Sequence[int]) -> Peak:
    """Return the peak of a solution."""
    change = np.zeros(max((h.span.end for h in held), default=0) + 3)
    for h in held:
        n = h.bytes[tuple(choice[v] for v in h.variables)]
        change[h.span.start + 1] += n
        change[h.span.end + 2] -= n
    now = np.cumsum(change)
    at = int(now.argmax())
    return Peak(int(now[at]), at - 1)


def priced(
    problem: CostProblem, held: Sequence[LiveBytes], at: set[int], price: float
) -> CostProblem:
    """Return the problem with a price for each byte held at the ops `at`."""
    found = CostProblem(list(problem.unary), dict(problem.pairs))
    scaled: dict[tuple[int, int], Table] = {}
    for h in held:
        if n := sum(h.span.start <= i <= h.span.end for i in at):
            if (id(h.bytes), n) not in scaled:
                scaled[id(h.bytes), n] = price * n * h.bytes
            more = scaled[id(h.bytes), n]
            v, *other = h.variables
            if other:
                found.add(v, other[0], more)
            else:
                found.unary[v] = found.plus(found.unary[v], more)
    return found


class TightError(Exception):
    """No solution was found that keeps to the limit. `needed`: the bytes of the smallest one."""

    def __init__(self, needed: int):
        super().__init__(needed)
        self.needed = needed


def smallest(problem: CostProblem, held: Sequence[LiveBytes]) -> list[int]:
    """Return the solution in which each variable by itself holds the fewest bytes."""
    total = [np.zeros(len(u)) for u in problem.unary]
    for h in held:
        if len(h.variables) == 1:
            total[h.variables[0]] = total[h.variables[0]] + h.bytes
    return [int(t.argmin()) for t in total]


def solve_within(
    problem: CostProblem, held: Sequence[LiveBytes], limit: int, solve: Solve
) -> Solution:
    """Return the cheapest solution found that holds at most `limit` bytes at once.

    Raises:
        TightError: there is none, or even the smallest values need more.
    """
    values = [h for h in held if len(h.variables) == 1]
    if (needed := peak(values, smallest(problem, held)).bytes) > limit:
        raise TightError(needed)
    best, bound, at, fewest = None, -np.inf, set[int](), np.inf

    def keeps_to_limit(price: float) -> bool:
        """Whether the solution for a price keeps to the limit."""
        nonlocal best, bound, fewest
        while True:
            found = solve(priced(problem, held, at, price))
            bound = max(bound, found.bound - price * len(at) * limit)
            most = peak(held, found.choice)
            fewest = min(fewest, most.bytes)
            if most.bytes <= limit:
                cost = problem.cost(found.choice)
                if best is None or cost < best.objective:
                    best = Solution(found.choice, cost, cost)
                return True
            if most.at in at:
                return False
            at.add(most.at)

    low, high = 0.0, 0.0
    for _ in range(MAX_PRICE_RAISES):
        if keeps_to_limit(high):
            break
        low, high = high, 4 * high or sum(float(u.min()) for u in problem.unary) / limit / 64
    for _ in range(PRICE_BISECTIONS if low else 0):
        middle = (low * high) ** 0.5
        if keeps_to_limit(middle):
            high = middle
        else:
            low = middle
    if best is None:
        raise TightError(int(fewest))
    return Solution(best.choice, best.objective, min(bound, best.objective))
