"""Times of moves between layouts of even shards, and lower bounds of what is left, for many of them
at once: arrays of the numbers that the records give one by one (`step_seconds`, `seconds_bound`).

    {c} gathered from [{a}, {b, c}]      the forms of {c} alone, by the share of a device
    an exchange, or the bound            by the places of the old and the new splits
"""

from math import prod

import numpy as np

from shardir.algebra.bound import minimum_factors, minimum_latency
from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.even_bound import EvenBound
from shardir.algebra.even_codes import Layouts, Spelling, union
from shardir.algebra.even_places import PrimePlaces
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import Table
from shardir.algebra.forms import copying, rounds
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.named_costs import NamedMove, first_dims, named_forms
from shardir.algebra.steps import step_seconds
from shardir.algebra.traffic import Indices, solutions

REPLICATED, SHARDED, PARTIAL, _ = AxisState

KINDS = (
    (REPLICATED, SHARDED), (REPLICATED, PARTIAL), (SHARDED, PARTIAL), (SHARDED, REPLICATED),
    (SHARDED, SHARDED), (PARTIAL, REPLICATED), (PARTIAL, SHARDED),
)  # fmt: skip
"""The changes of the states of some axes, by number; the number after these is an exchange."""

LOCAL, EXCHANGE = 3, len(KINDS)
"""The number of kinds, the first ones, without communication; and that of an exchange."""


class EvenTimes:
    """The times of moves of a tensor that the mesh's size divides in each dimension, and the bounds
    to a target; all layouts are over the sub-axes of `spelling`."""

    def __init__(self, mesh: Mesh, shape: Shape, itemsize: int, spelling: Spelling, target: Layout):
        self.mesh, self.spelling, self.target = mesh, spelling, target
        self.shape, self.itemsize, self.size = shape, itemsize, prod(shape) * itemsize
        self.places = PrimePlaces(mesh, spelling)
        self._forms: dict[tuple[int, Axes, int, int], int] = {}
        self._rows: dict[int, int] = {}
        """The rows of the forms of named collectives, by number."""
        self._form_costs = np.empty((0, 0, 2))
        self._set_levels()
        self._set_bound()

    def _set_levels(self) -> None:
        cluster, primes = self.mesh.cluster_or_default, self.places.primes
        self._byte_seconds = [1 / level.bandwidth for level in cluster.levels]
        self._latencies = np.array([level.latency for level in cluster.levels])
        self._rounds = np.array([0.0, *map(rounds, range(1, self.mesh.size + 1))])
        self._factor, self._copying = cluster.times["exchange"], copying(1, self.mesh)
        self._byte_factor = cluster.byte_times["exchange"]
        self._far = [
            sum(1 << i for i, level in enumerate(primes.levels) if level > near)
            for near in range(-1, len(cluster.levels))
        ]

    def _set_bound(self) -> None:
        """Keep what the bounds to the target need (even_bound.py)."""
        spelling, target = self.spelling, self.target
        self._bound = EvenBound(self.mesh, self.shape, self.itemsize)
        self._end = self._bound.target(target)
        self._partial_parts: dict[int, tuple[float, float, bool, list[bool]]] = {}
        self._solutions: dict[int, list[int]] = {}
        self._target_codes = np.array([spelling.code(axes) for axes in target.dims])
        self._target_primes = self.places.codes(self._target_codes)
        splits = sum(map(spelling.bitmask, target.dims))
        factors = minimum_factors(self.mesh)
        self._partial = spelling.bitmask(target.partial)

        def latency(x: float, i: int) -> float:
            split = splits >> i & 1
            each = minimum_latency(self.mesh, spelling.axes[i])
            return x + each * (factors.moved if split else factors.ended)

        self._moved = spelling.over_sets(0, latency)
        stays = ~int(self.places.of_sets[self._partial])
        self._outside = [
            stays & sum(1 << i for i, level in enumerate(self.places.primes.levels) if level > near)
            for near in self._bound.levels
        ]

    # ---- the bound of what is left ----

    def bounds(self, layouts: Layouts) -> Table:
        """Return a lower bound of the time of any plan from each layout to the target."""
        bound, end = self._bound, self._end
        splits = layouts.splits
        parts = np.array([self._partial_part(p) for p in layouts.partial.tolist()], dtype=object)
        latency, mean = (parts[:, i].astype(np.float64) for i in (0, 1))
        is_reduced = parts[:, 2].astype(np.bool_)
        others = np.array([*parts[:, 3]], dtype=np.bool_)
        latency += self._latency_left(splits)
        places = self.places.compared(self.places.codes(splits), self._target_primes)
        one_in = np.ones((len(splits), len(bound.levels)))
        paired = np.flatnonzero(places.paired & self._outside[0])
        if len(paired):
            keys, at = np.unique(places.pairs[paired], return_inverse=True)
            one_in[paired] = np.array([self._one_in(key) for key in keys.tolist()])[at]
        for k, far in enumerate(self._outside):
            found = 1 / self.places.primes.extents[places.gone & far]
            share = (1 - found / one_in[:, k]) / end.equal[k] * bound.byte_seconds[k]
            mean += np.where(others[:, k], end.elements * share, 0)
        has = end.elements / self.places.primes.extents[places.gone & self._outside[0]]
        has = np.where(~is_reduced & (one_in[:, 0] == 1), np.rint(has), 0)
        lacking = end.elements - has
        one = np.ceil(lacking / end.sharers) * bound.byte_seconds[0]
        complete = (layouts.partial == 0) & (not self.target.partial)
        factors = bound.factors
        mean *= np.where(complete, factors.complete, factors.received)
        result = np.maximum(mean, factors.received * one) + latency
        for i in np.flatnonzero(~places.known).tolist():
            result[i] = bound.seconds(self.layout(layouts[i]), self.target)
        return result

    def layout(self, one: Layouts) -> Layout:
        """Return the layout of one row."""
        dims = tuple([self.spelling.spelled(code) for code in one.splits.tolist()])
        return Layout(self.mesh.name, dims).with_partial(self.spelling.of_bits(int(one.partial)))

    def _partial_part(self, partial: int) -> tuple[float, float, bool, list[bool]]:
        if (found := self._partial_parts.get(partial)) is None:
            dims = ((),) * len(self.target.dims)
            layout = Layout(self.mesh.name, dims).with_partial(self.spelling.of_bits(partial))
            part = self._bound.partial_part(layout, self._end)
            others = [k in part.others for k in range(len(self._bound.levels))]
            found = part.latency, part.seconds, part.reduced, others
            self._partial_parts[partial] = found
        return found

    def _latency_left(self, splits: Indices) -> Table:
        """Return the latencies of sub-axes that split dimensions and must be in collectives."""
        spelling, wanted = self.spelling, np.broadcast_to(self._target_codes, splits.shape)
        rest, alive = np.zeros(len(splits), dtype=np.int64), np.ones(splits.shape, dtype=np.bool_)
        for _ in range(int(spelling.lengths(splits.max(initial=0)))):
            (splits, have), (wanted, want) = (np.divmod(x, spelling.base) for x in (splits, wanted))
            alive = alive & (have == want)
            rest |= union(np.where(alive, 0, spelling.bits[have]))
        return self._moved[rest & ~self._partial]

    def _one_in(self, pairs: int) -> list[int]:
        """Return n for each level: one in n devices has equal indices along the sub-axes of each of
        the pairs whose old one is outside of it."""
        if (found := self._solutions.get(pairs)) is None:
            primes, each, have, code = self.places.primes, [], 0, pairs
            while code:
                code, want = divmod(code, primes.base)
                have += 1
                if want:
                    each.append((have, primes.axes[have - 1], primes.axes[want - 1]))
            found = [
                solutions([(a, b) for i, a, b in each if far >> (i - 1) & 1])
                for far in self._outside
            ]
            self._solutions[pairs] = found
        return found

    # ---- the times of moves ----

    def seconds(
        self, before: Layouts, after: Layouts, kinds: Indices, axes: Indices, dims: Indices
    ) -> Table:
        """Return the time of each move in its fastest form.

        Args:
            kinds: the numbers of KINDS, or EXCHANGE.
            axes: the codes of the axes whose state changes; of an exchange 0.
            dims: the dimension that is sliced, scattered or gathered, and the one that an
                all-to-all concatenates, or -1: [move, 2].
        """
        found = np.zeros(len(kinds))
        named = np.flatnonzero((kinds >= LOCAL) & (kinds < EXCHANGE))
        if len(named):
            found[named] = self._named(
                before[named], after[named], kinds[named], axes[named], dims[named]
            )
        exchanged = np.flatnonzero(kinds == EXCHANGE)
        if len(exchanged):
            found[exchanged] = self._exchanges(before[exchanged], after[exchanged])
        return found

    def _named(
        self, before: Layouts, after: Layouts, kinds: Indices, axes: Indices, dims: Indices
    ) -> Table:
        first = dims.clip(max=1)
        first[:, 1] = np.where((dims == 1).all(axis=1) | (first == 1).all(axis=1), 2, first[:, 1])
        keys = ((axes * (EXCHANGE + 1) + kinds) * 4 + first[:, 0]) * 4 + first[:, 1] + 1
        distinct, example, at = np.unique(keys, return_index=True, return_inverse=True)
        for key, i in zip(distinct.tolist(), example.tolist(), strict=True):
            if key not in self._rows:
                self._rows[key] = self._form(int(kinds[i]), int(axes[i]), *first[i].tolist())
        rows = np.array([self._rows[key] for key in distinct.tolist()])[at]
        extents = self.spelling.extents
        have, want = (extents[self.spelling.masks(x.splits)] for x in (before, after))
        sizes = self.size / np.minimum(have, want).prod(axis=1)
        latency, rate = self._form_costs[rows].transpose(2, 1, 0)
        return (latency + rate * sizes).min(axis=0)

    def _form(self, kind: int, axes: int, dim: int, concat: int) -> int:
        """Return the row of the forms of a named collective, for a tensor that no other axes
        split. Of the orders of its axes only the mesh's own costs less to pack."""
        spelled = self.spelling.spelled(axes)
        in_order = tuple(sorted(spelled, key=self.mesh.order))
        if spelled != in_order:
            spelled = in_order[::-1]
        key = kind, spelled, dim, concat
        if (row := self._forms.get(key)) is None:
            move = NamedMove(*KINDS[kind], spelled, dim, concat)
            forms = [form[1:] for form in named_forms(self.mesh, first_dims(move))]
            row = self._forms[key] = len(self._form_costs)
            count = max(len(forms), self._form_costs.shape[1])
            forms += [forms[-1]] * (count - len(forms))
            known = self._form_costs
            if row:
                more = np.repeat(known[:, -1:], count - known.shape[1], axis=1)
                known = np.concatenate([known, more], axis=1)
            else:
                known = np.empty((0, count, 2))
            self._form_costs = np.concatenate([known, np.array([forms])])
        return row

    def _exchanges(self, before: Layouts, after: Layouts) -> Table:
        """Return the times of exchanges (even_prices.py)."""
        spelling, primes = self.spelling, self.places.primes
        old, new = spelling.masks(before.splits), spelling.masks(after.splits)
        changed = before.splits != after.splits
        extents = spelling.extents
        n = np.where(changed, extents[old], 1).prod(axis=1)
        reach = np.where(changed, spelling.reach[old], 0).max(axis=1)
        had, has = (union(x) for x in (old, new))
        moving = union(np.where(changed, old, 0))
        copies = n / extents[moving & has]
        places = self.places.compared(
            self.places.codes(before.splits), self.places.codes(after.splits)
        )
        within = [
            np.where(places.paired & far, 0, 1 / primes.extents[places.gone & far])
            for far in self._far
        ]
        receiving = sum(
            (within[k + 1] - within[k]) * seconds for k, seconds in enumerate(self._byte_seconds)
        )
        used = self.places.of_sets[had]
        wanted = primes.extents[places.gone_of_new & ~used]
        kept = np.where(places.paired_of_new & used, 0, 1 / primes.extents[places.gone_of_new])
        sent = np.maximum(copies / wanted - kept, 0) / extents[had]
        latency = self._factor * self._rounds[n.astype(np.int64)] * self._latencies[reach]
        received = self._byte_factor * receiving + self._copying * (1 - within[0])
        rate = received / extents[has] + self._copying * 2 * sent
        found = latency + rate * self.size
        for i in np.flatnonzero(~places.known).tolist():
            now, then = self.layout(before[i]), self.layout(after[i])
            step = CollectiveStep("exchange", exchange_axes(now, then), then)
            found[i] = step_seconds(self.mesh, self.shape, now, step, self.itemsize)
        return found
