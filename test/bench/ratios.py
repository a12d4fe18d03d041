"""The ratios of the claims of laws: at most 1 where they hold."""

from math import isclose

ROUNDING = 1e-6
"""The relative difference of equal times. Of several buckets that a tensor may join the search need
not choose that of fuse-communication; they differ by the time to copy it."""


def ratio(less: float, more: float) -> float:
    """Return a quotient, which is 1 if both are equal up to rounding."""
    if isclose(less, more, rel_tol=ROUNDING):
        return 1.0
    return less / more if more else float("inf")
