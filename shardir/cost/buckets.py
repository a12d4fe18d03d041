"""Buckets: those of several collectives that take less time as one.

    all-reduces of values of s seconds each, with a latency of a    n (a + s)
    one all-reduce of all, each packed in p seconds                 a + n (s + p)

So a value gains a - p by a bucket that is there for others. The forms of a collective differ in
latency and rate: small values may gain by another form than large ones.

A bucket whose latency is at most FULL of its time is full if its values are smaller after it: more
of them would gain little, and what is reduced later lives longer.

fuse-communication and the search ask `fused`, so that they have the same buckets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, combinations, islice
from math import inf
from operator import add

from shardir.algebra.estimates import IMPROVEMENT
from shardir.analysis.storages import Span
from shardir.cost.collective_work import Together

FULL = 0.05
"""The part of a bucket's time that its latency is at most, if the bucket is full."""


@dataclass(frozen=True)
class Bucket:
    """Collectives that are one, or may be.

    Attributes:
        members: their numbers.
        after: the first and the last op after which they may be.
        bytes: of their operands on one device.
        shrinks: whether their results are smaller on one device.
    """

    members: tuple[int, ...]
    after: Span
    bytes: int
    values: Together
    shrinks: bool = False

    @property
    def is_full(self) -> bool:
        """Whether nothing joins it."""
        return self.shrinks and self.values.fastest[0].latency <= FULL * self.values.seconds

    def __add__(self, other: "Bucket") -> "Bucket":
        after = Span(max(self.after.start, other.after.start), min(self.after.end, other.after.end))
        size = self.bytes + other.bytes
        members, values = self.members + other.members, self.values + other.values
        return Bucket(members, after, size, values, self.shrinks)

    def fits(self, other: "Bucket", max_bytes: float) -> bool:
        """Whether both can be one: no result is used before the last operand is available, and none
        is full."""
        if self.is_full or other.is_full:
            return False
        start, end = (self.after.start, other.after.start), (self.after.end, other.after.end)
        return max(start) <= min(end) and self.bytes + other.bytes <= max_bytes


def fused(parts: Sequence[Bucket], max_bytes: float = inf) -> list[Bucket]:
    """Return the buckets in which collectives of one kind take less time than alone: the best ones
    of each run; then any two of all, as long as that gains."""
    some = [part for part in parts if part.bytes <= max_bytes and may_gain(part.values)]
    found: list[Bucket] = []
    for run in runs(some, max_bytes):
        buckets = best_buckets([part.values for part in run])
        inside = {i for bucket in buckets for i in bucket}
        found += [reduce(add, [run[i] for i in bucket]) for bucket in buckets]
        found += [part for i, part in enumerate(run) if i not in inside]
    while (pair := _gainful_pair(found, max_bytes)) is not None:
        a, b = pair
        found = [c for c in found if c is not a and c is not b] + [a + b]
    return [bucket for bucket in found if len(bucket.members) > 1]


def runs(parts: Sequence[Bucket], max_bytes: float) -> Iterator[list[Bucket]]:
    """Yield the parts, in the order in which they are available, in runs that fit into one
    bucket."""
    run, bucket = list[Bucket](), None
    for part in sorted(parts, key=lambda part: part.after.start):
        fits = bucket is not None and bucket.fits(part, max_bytes)
        if run and not fits:
            yield run
            run = []
        bucket = bucket + part if bucket is not None and fits else part
        run.append(part)
    if run:
        yield run


def _gainful_pair(buckets: list[Bucket], max_bytes: float) -> tuple[Bucket, Bucket] | None:
    """Return two buckets that gain by being one; None if there are none."""
    buckets.sort(key=lambda bucket: bucket.after.start)
    for i, a in enumerate(buckets):
        for b in islice(buckets, i + 1, None):
            if b.after.start > a.after.end:
                break
            if a.fits(b, max_bytes) and gains(a.values, b.values):
                return a, b
    return None


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
