"""The prices of single steps, alone and in buckets."""

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Indices, Table
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.steps import elements, step_seconds
from shardir.cost.collective_work import collective_times
from shardir.search.graph.latency_shares import BucketKey, LatencyShares, bucket_key


class StepPrice(NamedTuple):
    """The price of a step, alone and in a bucket.

    Attributes:
        alone: its time.
        forms: of each the bucket, its latency, and the seconds of the operand's bytes and packing;
            none of a step that is never fused.
        bytes: of the operand on one device.
    """

    alone: float
    forms: tuple[tuple[BucketKey, float, float], ...]
    bytes: int

    def with_shares(self, shares: LatencyShares, mesh: Mesh) -> tuple[float, BucketKey | None]:
        """Return the time with shares of buckets, and the bucket; None if it is not in one."""
        best, bucket, size = self.alone, None, np.array(float(self.bytes))
        for key, latency, rest in self.forms:
            part = float(shares.of_operands(key, size, mesh))
            if latency * part + rest < best:
                best, bucket = latency * part + rest, key
        return best, bucket

    def latency(self, bucket: BucketKey) -> float:
        return next(latency for key, latency, _ in self.forms if key == bucket)


class KindPrices(NamedTuple):
    """The prices in buckets of several steps of one kind.

    Attributes:
        buckets: of each form.
        latency: [form, step].
        rest: the seconds of the operand's bytes and packing, [form, step].
        bytes: of the operands on one device, [step].
    """

    buckets: tuple[BucketKey, ...]
    latency: Table
    rest: Table
    bytes: Table

    def in_buckets(self, shares: LatencyShares, mesh: Mesh) -> Table:
        """Return the time of each step in a bucket, with shares of these."""
        found = np.full(self.bytes.shape, inf)
        for bucket, latency, rest in zip(self.buckets, self.latency, self.rest, strict=True):
            found = np.minimum(found, latency * shares.of_operands(bucket, self.bytes, mesh) + rest)
        return found


def by_kind(
    prices: Sequence[tuple[Sequence[int], StepPrice]],
) -> list[tuple[Indices, KindPrices]]:
    """Return the numbers of the steps of each kind, and their prices: those that may be fused."""
    same: dict[tuple[BucketKey, ...], list[tuple[Sequence[int], StepPrice]]] = {}
    for each in prices:
        same.setdefault(tuple([key for key, *_ in each[1].forms]), []).append(each)
    found = list[tuple[Indices, KindPrices]]()
    for buckets, some in same.items():
        if buckets:
            latency, rest = np.array([[x for _, *x in p.forms] for _, p in some]).transpose(2, 1, 0)
            bytes_ = np.array([price.bytes for _, price in some], dtype=np.float64)
            numbers = np.array([number for number, _ in some])
            found.append((numbers, KindPrices(buckets, latency, rest, bytes_)))
    return found


@lru_cache(maxsize=65536)
def step_price(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, itemsize: int
) -> StepPrice:
    """Return the price of a step of any tensor, also of uneven shards, as fuse-communication
    finds it."""
    alone, size = step_seconds(mesh, shape, before, step, itemsize), elements(mesh, shape, before)
    if not (step.record.fusible and step.communicates(mesh)):
        return StepPrice(alone, (), size * itemsize)
    values = collective_times([(shape, before, step, itemsize)], mesh)
    forms = tuple(
        (bucket_key(itemsize, step, i), form.latency, sending + values.packing[0])
        for i, (form, sending) in enumerate(zip(values.forms, values.sending[0], strict=True))
    )
    return StepPrice(alone, forms, size * itemsize)
