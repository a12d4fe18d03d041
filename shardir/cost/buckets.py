"""Buckets: those of several collectives that take less time as one.

    all-reduces of values of s seconds each, with a latency of a    n (a + s)
    one all-reduce of all, each packed in p seconds                 a + n (s + p)

So a value gains a - p by a bucket that is there for others. The forms of a collective differ in
latency and rate: small values may gain by another form than large ones.

Reductions that leave smaller values free memory. So those of a layer are in a bucket first: layers
are repeated parts of their sequence, of equal kinds and times. A bucket of them whose latency is at
most FULL of its time is full: more would gain little, and what is reduced later lives longer.

A value may take several collectives, one after the other: then their buckets are in this order too.

fuse-communication and the search ask `fused`, so that they have the same buckets.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain, combinations, islice, product
from math import inf
from operator import add

import numpy as np

from shardir.algebra.estimates import IMPROVEMENT
from shardir.analysis.repeats import repeated_parts
from shardir.analysis.storages import Span
from shardir.cost.collective_work import Together

MAX_BUCKET_BYTES = 1 << 26
"""The bytes of a bucket's operands on one device, at most, if fuse-communication is asked for no
others."""

FULL = 0.05
"""The part of a bucket's time that its latency is at most, if the bucket is full."""


@dataclass(frozen=True)
class Bucket:
    """Collectives that are one, or may be.

    Attributes:
        members: their numbers.
        after: the first and the last op after which they may be.
        bytes: of their operands on one device.
        kind: what the collectives of a bucket have in common.
        shrinks: whether their results are smaller on one device, which frees memory.
        follows: the numbers of collectives of whose results they are.
    """

    members: tuple[int, ...]
    after: Span
    bytes: int
    values: Together
    kind: Hashable = None
    shrinks: bool = False
    follows: frozenset[int] = frozenset()

    @cached_property
    def is_full(self) -> bool:
        """Whether nothing joins it."""
        return self.shrinks and self.values.fastest[0].latency <= FULL * self.values.seconds

    def __add__(self, other: "Bucket") -> "Bucket":
        after = Span(max(self.after.start, other.after.start), min(self.after.end, other.after.end))
        return Bucket(
            self.members + other.members, after, self.bytes + other.bytes,
            self.values + other.values, self.kind, self.shrinks, self.follows | other.follows,
        )  # fmt: skip

    def fits(self, other: "Bucket", max_bytes: float, limited: bool = True) -> bool:
        """Whether both can be one: no result is used before the last operand is available, and, if
        `limited`, none is full."""
        if limited and (self.is_full or other.is_full):
            return False
        start, end = (self.after.start, other.after.start), (self.after.end, other.after.end)
        return max(start) <= min(end) and self.bytes + other.bytes <= max_bytes


def fused(parts: Sequence[Bucket], max_bytes: float = inf) -> list[Bucket]:
    """Return the buckets in which collectives take less time than alone, each after those that it
    follows: of each layer, then of all."""
    found = _Buckets(parts, max_bytes)
    for layer in _layers(parts):
        found.join(layer, limited=False)
    found.join(list(found.all.values()))
    return found.in_order()


def fused_by_kind(parts: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets of runs of a kind, whatever they cost, each after those that it
    follows."""
    found = _Buckets(parts, inf)
    for same in _by_kind(parts):
        for run in _runs(same, inf):
            found.join_all(run)
    return found.in_order()


def _by_kind(parts: Iterable[Bucket]) -> Iterable[list[Bucket]]:
    kinds = defaultdict[Hashable, list[Bucket]](list)
    for part in parts:
        kinds[part.kind].append(part)
    return kinds.values()


def _layers(parts: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Yield the collectives of each layer that free memory."""
    freeing = sorted((p for p in parts if p.shrinks), key=lambda part: part.after)
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault((p.kind, p.bytes, p.values), len(numbers)) for p in freeing]
    for layer in repeated_parts(np.array(codes, np.int64)):
        yield [freeing[i] for i in layer]


class _Buckets:
    """The buckets so far, by their members; all are joined where that gains."""

    def __init__(self, parts: Iterable[Bucket], max_bytes: float):
        self.all = {part.members: part for part in parts}
        self.max_bytes = max_bytes
        self._of = {m: part for part in self.all.values() for m in part.members}
        self._near = defaultdict[int, set[int]](set)
        """Of each member those that it follows, and those that follow it."""
        for part in self.all.values():
            for m, before in product(part.members, self._of.keys() & part.follows):
                self._near[m].add(before)
                self._near[before].add(m)

    def join(self, parts: Iterable[Bucket], limited: bool = True) -> None:
        """Join some of each kind: the best ones of each run; then any two, as long as that
        gains."""
        some = [p for p in parts if p.bytes <= self.max_bytes and may_gain(p.values)]
        for same in _by_kind(some):
            found = list[Bucket]()
            for run in _runs(same, self.max_bytes, limited):
                found += self._best(run)
            while (pair := self._gainful_pair(found, limited)) is not None:
                found = [bucket for bucket in found if bucket not in pair] + self._joined([pair])

    def join_all(self, run: Sequence[Bucket]) -> None:
        """Join those of a run that can be one with the first."""
        now = run[0]
        for part in run[1:]:
            if self._can_be([[now, part]]):
                (now,) = self._joined([[now, part]])

    def _best(self, run: Sequence[Bucket]) -> list[Bucket]:
        """Join the best buckets of a run, and return what it is then."""
        best = best_buckets([part.values for part in run])
        groups = [[run[i] for i in bucket] for bucket in best]
        if not self._can_be(groups):
            return list(run)
        inside = {i for bucket in best for i in bucket}
        return self._joined(groups) + [part for i, part in enumerate(run) if i not in inside]

    def _joined(self, groups: Iterable[Sequence[Bucket]]) -> list[Bucket]:
        """Make one bucket of each group, and return them."""
        found = [reduce(add, group) for group in groups]
        for part in chain.from_iterable(groups):
            del self.all[part.members]
        self.all.update((bucket.members, bucket) for bucket in found)
        self._of.update((m, bucket) for bucket in found for m in bucket.members)
        return found

    def _gainful_pair(self, buckets: list[Bucket], limited: bool) -> tuple[Bucket, Bucket] | None:
        """Return two buckets that gain by being one; None if there are none."""
        buckets.sort(key=lambda bucket: bucket.after.start)
        for i, a in enumerate(buckets):
            for b in islice(buckets, i + 1, None):
                if b.after.start > a.after.end:
                    break
                if (
                    a.fits(b, self.max_bytes, limited)
                    and gains(a.values, b.values)
                    and self._can_be([[a, b]])
                ):
                    return a, b
        return None

    def _can_be(self, groups: Sequence[Sequence[Bucket]]) -> bool:
        """Whether there is an order of all buckets if each group is one. There is one of those that
        no chain joins with the groups."""
        inside = {part.members for group in groups for part in group}
        todo = [m for members in inside for m in members]
        seen, near = set(inside), list[Bucket]()
        for m in todo:
            for other in self._near.get(m, ()):
                bucket = self._of[other]
                if bucket.members not in seen:
                    seen.add(bucket.members)
                    near.append(bucket)
                    todo += bucket.members
        if not near and not any(self._near.get(m) for m in todo):
            return True
        return _ordered([*near, *(reduce(add, group) for group in groups)]) is not None

    def in_order(self) -> list[Bucket]:
        """Return the buckets of several, each after those that it follows."""
        found = _ordered(self.all.values())
        assert found is not None, "each collective is available before it is needed"
        return [bucket for bucket in found if len(bucket.members) > 1]


def _ordered(buckets: Iterable[Bucket]) -> list[Bucket] | None:
    """Return buckets in the order in which they are available, each after those that it follows;
    None if one is needed before."""
    every = sorted(buckets, key=lambda bucket: bucket.after.start)
    at = {m: i for i, bucket in enumerate(every) for m in bucket.members}
    before = [{at[m] for m in bucket.follows if m in at} for bucket in every]
    after = defaultdict[int, list[int]](list)
    for i, some in enumerate(before):
        for j in some:
            after[j].append(i)
    missing, start = [len(some) for some in before], [bucket.after.start for bucket in every]
    ready = [i for i, n in enumerate(missing) if not n]
    for i in ready:
        if start[i] > every[i].after.end:
            return None
        for j in after[i]:
            start[j], missing[j] = max(start[j], start[i]), missing[j] - 1
            if not missing[j]:
                ready.append(j)
    return [every[i] for i in ready] if len(ready) == len(every) else None


def _runs(
    parts: Sequence[Bucket], max_bytes: float, limited: bool = True
) -> Iterator[list[Bucket]]:
    """Yield the parts, in the order in which they are available, in runs that fit into one
    bucket."""
    run, bucket = list[Bucket](), None
    for part in sorted(parts, key=lambda part: part.after.start):
        fits = bucket is not None and bucket.fits(part, max_bytes, limited)
        if run and not fits:
            yield run
            run = []
        bucket = bucket + part if bucket is not None and fits else part
        run.append(part)
    if run:
        yield run


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
