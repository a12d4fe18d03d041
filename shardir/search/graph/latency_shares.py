"""The latencies of buckets, and the shares of them that the tensors in a bucket pay."""

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from shardir.algebra.arrays import Table
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.mesh import Axes, Mesh
from shardir.cost.buckets import MAX_BUCKET_BYTES

ALONE = 1e100
"""A share that no move pays, since it is faster alone; it is finite, since latencies may be 0."""

BucketKey = tuple[int, str, Axes, int, int, int]
"""The collectives that share one buffer: the bytes of an element; a step's kind, axes, `dim` and
`concat`; the number of the form of the collective."""


def bucket_key(itemsize: int, step: CollectiveStep, form: int) -> BucketKey:
    """Return the bucket of a step, in one of its forms."""
    return itemsize, step.kind, step.axes, step.dim, step.concat, form


@dataclass(frozen=True)
class LatencyShares:
    """The share of a bucket's latency that each tensor in it pays: of some buckets a share of their
    own, of all others the default. With an infinite share tensors move alone, and so do those that
    exceed a bucket.

    Attributes:
        bytes: of all tensors, each in full. The buckets that these would fill are paid by their
            bytes: an operand pays the part of a bucket that it fills.
    """

    default: float
    own: frozenset[tuple[BucketKey, float]] = frozenset()
    bytes: int = 0

    @cached_property
    def _own(self) -> dict[BucketKey, float]:
        return dict(self.own)

    def of(self, bucket: BucketKey) -> float:
        return self._own.get(bucket, self.default)

    def of_operands(self, bucket: BucketKey, bytes_: Table, mesh: Mesh) -> Table:
        """Return the shares of operands of so many bytes on one device. They are paid by bytes if
        all tensors, split over the other axes than the bucket's, exceed one bucket."""
        filled, part = bytes_ / MAX_BUCKET_BYTES, np.full_like(bytes_, self.of(bucket))
        _, _, axes, *_ = bucket
        if self.bytes * mesh.extent(axes) > MAX_BUCKET_BYTES * mesh.size:
            part = filled
        return np.minimum(np.where(filled <= 1, part, inf), ALONE)
