"""The seconds of the planner's redistributions where tensors share buckets.

    d_w: partial over dp -> [{}, {}]            all-reduce over dp
    alone       all_reduce <sum> %d_w over <dp>             its latency, and its rate for each byte
    together    all_reduce <sum> %d_w, %d_b over <dp>       a part of the latency, the rate, and the
                                                            copy to the buffer

How a tensor moves is the planner's decision for it alone (algebra/routes.py).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf, prod
from typing import Any

import numpy as np

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.forms import copying
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.routes import Routes, Table, routes

Bucket = tuple[int, str, Axes, int, int, int]
"""What moves in one buffer: the bytes of an element, a step's kind, axes, `dim` and `concat`, in
which of its forms the collective is done."""


@dataclass(frozen=True)
class LatencyShares:
    """Which part of a bucket's latency each tensor takes that moves in it: known ones, and the
    usual one. Of an infinite part none does; then it moves alone."""

    usual: float
    known: frozenset[tuple[Bucket, float]] = frozenset()

    @cached_property
    def _known(self) -> dict[Bucket, float]:
        return dict(self.known)

    def of(self, bucket: Bucket) -> float:
        return self._known.get(bucket, self.usual)


@lru_cache(maxsize=256)
def transfer_costs(mesh: Mesh, rank: int, reduction: str) -> "TransferCosts | None":
    """The ways between the layouts of tensors of `rank` dimensions; None where there are too many
    layouts."""
    known = routes(mesh, rank, reduction)
    return TransferCosts(known) if known else None


class TransferCosts:
    """The planner's paths between evenly split layouts, with their seconds in buckets."""

    def __init__(self, known: Routes):
        self.routes, self.index = known, known.index
        self._known: tuple[LatencyShares | None, dict[tuple[Shape, int], Table]] = (None, {})

    def seconds(self, shape: Shape, itemsize: int, shares: LatencyShares | None = None) -> Table:
        """The seconds of each path for a tensor of this shape: [from, to]; infinite from or to
        layouts that do not split it evenly. With `shares` its moves may be in buckets."""
        if shares is None:
            return self.routes.seconds(shape, itemsize)
        if self._known[0] != shares:  # of shares that differ the last are kept
            self._known = shares, {}
        known, key = self._known[1], (shape, itemsize)
        if key not in known:
            size = prod(shape) * itemsize
            shared = self._shared(size, itemsize, shares).min(axis=0)
            known[key] = self._along(shape, itemsize, np.minimum(self.routes.each(size), shared))
        return known[key]

    def buckets(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout, shares: LatencyShares
    ) -> dict[Bucket, float]:
        """The buckets in which a tensor moves on the way from one layout to another, each with its
        latency."""
        size, found = prod(shape) * itemsize, {}
        for step in self.routes.steps(shape, itemsize, source, target) or []:
            i, j = self.index[source], self.index[step.layout]
            latency, rate = (costs[:, i, j] for costs in self.routes.costs)
            alone = latency + rate * size
            part = [shares.of(_bucket(itemsize, step, form)) for form in range(len(latency))]
            if alone.min() > 0:
                shared = latency * part + (rate + self._joining[i, j]) * size
                form = int(shared.argmin())
                if shared[form] < alone.min():
                    found[_bucket(itemsize, step, form)] = float(latency[form])
            source = step.layout
        return found

    def _along(self, shape: Shape, itemsize: int, cost: Table) -> Table:
        """The sums of the moves' costs."""
        least, via = self.routes.ways(shape, itemsize)
        n = len(via)
        now, ends = np.indices((n, n))
        total = np.where(np.isinf(least), inf, 0.0)
        while (moving := now != ends).any():
            after = np.where(moving, via[now, ends], ends)
            total += np.where(moving, cost[now, after], 0.0)
            now = after
        return total

    def _shared(self, size: int, itemsize: int, shares: LatencyShares) -> Table:
        """What each move of a tensor takes in a bucket: [form, from, to]."""
        latency, rate = self.routes.costs
        steps, at = self._kinds
        part = np.array([
            [shares.of(_bucket(itemsize, step, form)) for step in steps] + [1.0]
            for form in range(len(latency))
        ])  # fmt: skip
        return latency * part[:, at] + (rate + self._joining) * size

    @cached_property
    def _kinds(self) -> tuple[list[CollectiveStep], np.ndarray[Any, np.dtype[np.int64]]]:
        """A step for each kind of them that may go into one bucket; for each move its kind, the
        last where it communicates nothing or is none."""
        n = len(self.index)
        steps: dict[Bucket, tuple[int, CollectiveStep]] = {}
        at = np.full((n, n), -1)
        for (i, j), step in self.routes.moves.items():
            if step.record.communicates:
                at[i, j], _ = steps.setdefault(_bucket(0, step, 0), (len(steps), step))
        return [step for _, step in steps.values()], at

    @cached_property
    def _joining(self) -> Table:
        """The seconds for each byte of a tensor in which its shards are written into one buffer
        with others and read there, if they move: [from, to]."""
        mesh = self.routes.mesh
        each = copying(1, mesh)
        shards = np.array([each / mesh.extent(l.complete.used) for l in self.routes.layouts])
        latency, _ = self.routes.costs
        return np.where(latency.min(axis=0) > 0, shards[:, None], 0.0)


def _bucket(itemsize: int, step: CollectiveStep, form: int) -> Bucket:
    return itemsize, step.kind, step.axes, step.dim, step.concat, form
