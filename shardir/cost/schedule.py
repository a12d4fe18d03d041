"""The time of ops together: collectives are in flight while the device computes.

A device runs its ops one after the other. A collective of s seconds, a of which are its form's
latency, occupies the links of the outermost level that it crosses: collectives on the same links
run one after the other. During an `async` one the device continues, but loses `interference` of
s - a (cores, caches and memory that both use), and `occupancy` of a, in which it is itself at work:
it calls the library, and sends and takes messages (o of LogP: Culler et al., 1993). Of a copy to or
from the host a is lost to nothing. A `dist.wait` ends when the collective ends:

    lost    = interference * (s - a) + occupancy * a
    start   end = max(now, links free) + s;  links free = end - (1 - gap) * a;  now += lost
    wait    now = max(now, end)

So a collective and a computation of c seconds beside it take max(s, lost + c). The next one in
flight begins when devices have done their work for this one's messages, not when the last has
arrived: `gap` (g of LogP) is the occupancy, and 1 where devices are not at work in latencies.

A collective begins when the last device of its group does. Where devices share cores, those that
compute the same are held up again and again, each at other times, so that they are the further
apart the longer they have computed since those of the group have begun a collective together, over
the same axes or more: as random walks, by the root of that time. The last one of n is as late as
the largest of n normal numbers, of which `skew` is the variance in a second, is expected to be
(e(n) for a variance of 1), or as much as it has computed if that is less:

    late    = min(computed, e(n) sqrt(skew computed));  now += late

A device loses that time beside a collective in flight as well: when others are late, the cores that
they share have worked for it. In a collective over other axes each device has waited for the last
of its group there; so what was computed before it counts with the variance of the largest of so
many numbers, in place of 1.

A function begins after a run of it, as steps do: what it has computed since its last collective
counts for the first.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from heapq import heappop, heappush
from itertools import count
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
    """An op in its place in time, in seconds from the first one: the device is at it from `reached`
    to `left`. A collective is on the links of a level, or a copy on that to the host, from `begin`
    to `end`."""

    cost: OpCost
    reached: float
    left: float
    begin: float
    end: float
    level: str | None = None
    """The level; empty of a copy to or from the host, None of an op that does not communicate."""
    late: float = 0.0
    """Of the seconds from `reached` to `left`, the first, in which another device is late."""


def schedule(costs: Iterable[OpCost], mesh: Mesh) -> Iterator[TimedOp]:
    """Yield the ops in the order of the program, each with its times."""
    on, costs = mesh.cluster_or_default, list(costs)
    now, free, ends = 0.0, dict[str, float](), dict[Operation, float]()
    computed, apart = 0.0, _Apart(costs if on.skew else (), mesh)
    new = partial(tuple.__new__, TimedOp)  # half the time of TimedOp()
    for c in costs:
        op, _, _, seconds, axes, form, latency = c
        reached, name, late = now, None, 0.0
        begin = end = now
        if isinstance(op, dist.WaitOp):
            now = max(now, ends.get(op.started, now))  # of a group of one nothing is in flight
        elif not form:
            now = end = now + seconds
            computed += seconds
        else:
            name, late = level_of(mesh, axes), apart.begin(axes, computed)
            now += late
            begin = max(now, free.get(name, 0.0))
            end = free[name] = begin + seconds
            if dist.is_started(op):
                ends[op] = end
                if axes:
                    free[name] = end - (1 - on.gap) * latency
                waited = latency if axes else 0.0  # of a copy's latency nothing is lost
                now += on.lost(seconds - latency + waited, waited)
            else:
                now = end
        yield new((c, reached, now, begin, end, name, late))


class _Apart:
    """The distance of devices that have computed some seconds, from 0 on after a run of the same
    ops; those of a copy, over no axes, do not wait for each other.

    Args:
        costs: of the ops; without them devices are always together.
    """

    def __init__(self, costs: Sequence[OpCost], mesh: Mesh):
        self._mesh, self._skew = mesh, mesh.cluster_or_default.skew
        groups = dict.fromkeys(c.axes for c in costs if c.form and c.axes)
        self._within = {a: [b for b in groups if mesh.without(a, b) is not None] for a in groups}
        self._across = {a: [b for b in groups if not _names(a) & _names(b)] for a in groups}
        self._met = dict.fromkeys(groups, 0.0)
        """What devices had computed when those of each group last began a collective."""
        self._counted, self._squares = dict(self._met), dict(self._met)
        """What they had when one over other axes last began, and the square of the delay by then,
        without the skew."""
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
        """Return by how many seconds the last device of a group is late, when it begins a
        collective."""
        if axes not in self._met:
            return 0.0
        squares = self._squares[axes] + self._square(axes, computed)
        late = min(computed - self._met[axes], sqrt(self._skew * squares))
        _, remains = largest(self._mesh.extent(axes))
        for group in self._across[axes]:
            self._squares[group] += remains * self._square(group, computed)
            self._counted[group] = computed
        for group in self._within[axes]:
            self._met[group] = self._counted[group] = computed
            self._squares[group] = 0.0
        return late

    def _square(self, axes: Axes, computed: float) -> float:
        """Return the square of the delay of the last device by what is not counted yet."""
        mean, _ = largest(self._mesh.extent(axes))
        return mean**2 * (computed - self._counted[axes])


def _names(axes: Axes) -> set[str]:
    return {a.name for a in axes}


@cache
def largest(n: int) -> tuple[float, float]:
    """Return the expectation and the variance of the largest of n normal numbers."""
    normal, step = NormalDist(), 0.01
    numbers = [step * i for i in range(-800, 801)]
    each = [step * n * normal.pdf(x) * normal.cdf(x) ** (n - 1) for x in numbers]
    mean = sum(p * x for p, x in zip(each, numbers, strict=True))
    return mean, sum(p * (x - mean) ** 2 for p, x in zip(each, numbers, strict=True))


def length(times: Iterable[TimedOp]) -> float:
    """Return the seconds from the first op to the end of the last."""
    last = 0.0
    for _, _, left, _, end, _, _ in times:
        last = max(last, left, end)
    return last


class Waiting(NamedTuple):
    """The seconds in which the device computes nothing, for a collective or copy; until `begun`
    for the last device that begins it."""

    cost: OpCost
    begin: float
    begun: float
    end: float


def waiting(times: Iterable[TimedOp]) -> Iterator[Waiting]:
    """Yield when the device waits: for a blocking collective; for the share that one in flight
    takes from it, when that is started; and for its end.

    These and the computation are all of the time, one after the other: each collective that is
    started is waited for (C14).
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
            yield Waiting(cost, t.reached, t.reached + t.late, t.left)


def elapsed(costs: Iterable[OpCost], mesh: Mesh) -> float:
    """Return the seconds from the first op, in the order of the program, to the end of the last."""
    return length(schedule(costs, mesh))


def level_of(mesh: Mesh, axes: Axes) -> str:
    """Return the name of the cluster's level whose links a group over `axes` shares; empty of no
    axes, which is the link to the host."""
    levels = levels_of(mesh, axes)
    return levels[-1][1].name if levels else ""


def cuts(
    sending: Sequence[float], ready: Sequence[float], latency: float, on: Cluster
) -> list[int]:
    """Return the indices after which to cut a buffer, so that its last part ends first.

    The last index is the number of values. A part starts when its last value is available; it costs
    the links their share of a latency, and the device an op's overhead and its work in the latency.

    Args:
        sending: the seconds of the bytes of each value.
        ready: when each is available, ascending, if the device loses no time to collectives.
    """
    sent, begin = (np.concatenate([[0.0], x]) for x in (np.cumsum(sending), ready))
    number = len(sent) - 1
    ahead = (1 - on.interference) * sent  # by how much sending at once is ahead of the device
    each, latency = on.overhead + on.occupancy * latency, on.gap * latency
    after = latency + begin  # the end of the first j values in `parts` parts, less sent[j]
    bound = latency + max(0.0, (begin[1:] - ahead[:-1]).max())  # each value alone, free latencies
    best, count, before = np.inf, 0, list[np.ndarray]()
    for parts in range(1, number + 1):
        if (cost := after[-1] + sent[-1] + (parts - 1) * each) < best * IMPROVEMENT:
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
        if bound + sent[-1] + parts * each >= best * IMPROVEMENT or (more >= after).all():
            break
        after = more
    found = [number]
    for previous in reversed(before[: count - 1]):
        found.append(int(previous[found[-1]]))
    return found[::-1]


class Flight(NamedTuple):
    """A chain of collectives: the op after which it can start (-1: none), and the op before which
    it must have ended; each with its level, its seconds, and those of them that are latency."""

    after: int
    before: int
    moves: tuple[tuple[str, float, float], ...]


def elapsed_at_best(seconds: Sequence[float], flights: Iterable[Flight], mesh: Mesh) -> float:
    """Return the seconds from the first op to the end of the last, if each collective starts when
    its operands are there and its links are free, those that are needed first before others.

    Args:
        seconds: of each op, in the order of the program.
    """
    on = mesh.cluster_or_default
    starting: dict[int, list[Flight]] = {}
    for flight in flights:
        starting.setdefault(flight.after, []).append(flight)
    now, free, last = 0.0, dict[str, float](), [0.0]
    waiting: list[tuple[int, int, float, Flight]] = []  # by the op that needs it
    started: list[tuple[int, float]] = []  # by the op that needs it, with the end
    number = count()

    def offer(op: int) -> None:
        for flight in starting.get(op, []):
            heappush(waiting, (flight.before, next(number), now, flight))

    def start(at: float, flight: Flight) -> float:
        """Occupy the links, and return the end."""
        for level, duration, latency in flight.moves:
            at = max(at, free.get(level, 0.0)) + duration
            free[level] = at - (1 - on.gap) * latency
            last.append(at)
        return at

    offer(-1)
    for i, duration in enumerate(seconds):
        while waiting and waiting[0][0] <= i:
            _, _, ready, flight = heappop(waiting)
            now = max(now, start(ready, flight))
        while started and started[0][0] <= i:
            now = max(now, heappop(started)[1])
        end = now + duration
        while waiting:
            needed, _, ready, flight = waiting[0]
            if max(ready, free.get(flight.moves[0][0], 0.0)) >= end:
                break
            heappop(waiting)
            heappush(started, (needed, start(ready, flight)))
            end += sum(on.lost(s, latency) for _, s, latency in flight.moves)
        now = end
        offer(i)
    for _, _, ready, flight in sorted(waiting, key=lambda w: w[:2]):
        start(ready, flight)
    return max(now, *last)
