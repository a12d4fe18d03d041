"""The prices of limits, by the solutions that are known: a small linear program.

    maximise  min_k (cost_k + sum_i price_i excess_ki)    over price_i >= 0

A limit i costs price_i for each unit of excess; `excess_ki` is negative where solution k keeps to
it. Its dual mixes the solutions, with weights that add up to 1, for the minimum cost at which no
limit is exceeded on average:

    minimise  sum_k weight_k cost_k    with  sum_k weight_k excess_ki <= 0
"""

from typing import NamedTuple

import numpy as np

from shardir.search.problem import Table

TOLERANCE = 1e-9
"""The reduced cost that counts as 0, relative to the largest of a solution."""

MIN_PIVOT = 1e-7
"""The smallest pivot: smaller ones are the rounding of 0, and leave a singular basis."""

MAX_PIVOTS = 1000
"""The maximum number of pivots. Rounding may make the algorithm cycle; any prices give a bound."""


class Prices(NamedTuple):
    """The price of each limit, and the weight of each solution in the cheapest mix."""

    price: Table
    weights: Table


def prices(costs: Table, excess: Table, ceiling: float) -> Prices:
    """Return the best prices.

    Args:
        costs: of each solution.
        excess: of each solution over each limit: [solution, limit].
        ceiling: the cost of one more solution, which is exactly at every limit. It has a weight as
            long as no mix of the others keeps to all limits.

    The simplex algorithm with Bland's rule, which ends although the program is degenerate; there
    are as many rows as limits, and one more.
    """
    n, rows = excess.shape
    columns = np.zeros((rows + 1, 1 + rows + n))
    columns[rows, 0] = 1.0
    columns[:rows, 1 : 1 + rows] = np.eye(rows)
    columns[:rows, 1 + rows :] = excess.T
    columns[rows, 1 + rows :] = 1.0
    cost = np.concatenate(([ceiling], np.zeros(rows), costs))
    right = np.zeros(rows + 1)
    right[rows] = 1.0
    negligible = TOLERANCE * costs.max(initial=0.0)  # not of the ceiling, which may be far above
    basis = [*range(1, rows + 1), 0]
    inverse, dual = np.eye(rows + 1), cost[basis]
    for _ in range(MAX_PIVOTS):
        reduced = cost - dual @ columns
        reduced[basis] = 0.0
        entering = np.flatnonzero(reduced < -negligible)
        if not len(entering):
            break
        direction, values = inverse @ columns[:, entering[0]], inverse @ right
        up = direction > MIN_PIVOT
        ratio = np.where(up, values / np.where(up, direction, 1.0), np.inf)
        ties = np.flatnonzero(ratio <= ratio.min() + TOLERANCE)
        basis[min(ties, key=lambda i: basis[i])] = int(entering[0])
        inverse = np.linalg.inv(columns[:, basis])
        dual = cost[basis] @ inverse
    weights = np.zeros(len(cost))
    weights[basis] = inverse @ right
    return Prices(np.maximum(-dual[:rows], 0.0), weights[1 + rows :])
