"""Buckets: collectives that take less time fused than alone.

    n all-reduces of s seconds each, with a latency of a           n (a + s)
    one all-reduce of n values, each packed in p seconds           a + n (s + p)

So a value that joins a bucket saves a - p. The forms of a collective differ in latency and rate:
small values may gain in another form than large values.

Reductions whose results are smaller than their operands free memory. So the reductions of a layer
are fused first. A layer is a repeated part of the sequence of reductions, with equal kinds, bytes
and times. A bucket of such reductions is full once its latency is at most FULL of its time: a
further value would save little, and its operand would live longer.

A value may pass through several collectives in turn; their buckets keep this order.

fuse-communication and the search call `fuse`, so that their buckets agree.
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
from shardir.cost.collective_work import CollectiveTimes

MAX_BUCKET_BYTES = 1 << 26
"""The default of fuse-communication's `max-bytes`: bounds the operands of a bucket on one
device, and so the memory of its buffer. 64 MB, of the order of DDP's 25 MB and FSDP's layers."""

FULL = 0.05
"""Bounds what a full bucket could still save: its latency is at most this part of its time. Set to
the error of the time model, about 4%."""


@dataclass(frozen=True)
class Bucket:
    """One collective, or several that are fused.

    Attributes:
        members: the numbers of the collectives.
        after: the first and the last op after which the fused collective may stand.
        bytes: of the operands on one device.
        values: the seconds of the fused collective.
        kind: only collectives of equal kinds are fused.
        shrinks: whether results are smaller than operands on one device, which frees memory.
        follows: the numbers of the collectives whose results the members use.
    """

    members: tuple[int, ...]
    after: Span
    bytes: int
    values: CollectiveTimes
    kind: Hashable = None
    shrinks: bool = False
    follows: frozenset[int] = frozenset()

    @cached_property
    def is_full(self) -> bool:
        """Whether no further collective joins: see FULL."""
        return self.shrinks and self.values.fastest[0].latency <= FULL * self.values.seconds

    def __add__(self, other: "Bucket") -> "Bucket":
        after = Span(max(self.after.start, other.after.start), min(self.after.end, other.after.end))
        return Bucket(
            self.members + other.members, after, self.bytes + other.bytes,
            self.values + other.values, self.kind, self.shrinks, self.follows | other.follows,
        )  # fmt: skip

    def fits(self, other: "Bucket", max_bytes: float, limited: bool = True) -> bool:
        """Whether both can be fused: no result is used before the last operand is available, the
        operands have at most `max_bytes`, and, if `limited`, neither is full."""
        if limited and (self.is_full or other.is_full):
            return False
        start, end = (self.after.start, other.after.start), (self.after.end, other.after.end)
        return max(start) <= min(end) and self.bytes + other.bytes <= max_bytes


def fuse(parts: Sequence[Bucket], max_bytes: float = inf) -> list[Bucket]:
    """Return the buckets of at least two collectives that take less time fused than alone, each
    after the buckets that it follows. Layers are fused first, then the rest."""
    fusion = _Fusion(parts, max_bytes)
    for layer in _layer_reductions(parts):
        fusion.join(layer, limited=False)
    fusion.join(list(fusion.buckets.values()))
    return fusion.in_order()


def fuse_by_kind(parts: Sequence[Bucket]) -> list[Bucket]:
    """Return one bucket for each run of a kind, whatever it costs, each after the buckets that it
    follows."""
    fusion = _Fusion(parts, inf)
    for group in _by_kind(parts):
        for run in _runs(group, inf):
            fusion.join_all(run)
    return fusion.in_order()


def _by_kind(parts: Iterable[Bucket]) -> Iterable[list[Bucket]]:
    kinds = defaultdict[Hashable, list[Bucket]](list)
    for part in parts:
        kinds[part.kind].append(part)
    return kinds.values()


def _layer_reductions(parts: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Yield, for each layer, its collectives that free memory."""
    freeing = sorted((p for p in parts if p.shrinks), key=lambda part: part.after)
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault((p.kind, p.bytes, p.values), len(numbers)) for p in freeing]
    for layer in repeated_parts(np.array(codes, np.int64)):
        yield [freeing[i] for i in layer]


class _Fusion:
    """The buckets of a block while they are fused, by their members."""

    def __init__(self, parts: Iterable[Bucket], max_bytes: float):
        self.buckets = {part.members: part for part in parts}
        self.max_bytes = max_bytes
        self._of = {m: part for part in self.buckets.values() for m in part.members}
        self._linked = defaultdict[int, set[int]](set)
        """Predecessors and successors of each collective."""
        for part in self.buckets.values():
            for m, before in product(part.members, self._of.keys() & part.follows):
                self._linked[m].add(before)
                self._linked[before].add(m)

    def join(self, parts: Iterable[Bucket], limited: bool = True) -> None:
        """Fuse each run of a kind into its best buckets, then pairs of buckets while that gains."""
        joinable = [
            p for p in parts if p.bytes <= self.max_bytes and may_gain_by_fusion(p.values)
        ]  # fmt: skip
        for group in _by_kind(joinable):
            buckets = list[Bucket]()
            for run in _runs(group, self.max_bytes, limited):
                buckets += self._join_best(run)
            while (pair := self._gainful_pair(buckets, limited)) is not None:
                buckets = [b for b in buckets if b not in pair] + self._replace([pair])

    def join_all(self, run: Sequence[Bucket]) -> None:
        """Fuse the members of a run with its first, as far as an order of all buckets remains."""
        bucket = run[0]
        for part in run[1:]:
            if self._has_order([[bucket, part]]):
                (bucket,) = self._replace([[bucket, part]])

    def _join_best(self, run: Sequence[Bucket]) -> list[Bucket]:
        """Fuse a run into its best buckets, and return the buckets that it consists of then."""
        best = best_buckets([part.values for part in run])
        groups = [[run[i] for i in bucket] for bucket in best]
        if not self._has_order(groups):
            return list(run)
        inside = {i for bucket in best for i in bucket}
        return self._replace(groups) + [part for i, part in enumerate(run) if i not in inside]

    def _replace(self, groups: Iterable[Sequence[Bucket]]) -> list[Bucket]:
        """Replace each group of buckets by one bucket, and return the new buckets."""
        buckets = [reduce(add, group) for group in groups]
        for part in chain.from_iterable(groups):
            del self.buckets[part.members]
        self.buckets.update((bucket.members, bucket) for bucket in buckets)
        self._of.update((m, bucket) for bucket in buckets for m in bucket.members)
        return buckets

    def _gainful_pair(self, buckets: list[Bucket], limited: bool) -> tuple[Bucket, Bucket] | None:
        """Return two buckets that take less time fused; None if there are none."""
        buckets.sort(key=lambda bucket: bucket.after.start)
        for i, a in enumerate(buckets):
            for b in islice(buckets, i + 1, None):
                if b.after.start > a.after.end:
                    break
                if (
                    a.fits(b, self.max_bytes, limited)
                    and gains_by_fusion(a.values, b.values)
                    and self._has_order([[a, b]])
                ):
                    return a, b
        return None

    def _has_order(self, groups: Sequence[Sequence[Bucket]]) -> bool:
        """Whether all buckets can be ordered once each group is fused. Only buckets that a chain of
        predecessors and successors links to a group can prevent it."""
        inside = {part.members for group in groups for part in group}
        todo = [m for members in inside for m in members]
        seen, linked = set(inside), list[Bucket]()
        for m in todo:
            for other in self._linked.get(m, ()):
                bucket = self._of[other]
                if bucket.members not in seen:
                    seen.add(bucket.members)
                    linked.append(bucket)
                    todo += bucket.members
        if not linked and not any(self._linked.get(m) for m in todo):
            return True
        return _topological_order([*linked, *(reduce(add, group) for group in groups)]) is not None

    def in_order(self) -> list[Bucket]:
        """Return the buckets of at least two collectives, each after the buckets that it
        follows."""
        buckets = _topological_order(self.buckets.values())
        assert buckets is not None, "each collective is available before it is needed"
        return [bucket for bucket in buckets if len(bucket.members) > 1]


def _topological_order(buckets: Iterable[Bucket]) -> list[Bucket] | None:
    """Return the buckets, each after the buckets that it follows, otherwise by availability; None
    if a bucket would be available only after its first use, or if there is a cycle."""
    buckets = sorted(buckets, key=lambda bucket: bucket.after.start)
    at = {m: i for i, bucket in enumerate(buckets) for m in bucket.members}
    predecessors = [{at[m] for m in bucket.follows if m in at} for bucket in buckets]
    successors = defaultdict[int, list[int]](list)
    for i, before in enumerate(predecessors):
        for j in before:
            successors[j].append(i)
    missing = [len(before) for before in predecessors]
    start = [bucket.after.start for bucket in buckets]
    ready = [i for i, n in enumerate(missing) if not n]
    for i in ready:
        if start[i] > buckets[i].after.end:
            return None
        for j in successors[i]:
            start[j], missing[j] = max(start[j], start[i]), missing[j] - 1
            if not missing[j]:
                ready.append(j)
    return [buckets[i] for i in ready] if len(ready) == len(buckets) else None


def _runs(
    parts: Sequence[Bucket], max_bytes: float, limited: bool = True
) -> Iterator[list[Bucket]]:
    """Yield runs of parts, by availability, each of which fits into one bucket."""
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


def may_gain_by_fusion(values: CollectiveTimes) -> bool:
    """Whether values would take less time in a bucket whose latency others pay."""
    packing = sum(values.packing)
    return any(sum(s) + packing < values.seconds * IMPROVEMENT for s in _by_form(values))


def gains_by_fusion(a: CollectiveTimes, b: CollectiveTimes) -> bool:
    """Whether one collective for both takes less time than two."""
    return (a + b).seconds < (a.seconds + b.seconds) * IMPROVEMENT


def best_buckets(parts: Sequence[CollectiveTimes]) -> list[list[int]]:
    """Return the buckets that minimise the time of all parts, as indices of parts.

    Two buckets of one form are faster as one bucket, so there is at most one for each form. Given
    the forms in use, each part independently takes the fastest bucket, or stays alone.
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


def _by_form(values: CollectiveTimes) -> list[tuple[float, ...]]:
    """Return by_form[form][value]: the seconds of the bytes of each value."""
    return [*zip(*values.sending, strict=True)]
