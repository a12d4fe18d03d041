"""Comparison of estimated times: times that differ only by rounding are equal.

The prices of two plans may add equal terms in different orders, so equal times may differ in their
last digits. A choice between plans must not depend on these digits.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

IMPROVEMENT = 1 - 1e-9
"""A time is less than another one if it is less than this multiple of it: far above the rounding of
sums of floats, far below the error of the time model."""


def ranked(
    options: Iterable[T], seconds: Callable[[T], float], preference: Callable[[T], Any]
) -> list[tuple[float, T]]:
    """Return options with their estimated seconds, fastest first. Equally fast options are in the
    order of `preference`, then in the given order."""
    keyed: list[tuple[float, Any, int, float, T]] = []
    fastest = -1.0
    timed = ((seconds(option), i, option) for i, option in enumerate(options))
    for time, i, option in sorted(timed, key=lambda t: t[:2]):
        if fastest < time * IMPROVEMENT:
            fastest = time
        keyed.append((fastest, preference(option), i, time, option))
    keyed.sort(key=lambda f: f[:3])
    return [(time, option) for *_, time, option in keyed]
