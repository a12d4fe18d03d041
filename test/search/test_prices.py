"""The prices of limited bytes: those of a linear program that HiGHS solves."""

import numpy as np
import pytest
from support.extent import sampled

from shardir.search.problem.prices import prices


@pytest.mark.parametrize("seed", sampled(range(60), 12))
def test_prices_are_those_of_the_linear_program(seed: int):
    """HiGHS finds the same bound, and the same cost of a mix, for random solutions and limits."""
    rng = np.random.default_rng(seed)
    n, rows = int(rng.integers(0, 12)), int(rng.integers(0, 5))
    costs, excess = rng.integers(1, 50, n).astype(float), rng.integers(-9, 10, (n, rows)) / 8
    check_prices(costs, excess, 1000.0)


@pytest.mark.parametrize("seed", [*range(16), 58, 78, 568, 595])
def test_prices_of_limits_of_any_size_are_those_of_the_linear_program(seed: int):
    """A limit may be 1 B of 100 GB, and many ops have equal bytes, or nearly so: no basis is
    singular."""
    rng = np.random.default_rng(seed)
    n, rows = int(rng.integers(1, 20)), int(rng.integers(1, 12))
    bytes_ = rng.integers(0, int(10 ** rng.uniform(3, 11)), (n, rows)).astype(float)
    if seed % 2:
        bytes_ = bytes_[:, rng.integers(0, rows, rows)] + rng.integers(0, 3, (n, rows))
    if seed % 3:
        bytes_ = bytes_[rng.integers(0, n, n)]
    costs = rng.uniform(1e-5, 1e-3, n)
    check_prices(costs, bytes_ / 10 ** rng.uniform(0, 7) - 1, costs.max() * 10)


def test_prices_where_limits_are_nearly_equal():
    """Bytes at neighbouring ops of a training step: smaller pivots are the rounding of 0."""
    costs = np.array([646, 478, 628, 533, 562, 720, 724, 667, 583]) * 1e-6
    bytes_ = np.array([  # of each limit, the solutions
        [20760, 40584, 20746, 121112, 407818, 20760, 20760, 20746, 63768],
        [72343, 90119, 5643, 5657, 11275, 54297, 5657, 5643, 11289],
        [14614, 34438, 14600, 71958, 401672, 14614, 14614, 14600, 57622],
        [14614, 34438, 14600, 71958, 401672, 14614, 14614, 14600, 57622],
        [14615, 34439, 14601, 71959, 401673, 14615, 14615, 14601, 57623],
        [59927, 63367, 11273, 11287, 11273, 11287, 11287, 11273, 11287],
        [39318, 28294, 268680, 8470, 8456, 8598, 8598, 8456, 24854],
        [30999, 50823, 145673, 188695, 14601, 14615, 145687, 14601, 14615],
        [29207, 49031, 144137, 158487, 144137, 144151, 13079, 13065, 144151],
        [47639, 67463, 17417, 62487, 15369, 17431, 148503, 15369, 17431],
        [29207, 49031, 13065, 27415, 13065, 13079, 144151, 144137, 13079],
        [12823, 32647, 143881, 172567, 143881, 143895, 143895, 143881, 12823],
        [12823, 32647, 12809, 41495, 12809, 12823, 12823, 12809, 143895],
        [12567, 32391, 12553, 55575, 143625, 143639, 12567, 143625, 143639],
    ]).T  # fmt: skip
    check_prices(costs, bytes_ / 23948 - 1, 0.0056)


def check_prices(costs: np.ndarray, excess: np.ndarray, ceiling: float) -> None:
    """Assert that prices are those of HiGHS."""
    from scipy.optimize import linprog

    n, rows = excess.shape
    found = prices(costs, excess, ceiling)
    wanted = linprog(
        [*costs, ceiling], A_ub=np.vstack([excess, np.zeros((1, rows))]).T if rows else None,
        b_ub=np.zeros(rows) if rows else None, A_eq=np.ones((1, n + 1)), b_eq=[1.0],
    )  # fmt: skip
    assert (found.price >= 0).all() and (found.weights >= -1e-9).all()
    bound = min([*(costs + excess @ found.price), ceiling])
    assert bound == pytest.approx(wanted.fun, rel=1e-9)
    rest = 1 - found.weights.sum()
    assert found.weights @ costs + rest * ceiling == pytest.approx(wanted.fun, rel=1e-9)
    assert (found.weights @ excess <= 1e-9 * np.abs(excess).max(initial=1.0)).all()
