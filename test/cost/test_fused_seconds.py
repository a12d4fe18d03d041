"""The collectives that take less time as one: the best buckets are those of all partitions. All
buckets of a program together have an order in which each is available before it is needed, and no
two of them gain by being one; reductions that free memory are in one bucket with their layer."""

from collections.abc import Sequence
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from support.extent import sampled
from support.partitions import partitions

from shardir.algebra.forms import Form
from shardir.analysis.storages import Span
from shardir.cost.buckets import Bucket, best_buckets, fuse, gains_by_fusion, may_gain_by_fusion
from shardir.cost.collective_work import CollectiveTimes


def random_parts(random: Random, n: int) -> list[CollectiveTimes]:
    """Parts of one value or of several, whose times are near the latencies."""
    forms = tuple(
        Form(str(i), random.choice([0.0, 1.0, 2.0, 4.0]), 0.0) for i in range(random.randint(1, 3))
    )
    slower = [random.choice([1.0, 1.5, 2.0]) for _ in forms]
    parts = []
    for _ in range(n):
        values = [random.uniform(0.0, 4.0) for _ in range(random.choice([1, 1, 1, 2]))]
        sending = tuple(tuple(v * s for s in slower) for v in values)
        parts.append(CollectiveTimes(forms, sending, tuple(v * random.random() for v in values)))
    return parts


def seconds(parts: list[CollectiveTimes], blocks: list[list[int]]) -> float:
    """A latency and the values of each block, in its fastest form; several are packed."""
    total = 0.0
    for block in blocks:
        values = [s for i in block for s in parts[i].sending]
        times = [form.latency + sum(s[k] for s in values) for k, form in enumerate(parts[0].forms)]
        packing = sum(p for i in block for p in parts[i].packing)
        total += min(times) + (packing if len(values) > 1 else 0.0)
    return total


@pytest.mark.parametrize("seed", sampled(range(60), 12))
def test_no_partition_into_buckets_is_faster(seed: int):
    random = Random(seed)
    parts = random_parts(random, random.randint(0, 6))
    every = [*range(len(parts))]
    buckets = best_buckets(parts)
    assert all(len(bucket) > 1 for bucket in buckets)
    alone = [[i] for i in every if not any(i in bucket for bucket in buckets)]
    found = [*buckets, *alone]
    assert sorted(i for bucket in found for i in bucket) == every
    minimum = min(seconds(parts, blocks) for blocks in partitions(every))
    assert seconds(parts, found) == pytest.approx(minimum, rel=1e-8)
    for a, b in pairwise(parts):
        both = seconds([a, b], [[0, 1]]) < seconds([a, b], [[0], [1]]) * (1 - 1e-9)
        assert gains_by_fusion(a, b) == both
        assert not both or may_gain_by_fusion(a) or may_gain_by_fusion(b)


def one(seconds: float) -> CollectiveTimes:
    """A value with a latency of 1."""
    return CollectiveTimes((Form("", 1.0, 0.0),), ((seconds,),), (seconds / 100,))


def random_chains(random: Random) -> list[Bucket]:
    """Up to six collectives of three kinds, some one after the other."""
    parts: list[Bucket] = []
    while len(parts) < 6:
        first, before = random.randrange(4), frozenset[int]()
        last = first + random.randrange(5)
        for _ in range(random.choice([1, 1, 2, 3])):
            i, value = len(parts), one(random.uniform(0.0, 2.0))
            first = random.randint(first, last)
            kind = random.choice("abc")
            parts.append(Bucket((i,), Span(first, last), 1, value, kind, follows=before))
            before |= {i}
    return parts[:6]


def can_be(parts: Sequence[Bucket], buckets: Sequence[Sequence[int]]) -> bool:
    """Whether some order of buckets has each part between the ops that it may be after, and after
    those that it follows."""
    for order in permutations(buckets):
        now, done = -1, set[int]()
        for bucket in order:
            now = max(now, *(parts[i].after.start for i in bucket))
            before = frozenset[int]().union(*(parts[i].follows for i in bucket))
            if not before <= done or any(now > parts[i].after.end for i in bucket):
                break
            done.update(bucket)
        else:
            return True
    return False


@pytest.mark.parametrize("seed", sampled(range(60), 12))
def test_buckets_have_an_order_and_no_two_gain(seed: int):
    parts = random_chains(Random(seed))
    found = fuse(parts)
    inside = {i for bucket in found for i in bucket.members}
    every = [bucket.members for bucket in found]
    every += [part.members for part in parts if part.members[0] not in inside]
    assert sorted(i for bucket in every for i in bucket) == [*range(len(parts))]
    assert all(len({parts[i].kind for i in bucket}) == 1 for bucket in every)
    assert can_be(parts, every)
    at = {i: n for n, bucket in enumerate(found) for i in bucket.members}
    assert all(at[j] < at[i] for i in at for j in parts[i].follows if j in at)
    for a, b in combinations(every, 2):
        if parts[a[0]].kind == parts[b[0]].kind:
            apart = sum(seconds([parts[i].values for i in x], [[*range(len(x))]]) for x in (a, b))
            both = seconds([parts[i].values for i in a + b], [[*range(len(a + b))]])
            rest = [bucket for bucket in every if bucket not in (a, b)]
            assert both >= apart * (1 - 1e-9) or not can_be(parts, [*rest, a + b])


@pytest.mark.parametrize("times", [2, 3, 5])
def test_layers_are_the_repeated_parts(times: int):
    """Of a head, layers of two matrices and a bias, and a table: two matrices are a full bucket,
    and the first layer would be one with the head."""
    sizes = [25.0, *[25.0, 10.0, 0.1] * times, 7.0]
    parts = [
        Bucket((i,), Span(i, 100), 1, one(size), "a", shrinks=True) for i, size in enumerate(sizes)
    ]
    layers = [(i, i + 1, i + 2) for i in range(1, 3 * times, 3)]
    assert (layers == sorted(bucket.members for bucket in fuse(parts))[:times]) == (times > 2)
