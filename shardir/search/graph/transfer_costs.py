"""The estimated times of redistributions, alone or with tensors that share buckets.

    d_w: partial over dp -> [{}, {}]            all-reduce over dp
    alone       all_reduce <sum> %d_w over <dp>             its latency, and its rate for each byte
    together    all_reduce <sum> %d_w, %d_b over <dp>       a share of the latency, the rate, and
                                                            the copy to the buffer

The path of a redistribution is the planner's for the tensor alone (algebra/routes.py): between
layouts that split it evenly the times of all paths are found at once; others are planned and priced
one by one, by the steps of fuse-communication.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
from xdsl.dialects.builtin import TensorType

from shardir.algebra.arrays import Flags, Indices, Table
from shardir.algebra.collectives import CollectiveStep, Transfer
from shardir.algebra.forms import copying
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import estimated_seconds, plan
from shardir.algebra.routes import Routes, routes
from shardir.algebra.steps import packing_ops_seconds
from shardir.dialects.dist import RedistributeOp, layout_of
from shardir.dialects.nn.types import itemsize, unsharded_type
from shardir.search.graph.latency_shares import BucketKey, LatencyShares, bucket_key
from shardir.search.graph.step_prices import KindPrices, StepPrice, by_kind, step_price


class ValueTransfer(NamedTuple):
    """A redistribution of a tensor, from one layout to another."""

    type: TensorType
    source: Layout
    target: Layout


def transfer_of(op: RedistributeOp) -> ValueTransfer:
    """Return the transfer of a redistribution."""
    source, target = layout_of(op.value), layout_of(op.out)
    assert source is not None and target is not None
    return ValueTransfer(unsharded_type(op.value), source, target)


def transfer_seconds(
    mesh: Mesh,
    t: TensorType,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shares: LatencyShares | None = None,
) -> Table:
    """Return the estimated times of the redistributions from each source to each target, in
    seconds; with `shares`, of tensors that may share buckets."""
    shape, size = t.get_shape(), itemsize(t)
    found = path_seconds(mesh, t, sources, targets, shares)
    for i, j in np.argwhere(np.isinf(found)):
        ends = sources[i], targets[j]
        found[i, j] = (
            estimated_seconds(shape, mesh, *ends, size) if shares is None
            else _planned(mesh, shape, size, *ends, shares)[0]
        )  # fmt: skip
    return found


def path_seconds(
    mesh: Mesh,
    t: TensorType,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shares: LatencyShares | None = None,
) -> Table:
    """Return `transfer_seconds` where the planner has a path in a table; elsewhere infinity."""
    shape, size = t.get_shape(), itemsize(t)
    found = np.full((len(sources), len(targets)), inf)
    for costs, numbers, among in _numbered(mesh, t, sources, targets):
        table = costs.seconds(shape, size, shares)[numbers]
        found[among] = np.minimum(found[among], table)
    return found


def _numbered(
    mesh: Mesh, t: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]
) -> Iterator[tuple["TransferCosts", Any, Any]]:
    """Yield the tables of a tensor's paths, the places in each from the sources that it has to the
    targets that it has, and their places among all."""
    for reduction in {l.reduction for l in (*sources, *targets)}:
        costs = transfer_costs(mesh, len(t.get_shape()), reduction)
        if costs is not None:
            rows = [i for i, l in enumerate(sources) if l in costs.index]
            columns = [j for j, l in enumerate(targets) if l in costs.index]
            froms = [costs.index[sources[i]] for i in rows]
            tos = [costs.index[targets[j]] for j in columns]
            yield costs, np.ix_(froms, tos), np.ix_(rows, columns)


def bucket_price(
    mesh: Mesh, transfer: ValueTransfer, shares: LatencyShares
) -> tuple[float, dict[BucketKey, float]]:
    """Return the estimated time of a transfer with shares of buckets, and the latencies of its
    buckets, in seconds."""
    t, source, target = transfer
    shape, size = t.get_shape(), itemsize(t)
    reduction = source.reduction if source.partial else target.reduction
    costs = transfer_costs(mesh, len(shape), reduction)
    found = costs.in_buckets(shape, size, source, target, shares) if costs else None
    return found or _planned(mesh, shape, size, source, target, shares)


def _planned(
    mesh: Mesh, shape: Shape, itemsize: int, now: Layout, target: Layout, shares: LatencyShares
) -> tuple[float, dict[BucketKey, float]]:
    """Return the `bucket_price` of a plan that is in no table. By way of a host a value moves
    alone, between its own copies."""
    total, found = 0.0, dict[BucketKey, float]()
    if now.host or target.host:
        return estimated_seconds(shape, mesh, now, target, itemsize), found
    for step in plan(shape, mesh, now, target, itemsize):
        price = step_price(mesh, shape, now, step, itemsize)
        seconds, bucket = price.with_shares(shares, mesh)
        if bucket is not None:
            found[bucket] = price.latency(bucket)
        total, now = total + seconds, step.layout
    return total, found


@lru_cache(maxsize=256)
def transfer_costs(mesh: Mesh, rank: int, reduction: str) -> "TransferCosts | None":
    """Return the costs between the layouts of tensors of `rank` dimensions; None where there are
    too many layouts."""
    found = routes(mesh, rank, reduction)
    return TransferCosts(found) if found else None


class TransferCosts:
    """The planner's paths between evenly split layouts, with their times in buckets."""

    def __init__(self, found: Routes):
        self.routes, self.index = found, found.index
        self._shared: tuple[LatencyShares | None, dict[tuple[Shape, int], Table]] = (None, {})
        self._uneven: dict[tuple[Shape, int], list[tuple[Indices, KindPrices]]] = {}

    def seconds(self, shape: Shape, itemsize: int, shares: LatencyShares | None = None) -> Table:
        """Return the time of each path for a tensor of this shape: [from, to]; infinite from or to
        layouts that do not split it evenly. With `shares` its moves may be in buckets."""
        if shares is None:
            return self.routes.seconds(shape, itemsize)
        if self._shared[0] != shares:  # only the tables of the last shares are retained
            self._shared = shares, {}
        tables, key = self._shared[1], (shape, itemsize)
        if key not in tables:
            size = prod(shape) * itemsize
            shared = self._in_buckets(size, itemsize, shares).min(axis=0)
            even = self.routes.even(shape)
            shared = np.where(even[:, None] & even, shared, inf)
            each = np.minimum(self.routes.single_move_seconds(shape, itemsize), shared)
            for ends, prices in self._uneven_moves(shape, itemsize, even):
                shared = prices.in_buckets(shares, self.routes.mesh)
                each[*ends.T] = np.minimum(each[*ends.T], shared)
            tables[key] = self._along(shape, itemsize, each)
        return tables[key]

    def _call(self, before: Layout, step: CollectiveStep) -> float:
        """Return the seconds that a move in a bucket takes more than its bytes and ops, at most: of
        one more call of the library where it needs no buffer."""
        mesh, shape = self.routes.mesh, (2 * self.routes.mesh.size,) * self.routes.rank
        transfer = Transfer(mesh, shape, before, step, alone=False, typical=True)
        return mesh.cluster_or_default.overhead if step.record.is_direct(transfer) else inf

    def _uneven_moves(
        self, shape: Shape, itemsize: int, even: Flags
    ) -> list[tuple[Indices, KindPrices]]:
        """Return the moves from and to uneven shards that are on paths and may share a bucket: of
        each kind the layouts before and after each, and their prices."""
        if even.all():
            return []
        if (found := self._uneven.get((shape, itemsize))) is None:
            lengths, via = self.routes.paths(shape, itemsize)
            now, end = np.nonzero(np.isfinite(lengths))
            used = np.zeros(lengths.shape, dtype=np.bool_)
            while len(now):
                after = via[now, end]
                used[now, after] = True
                now, end = after[after != end], end[after != end]
            _, kind = self._kinds
            used &= ~(even[:, None] & even) & (kind >= 0)
            prices = list[tuple[list[int], StepPrice]]()
            for i, j in np.argwhere(used).tolist():
                step, before = self.routes.step(shape, itemsize, i, j), self.routes.layouts[i]
                if step.record.fusible:  # else an exchange is faster
                    prices.append(
                        ([i, j], step_price(self.routes.mesh, shape, before, step, itemsize))
                    )
            found = self._uneven[shape, itemsize] = by_kind(prices)
        return found

    def in_buckets(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout, shares: LatencyShares
    ) -> tuple[float, dict[BucketKey, float]] | None:
        """Return the time of a tensor's path from one layout to another, and the buckets that it is
        in, each with its latency; None if there is no such path."""
        hops = self.routes.hops(shape, itemsize, source, target)
        if hops is None:
            return None
        size, total, found = prod(shape) * itemsize, 0.0, dict[BucketKey, float]()
        each, even = self.routes.single_move_seconds(shape, itemsize), self.routes.even(shape)
        mesh = self.routes.mesh
        for i, j in hops:
            step = self.routes.step(shape, itemsize, i, j)
            latency, rate = (costs[:, i, j] for costs in self.routes.costs)
            alone = float(each[i, j])
            if alone > 0 and not (even[i] and even[j]):
                price = step_price(mesh, shape, self.routes.layouts[i], step, itemsize)
                alone, bucket = price.with_shares(shares, mesh)
                if bucket is not None:
                    found[bucket] = price.latency(bucket)
            elif alone > 0 and step.record.fusible:
                part = self._shares(size, itemsize, shares, [step], np.array([i]))[:, 0, 0]
                packing = self._ops[i, j] + min(self._copying[i] * size, self._calls[i, j])
                shared = latency * part + rate * size + packing
                form = int(shared.argmin())
                if shared[form] < alone:
                    alone = float(shared[form])
                    found[bucket_key(itemsize, step, form)] = float(latency[form])
            total += alone
        return total, found

    def _along(self, shape: Shape, itemsize: int, cost: Table) -> Table:
        """Return the sum of the moves' costs along each path."""
        lengths, _ = self.routes.paths(shape, itemsize)
        total = np.where(np.isinf(lengths), inf, 0.0)
        for moving, now, after in self._moves(shape, itemsize):
            total += np.where(moving, cost[now, after], 0.0)
        return total

    def _moves(self, shape: Shape, itemsize: int) -> Iterator[tuple[Flags, Indices, Indices]]:
        """Yield the next move of each path, [from, to], as long as there are any: whether there is
        one, and its ends."""
        _, via = self.routes.paths(shape, itemsize)
        now, ends = np.indices(via.shape)
        while (moving := now != ends).any():
            after = np.where(moving, via[now, ends], ends)
            yield moving, now, after
            now = after

    def _in_buckets(self, size: int, itemsize: int, shares: LatencyShares) -> Table:
        """Return the cost of each move of a tensor in a bucket: [form, from, to]."""
        latency, rate = self.routes.costs
        steps, kind = self._kinds
        sources = np.arange(len(self.index))
        part = self._shares(size, itemsize, shares, steps, sources)
        part = np.pad(part, ((0, 0), (0, 1), (0, 0)), constant_values=1.0)
        packing = self._ops + np.minimum(self._copying[:, None] * size, self._calls)
        return latency * part[:, kind, sources[:, None]] + rate * size + packing

    def _shares(
        self, size: int, itemsize: int, shares: LatencyShares, steps: Sequence[CollectiveStep],
        sources: np.ndarray[Any, np.dtype[np.int64]],
    ) -> Table:  # fmt: skip
        """Return the shares of a tensor of so many bytes: [form, step, source]."""
        forms, operands = len(self.routes.costs[0]), size * self._part[sources]
        found = [
            shares.of_operands(bucket_key(itemsize, step, form), operands, self.routes.mesh)
            for form in range(forms) for step in steps
        ]  # fmt: skip
        return np.array(found).reshape(forms, len(steps), len(sources))

    @cached_property
    def _kinds(self) -> tuple[list[CollectiveStep], np.ndarray[Any, np.dtype[np.int64]]]:
        """A step for each kind that may share a bucket; for each pair of layouts the kind of its
        move, the last where the move communicates nothing or where there is none."""
        n = len(self.index)
        steps: dict[BucketKey, tuple[int, CollectiveStep]] = {}
        kind = np.full((n, n), -1)
        for ends, step in self.routes.named:
            if step.record.fusible:
                kind[*ends.T], _ = steps.setdefault(bucket_key(0, step, 0), (len(steps), step))
        return [step for _, step in steps.values()], kind

    @cached_property
    def _copying(self) -> Table:
        """The seconds for each byte of a tensor to copy its shards into a bucket and out of it, of
        each layout."""
        return copying(1, self.routes.mesh) * self._part

    @cached_property
    def _ops(self) -> Table:
        """The seconds of the ops that bring a value into a bucket and out of it: [from, to]."""
        steps, _ = self._kinds
        return self._of_moves([packing_ops_seconds(self.routes.mesh, step) for step in steps])

    @cached_property
    def _calls(self) -> Table:
        """The seconds that a move in a bucket takes more than its bytes and ops, at most: those of
        one more call of the library where it needs no buffer: [from, to]."""
        steps, kind = self._kinds
        first = [np.argwhere(kind == k)[0] for k in range(len(steps))]
        return self._of_moves([
            self._call(self.routes.layouts[i], s) for s, (i, _) in zip(steps, first, strict=True)
        ])  # fmt: skip

    def _of_moves(self, seconds: Sequence[float]) -> Table:
        """Return those of each move by its kind, 0 where nothing moves: [from, to]."""
        _, kind = self._kinds
        moving = np.add(*self.routes.costs).min(axis=0) > 0
        return np.where(moving, np.array([*seconds, 0.0])[kind], 0.0)

    @cached_property
    def _part(self) -> Table:
        """The part of a tensor that a device has in each layout."""
        mesh = self.routes.mesh
        return np.array([1 / mesh.extent(l.complete.used) for l in self.routes.layouts])
