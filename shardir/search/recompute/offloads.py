"""The values that a step may keep in host memory, and the time of their copies: activations between
the forward and the backward part, and the states of an update in all of the step.

    forward     %h_1 = dist.copy %h       after the last op of the forward part that reads %h
    backward    %h_2 = dist.copy %h_1     right before the first op that needs it

Copies overlap with computation on the link of a device to its host, as `overlap-communication`
starts them: one to the host when its operand is there, one to the device as late as computation
before its use hides it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, OpResult, SSAValue

from shardir.analysis.aliasing import VIEWS
from shardir.cost.memory import is_on_host
from shardir.cost.seconds import cost_of
from shardir.dialects import dist, train
from shardir.dialects.nn.types import size_of
from shardir.rewriting.offloading import HostedValue, copy_of
from shardir.search.recompute.activations import Activations


class HostCopy(NamedTuple):
    """A copy to the host and as many bytes back: the number of the op after which it can start, -1
    if it can at once; the seconds in one direction, and those that do not depend on the bytes."""

    ready: int
    seconds: float
    latency: float


@dataclass(frozen=True)
class Offload:
    """Something that may be in host memory: a group of activations, or the states of an update.

    Attributes:
        copies: of activations each also has one back.
        values: of a group, those that are copied.
        views: the ops of it that make views of them, which are repeated.
        number: that of the update among the live ops.
        bytes: those of a device that are free in all of the step: the states'.
    """

    copies: tuple[HostCopy, ...]
    group: int | None = None
    values: tuple[HostedValue, ...] = ()
    views: tuple[Operation, ...] = ()
    update: Operation | None = None
    number: int | None = None
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """The time of all its copies on the link: of states three, those of activations twice."""
        back = self.copies if self.update is None else self.copies[:1]
        return sum(c.seconds for c in (*self.copies, *back))

    @property
    def sending(self) -> float:
        """The part of it that depends on the bytes."""
        back = self.copies if self.update is None else self.copies[:1]
        return sum(c.seconds - c.latency for c in (*self.copies, *back))


def offloads(found: Activations) -> Iterator[Offload]:
    """Yield what a function in the local view, on a mesh, may keep in host memory."""
    for n in range(len(found.groups)):
        if (offload := _activations(found, n)) is not None:
            yield offload
    at = {op: i for i, op in enumerate(found.ops)}
    for op, states in updates(found.f):
        copies = tuple(_copy(found, v) for v in op.operands[:2])
        yield Offload(copies, update=op, number=at[op], bytes=sum(map(size_of, states)))


def updates(f: FuncOp) -> Iterator[tuple[train.Update, Sequence[SSAValue]]]:
    """Yield the updates of a function whose states may be in host memory, with these: all are
    arguments on the device."""
    args = zip(f.body.block.args, train.arguments(f), strict=True)
    there = {v for v, a in args if a.role is train.Role.STATE and not is_on_host(v)}
    for op in f.body.block.ops:
        if isinstance(op, train.Update) and op.STATES:
            states = op.operands[2 : len(op.operands) - len(op.SCALARS)]
            if there.issuperset(states):
                yield op, states


def _activations(found: Activations, n: int) -> Offload | None:
    """Return how a group is copied; None if it stays on the device, or if other values of it are
    read later than those at its end."""
    g = found.groups[n]
    if not g.needed or g.pinned or any(op.name.startswith("train.") for op in g.ops):
        return None
    root, at = found.live.root, found.live.at
    last, views = dict[SSAValue, list[OpResult]](), dict[SSAValue, Operation]()
    for op in g.ops:
        if isinstance(op, VIEWS) and op not in {root(v).owner for v in op.results}:
            views |= dict.fromkeys(op.results, op)
            continue
        written = {root(v) for v in op.results}  # what was there before is not
        views = {v: maker for v, maker in views.items() if root(v) not in written}
        last |= {r: [v for v in op.results if root(v) is r] for r in written}
    copied = {v for values in last.values() for v in values}
    mine, repeated = set(g.ops), {op for x in found.groups if x.repeatable for op in x.ops}
    for v in (v for op in g.ops for v in op.results if v not in copied and v not in views):
        for op in (use.operation for use in v.uses):
            if op not in mine and (op in repeated or at.get(op, -1) > found.start):
                return None
    values = []
    for a in g.activations:
        for v in last.get(a.value, ()):
            layout = dist.layout_of(v)
            if layout is None or layout.partial:
                return None
            values.append(HostedValue(v, found.ops[a.made], found.ops[a.read]))
    copies = tuple(_copy(found, h.value) for h in values)
    if not copies:
        return None
    return Offload(copies, n, tuple(values), tuple(dict.fromkeys(views.values())))


def _copy(found: Activations, v: SSAValue) -> HostCopy:
    op = copy_of(v, found.mesh)
    cost = cost_of(op, found.mesh)
    op.erase()
    assert cost is not None
    ready = found.live.at.get(v.owner, -1) if isinstance(v.owner, Operation) else -1
    return HostCopy(ready, cost.seconds, cost.latency)


class LinkEvent(NamedTuple):
    """A copy on the link to the host: when it would begin, its seconds, when its result is needed
    (infinite: never), and the number of the event that it follows (-1: none)."""

    begin: float
    seconds: float
    needed: float
    after: int = -1


def exposed(events: Sequence[LinkEvent]) -> float:
    """Return the seconds in which computation waits for copies, which are one after the other on
    the link, in the order in which they would begin."""
    ends, free, late = dict[int, float](), 0.0, 0.0
    for i in sorted(range(len(events)), key=lambda i: (events[i].begin, i)):
        begin, seconds, needed, after = events[i]
        free = ends[i] = max(begin + late, free, ends.get(after, 0.0)) + seconds
        late = max(late, free - needed)
    return late


def link_events(
    chosen: Iterable[Offload],
    ends: Sequence[float],
    loaded: Mapping[int, float],
    interference: float,
) -> list[LinkEvent]:
    """Return the copies of offloads.

    Args:
        ends: when each op ends, if computation waits for no copy.
        loaded: when each group that is in host memory is needed again.
        interference: the share of a copy that computation beside it loses (`cost/schedule.py`):
            that is no time of `ends`.
    """

    def beside(copy: HostCopy) -> float:
        return copy.seconds - interference * (copy.seconds - copy.latency)

    events, back = list[LinkEvent](), list[tuple[float, int]]()
    for offload in chosen:
        needed, op = np.inf, offload.number
        if op is not None:
            needed = ends[op - 1]
        for copy in offload.copies:
            begin = ends[copy.ready] if copy.ready >= 0 else 0.0
            events.append(LinkEvent(begin, beside(copy), needed))
            if offload.group is not None:
                back.append((loaded[offload.group], len(events) - 1))
        if op is not None:  # the new parameter
            new = beside(offload.copies[0])
            events.append(LinkEvent(ends[op], new, ends[-1], len(events) - 1))
    begin = np.inf
    for needed, out in sorted(back, reverse=True):  # each as late as the next one allows
        seconds = events[out].seconds
        begin = min(needed, begin) - seconds
        events.append(LinkEvent(max(begin, events[out].begin), seconds, needed, out))
    return events
