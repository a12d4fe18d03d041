"""The prices of limits, by the solutions that are known: a small linear program.

    maximise  min_k (cost_k + sum_i price_i excess_ki)    over price_i >= 0

A limit i costs price_i for each unit of excess; `excess_ki` is negative where solution k keeps to
it. Its dual mixes the solutions, with weights that add up to 1, for the minimum cost at which no
limit is exceeded on average:

    minimise  sum_k weight_k cost_k    with  sum_k weight_k excess_ki <= 0
"""

from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Table

TOLERANCE = 1e-9
"""The reduced cost that counts as 0, relative to the largest of a solution."""

MIN_PIVOT = 1e-6
"""The smallest pivot: smaller ones are the rounding of 0."""

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

    The simplex algorithm on a tableau, with Bland's rule, which ends although the program is
    degenerate. Each limit is counted in units of its largest excess, so that all numbers are near
    to 1, and no matrix is inverted, which may be singular.
    """
    n, rows = excess.shape
    unit = np.abs(excess).max(axis=0, initial=0.0)
    unit[unit == 0] = 1.0
    cost = np.concatenate(([ceiling], np.zeros(rows), costs))
    # A row for each limit, then that of the weights, then the reduced costs. Columns: the solution
    # at every limit, the slack of each limit, the solutions, and the right-hand side.
    table = np.zeros((rows + 2, rows + n + 2))
    table[:rows, 1 : 1 + rows] = np.eye(rows)
    table[:rows, 1 + rows : -1] = (excess / unit).T
    table[rows, 0] = 1.0
    table[rows, 1 + rows :] = 1.0
    table[-1, :-1] = cost - ceiling * table[rows, :-1]
    first = table.copy()
    negligible = TOLERANCE * costs.max(initial=0.0)  # not of the ceiling, which may be far above
    basis = np.array([*range(1, rows + 1), 0])
    for _ in range(MAX_PIVOTS):
        up = table[:-1, :-1] > MIN_PIVOT
        entering = np.flatnonzero((table[-1, :-1] < -negligible) & up.any(axis=0))
        if not len(entering):
            break
        column = int(entering[0])
        ratio = np.full(rows + 1, np.inf)
        np.divide(table[:-1, -1], table[:-1, column], out=ratio, where=up[:, column])
        ties = np.flatnonzero(ratio <= ratio.min() + TOLERANCE)
        row = int(ties[basis[ties].argmin()])
        basis[row] = column
        table[row] /= table[row, column]
        others = np.arange(rows + 2) != row
        table[others] -= np.outer(table[others, column], table[row])
    # Pivots have added up rounding: the solution of the last basis is that of the first table.
    columns, weights = first[:-1, basis], np.zeros(len(cost))
    weights[basis] = np.linalg.lstsq(columns, first[:-1, -1], rcond=None)[0]
    dual = np.linalg.lstsq(columns.T, cost[basis], rcond=None)[0]
    return Prices(np.maximum(-dual[:rows], 0.0) / unit, weights[1 + rows :])
