"""Buckets: those of several collectives that take less time as one.

    all-reduces of values of s seconds each, with a latency of a    n (a + s)
    one all-reduce of all, each packed in p seconds                 a + n (s + p)

So a value gains a - p by a bucket that is there for others. The forms of a collective differ in
latency and rate: small values may gain by another form than large ones.
"""

from collections.abc import Sequence
from itertools import chain, combinations
from math import inf

from shardir.algebra.estimates import IMPROVEMENT
from shardir.cost.seconds import Together


def may_gain(values: Together) -> bool:
    """Whether some bucket would move these values in less time than they take alone."""
    packing = sum(values.packing)
    return any(sum(s) + packing < values.seconds * IMPROVEMENT for s in _by_form(values))


def gains(a: Together, b: Together) -> bool:
    """Whether one collective for both takes less time than two."""
    return (a + b).seconds < (a.seconds + b.seconds) * IMPROVEMENT


def best_buckets(parts: Sequence[Together]) -> list[list[int]]:
    """Return the buckets of several parts with which all parts take the minimum time.

    Two buckets of one form are better joined, so there is one for each form or none. With the forms
    of the buckets given, each part takes less time in one of them, or alone.
    """
    if not parts:
        return []
    latencies = [form.latency for form in parts[0].forms]
    inside = [[sum(s) + sum(p.packing) for s in _by_form(p)] for p in parts]
    fastest, best = inf, list[list[int]]()
    forms = range(len(latencies))
    for used in chain.from_iterable(combinations(forms, n) for n in range(len(forms) + 1)):
        buckets: dict[int, list[int]] = {form: [] for form in used}
        seconds = sum(latencies[form] for form in used)
        for i, part in enumerate(parts):
            alone = part.seconds
            form = min(used, key=inside[i].__getitem__, default=None)
            if form is not None and inside[i][form] < alone * IMPROVEMENT:
                buckets[form].append(i)
                seconds += inside[i][form]
            else:
                seconds += alone
        if seconds < fastest * IMPROVEMENT:
            fastest, best = seconds, [b for b in buckets.values() if len(b) > 1]
    return best


def _by_form(values: Together) -> list[tuple[float, ...]]:
    """Return the seconds of the bytes of each value, for each form."""
    return [*zip(*values.sending, strict=True)]
