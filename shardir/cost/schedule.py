"""The schedule of a program: when ops run, while collectives are in flight.

A device runs its ops in program order. A collective of s seconds, of which a are the latency of its
form, occupies the links of the outermost level that it crosses. Collectives on one level's links
run one after the other. Beside an `async` collective the device continues, but it loses two shares:
`interference` of s - a, since both use cores, caches and memory; and `occupancy` of a, in which the
device calls the library and handles messages (o of LogP: Culler et al., 1993). The latency of a
host copy costs the device nothing. A `dist.wait` ends when the collective ends:

    lost    = interference * (s - a) + occupancy * a
    start   end = max(now, links free) + s;  links free = end - (1 - gap) * a;  now += lost
    wait    now = max(now, end)

So a collective and a computation of c seconds beside it take max(s, lost + c). The links are free
for the next collective once the devices have handled the messages, before the last message has
arrived: `gap` (g of LogP) is the occupancy, and 1 on clusters whose devices do no work in
latencies.

A collective begins when the last device of its group does. Devices that share cores are interrupted
at random, so they drift apart as random walks: by the root of the seconds computed since the group
last began a collective over these axes or more. `skew` is the variance after one second, and e(n)
the expected largest of n standard normal numbers. The last of n devices is late by

    late    = min(computed, e(n) sqrt(skew computed));  now += late

A device loses this time beside a collective in flight as well: the cores that it shares have worked
for the late device. A collective over other axes makes each device wait for the last of its group
there. So computation before that collective counts with the variance of the largest of n normal
numbers, in place of 1.

A function begins after another run of it, as training steps do. So the computation after its last
collective counts for its first.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.forms import levels_of
from shardir.algebra.mesh import Axes, Mesh
from shardir.cost.seconds import OpCost
from shardir.dialects import dist


class TimedOp(NamedTuple):
    """The times of an op, in seconds from the begin of the first op.

    Attributes:
        reached: the device begins the op.
        left: the device goes on to the next op.
        begin: a collective begins to use its level's links, a copy the link to the host.
        end: that use ends.
        level: the level's name; empty for a host copy, None for an op that does not communicate.
        late: the seconds after `reached` in which another device of the group is late.
    """

    cost: OpCost
    reached: float
    left: float
    begin: float
    end: float
    level: str | None = None
    late: float = 0.0


def schedule(costs: Iterable[OpCost], mesh: Mesh) -> Iterator[TimedOp]:
    """Yield the ops in program order, each with its times."""
    on, costs = mesh.cluster_or_default, list(costs)
    now, free, ends = 0.0, dict[str, float](), dict[Operation, float]()
    computed, skew = 0.0, _Skew(costs if on.skew else (), mesh)
    new_timed_op = partial(tuple.__new__, TimedOp)  # half the time of TimedOp()
    for c in costs:
        op, _, _, seconds, axes, form, latency = c
        reached, name, late = now, None, 0.0
        begin = end = now
        if isinstance(op, dist.WaitOp):
            now = max(now, ends.get(op.started, now))  # a group of one has nothing in flight
        elif not form:
            now = end = now + seconds
            computed += seconds
        else:
            name, late = level_of(mesh, axes), skew.begin(axes, computed)
            now += late
            begin = max(now, free.get(name, 0.0))
            end = free[name] = begin + seconds
            if dist.is_started(op):
                ends[op] = end
                if axes:
                    free[name] = end - (1 - on.gap) * latency
                occupied = latency if axes else 0.0  # a host copy's latency costs nothing
                now += on.lost(seconds - latency + occupied, occupied)
            else:
                now = end
        yield new_timed_op((c, reached, now, begin, end, name, late))


class _Skew:
    """How late the last device of a group is, as a function of the seconds computed so far.

    Host copies, over no axes, wait for no other device.

    Args:
        costs: the ops of a run, which is taken to follow a run of equal ops; empty for devices that
            never drift apart.
    """

    def __init__(self, costs: Sequence[OpCost], mesh: Mesh):
        self._mesh, self._skew = mesh, mesh.cluster_or_default.skew
        groups = dict.fromkeys(c.axes for c in costs if c.form and c.axes)
        self._within = {a: [b for b in groups if mesh.without(a, b) is not None] for a in groups}
        self._across = {a: [b for b in groups if not _names(a) & _names(b)] for a in groups}
        self._met = dict.fromkeys(groups, 0.0)
        """The seconds computed when each group last began a collective."""
        self._counted, self._squares = dict(self._met), dict(self._met)
        """The seconds computed when a collective over disjoint axes last began, and the square of
        the group's delay by then, divided by the skew."""
        computed = 0.0
        for c in costs:
            if c.form:
                self.begin(c.axes, computed)
            else:
                computed += c.seconds
        for group in groups:
            self._met[group] -= computed
            self._counted[group] -= computed

    def begin(self, axes: Axes, computed: float) -> float:
        """Begin a collective of a group; return by how many seconds its last device is late."""
        if axes not in self._met:
            return 0.0
        squares = self._squares[axes] + self._square(axes, computed)
        late = min(computed - self._met[axes], sqrt(self._skew * squares))
        _, remains = largest_normal(self._mesh.extent(axes))
        for group in self._across[axes]:
            self._squares[group] += remains * self._square(group, computed)
            self._counted[group] = computed
        for group in self._within[axes]:
            self._met[group] = self._counted[group] = computed
            self._squares[group] = 0.0
        return late

    def _square(self, axes: Axes, computed: float) -> float:
        """Return the square of the delay since `_counted`, divided by the skew."""
        mean, _ = largest_normal(self._mesh.extent(axes))
        return mean**2 * (computed - self._counted[axes])


def _names(axes: Axes) -> set[str]:
    return {a.name for a in axes}


@cache
def largest_normal(n: int) -> tuple[float, float]:
    """Return the expectation and the variance of the largest of n normal numbers."""
    normal, step = NormalDist(), 0.01
    numbers = [step * i for i in range(-800, 801)]
    weights = [step * n * normal.pdf(x) * normal.cdf(x) ** (n - 1) for x in numbers]
    mean = sum(p * x for p, x in zip(weights, numbers, strict=True))
    return mean, sum(p * (x - mean) ** 2 for p, x in zip(weights, numbers, strict=True))


def makespan(times: Iterable[TimedOp]) -> float:
    """Return the seconds from the first op to the last end of an op or collective."""
    last = 0.0
    for _, _, left, _, end, _, _ in times:
        last = max(last, left, end)
    return last


class Wait(NamedTuple):
    """An interval in which the device computes nothing because of a collective or copy. Until
    `begun` it waits for the last device of the group to begin."""

    cost: OpCost
    begin: float
    begun: float
    end: float


def device_waits(times: Iterable[TimedOp]) -> Iterator[Wait]:
    """Yield the waits of the device: a blocking collective, the share that a collective in flight
    takes from the device (at its start), and a `dist.wait`.

    Waits and computation are disjoint and make up all of the time, since each started collective is
    waited for (C14).
    """
    started = dict[Operation, OpCost]()
    for t in times:
        op, cost = t.cost.op, t.cost
        if dist.is_started(op):
            started[op] = cost
        if isinstance(op, dist.WaitOp):
            cost = started.get(op.started, cost)
        elif not cost.communicates:
            continue
        if t.left > t.reached:
            yield Wait(cost, t.reached, t.reached + t.late, t.left)


def seconds_in_order(costs: Iterable[OpCost], mesh: Mesh) -> float:
    """Return the makespan of ops in program order."""
    return makespan(schedule(costs, mesh))


def level_of(mesh: Mesh, axes: Axes) -> str:
    """Return the name of the outermost level that a group over `axes` crosses; empty without axes,
    which stands for the link to the host."""
    levels = levels_of(mesh, axes)
    return levels[-1][1].name if levels else ""


def cut_points(
    sending: Sequence[float], ready: Sequence[float], latency: float, on: Cluster
) -> list[int]:
    """Return where to cut a buffer into collectives, so that the last of them ends earliest.

    The result has the index after the last value of each part; its last element is the number of
    values. A part starts when its last value is available. It costs the links their share of a
    latency, and the device an op's overhead and its work in the latency.

    Args:
        sending: the seconds of the bytes of each value.
        ready: when each value is available, ascending, if no collective slows the device down.
        latency: of one collective, in seconds.
    """
    sent, begin = (np.concatenate([[0.0], x]) for x in (np.cumsum(sending), ready))
    number = len(sent) - 1
    ahead = (1 - on.interference) * sent  # by how much sending at once is ahead of the device
    part_cost, latency = on.overhead + on.occupancy * latency, on.gap * latency
    after = latency + begin  # the end of the first j values in `parts` parts, less sent[j]
    bound = latency + max(0.0, (begin[1:] - ahead[:-1]).max())  # each value alone, free latencies
    best, count, before = np.inf, 0, list[np.ndarray]()
    for parts in range(1, number + 1):
        if (cost := after[-1] + sent[-1] + (parts - 1) * part_cost) < best * IMPROVEMENT:
            best, count = cost, parts
        last = np.arange(parts + 1, number + 1)
        # Another part, from i on, waits for the links, longer the larger i is, or for its last
        # value, longer the smaller i is: the best i is where these are equal, or just before.
        at = parts + np.searchsorted((after + ahead)[parts:-1], begin[last])
        both = np.stack([np.maximum(at - 1, parts), np.minimum(at, last - 1)])
        begins = np.maximum(after[both], begin[last] - ahead[both])
        previous, more = np.zeros(number + 1, int), np.full(number + 1, np.inf)
        previous[last] = np.where(begins[0] <= begins[1], *both)
        more[last] = latency + begins.min(0)
        before.append(previous)
        if bound + sent[-1] + parts * part_cost >= best * IMPROVEMENT or (more >= after).all():
            break
        after = more
    points = [number]
    for previous in reversed(before[: count - 1]):
        points.append(int(previous[points[-1]]))
    return points[::-1]
