"""The collectives that take less time as one: the best buckets are those of all partitions."""

from itertools import pairwise
from random import Random

import pytest
from partitions import partitions

from shardir.algebra.forms import Form
from shardir.cost.buckets import best_buckets, gains, may_gain
from shardir.cost.collective_work import Together


def random_parts(random: Random, n: int) -> list[Together]:
    """Parts of one value or of several, whose times are near the latencies."""
    forms = tuple(
        Form(str(i), random.choice([0.0, 1.0, 2.0, 4.0]), 0.0) for i in range(random.randint(1, 3))
    )
    slower = [random.choice([1.0, 1.5, 2.0]) for _ in forms]
    parts = []
    for _ in range(n):
        values = [random.uniform(0.0, 4.0) for _ in range(random.choice([1, 1, 1, 2]))]
        sending = tuple(tuple(v * s for s in slower) for v in values)
        parts.append(Together(forms, sending, tuple(v * random.random() for v in values)))
    return parts


def seconds(parts: list[Together], blocks: list[list[int]]) -> float:
    """A latency and the values of each block, in its fastest form; several are packed."""
    total = 0.0
    for block in blocks:
        values = [s for i in block for s in parts[i].sending]
        times = [form.latency + sum(s[k] for s in values) for k, form in enumerate(parts[0].forms)]
        packing = sum(p for i in block for p in parts[i].packing)
        total += min(times) + (packing if len(values) > 1 else 0.0)
    return total


@pytest.mark.parametrize("seed", range(60))
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
        assert gains(a, b) == both
        assert not both or may_gain(a) or may_gain(b)
