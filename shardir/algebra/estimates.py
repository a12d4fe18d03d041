"""Comparison of estimated times: those that differ by rounding alone are equal.

The prices of two plans may be sums of the same terms in another order, and links have bandwidths
that are no powers of two: so equal times differ in their last digits, and a choice between them
must not depend on that.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

IMPROVEMENT = 1 - 1e-9
"""A time is less than another if it is less than this part of it."""


def ranked(
    options: Iterable[T], seconds: Callable[[T], float], preference: Callable[[T], Any]
) -> list[tuple[float, T]]:
    """Return options with their estimated seconds, the fastest first; equally fast ones by
    `preference`, the smallest first, then in the given order."""
    found: list[tuple[float, Any, int, float, T]] = []
    fastest = -1.0
    timed = ((seconds(option), i, option) for i, option in enumerate(options))
    for time, i, option in sorted(timed, key=lambda t: t[:2]):
        if fastest < time * IMPROVEMENT:
            fastest = time
        found.append((fastest, preference(option), i, time, option))
    found.sort(key=lambda f: f[:3])
    return [(time, option) for *_, time, option in found]
