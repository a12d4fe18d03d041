"""The fastest repetitions and copies to the host within a budget, as a mixed-integer program for
HiGHS.

As in Checkmate (Jain et al., 2020), what is in memory is decided for each place of the backward
part; but an op is repeated once at most, as `choose-recompute` does it. Variables, all from 0 to 1:

    kept[u]       group u is kept for the backward part                              (integer)
    made[u, p]    it is repeated right before op p, one that reads an activation     (integer)
    live[u, e]    it is in memory at an op or a repetition e of the backward part

An op p needs what it reads: kept[u] + sum_{q <= p} made[u, q] >= 1, and a repetition as much. Where
there is host memory, load[u, p] is a copy from there, which needs nothing, and state[c] tells
whether the states of an update are there. Copies have the time of the link, of which nothing is
hidden.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from shardir.search.recompute.repetitions import Simulator

Event = tuple[int, int]
"""An op, and the op that is repeated right before it; for the op itself the number of ops."""


@dataclass(frozen=True)
class Optimum:
    """The choices, their seconds, and a lower bound on these; none if there are none within the
    limit, or none were found in time."""

    groups: frozenset[int] | None
    seconds: float
    bound: float


class _Rows:
    """Rows of a linear program: sum of coefficients >= a number."""

    def __init__(self) -> None:
        self.names: dict[object, int] = {}
        self.cells: list[tuple[int, int, float]] = []
        self.lower: list[float] = []

    def of(self, name: object) -> int:
        return self.names.setdefault(name, len(self.names))

    def add(self, cells: dict[object, float], lower: float) -> None:
        self.cells += [(len(self.lower), self.of(n), x) for n, x in cells.items()]
        self.lower.append(lower)

    def matrix(self) -> csr_matrix:
        rows, columns, values = zip(*self.cells, strict=True)
        return csr_matrix((values, (rows, columns)), (len(self.lower), len(self.names)))


def optimum(simulator: Simulator, limit: int, seconds: float = 60.0) -> Optimum:
    """Return the fastest choices whose memory is at most `limit` at each place."""
    found = simulator.activations
    groups, ops = simulator.groups, len(found.ops)
    several = range(len(groups))
    first = {u: min((a.first for a in groups[u].activations if a.first), default=None)
             for u in several}  # fmt: skip
    hosted = {o.group: c for c, o in simulator.offloads.items() if o.group is not None}
    places = sorted({p for u in several if (groups[u].repeatable or u in hosted)
                     and (p := first[u]) is not None})  # fmt: skip
    sources = defaultdict[int, list[tuple[int, int]]](list)  # of a group: those that it reads, how
    for u in several:
        for a in groups[u].activations:
            for w, op in a.readers.items():
                if groups[w].repeatable:
                    sources[w].append((u, op))
    rows = _Rows()
    for u in several:
        rows.of(("kept", u))
    again = [u for u in several if groups[u].repeatable and groups[u].needed]
    latest = {u: places[-1] if (p := first[u]) is None else p for u in {*again, *hosted}}
    slots = {(u, p): ("made", u, p) for u in again for p in places if p <= latest[u]}
    loads = {(u, p): ("load", u, p) for u in hosted for p in places if p <= latest[u]}

    def made(u: int, until: int) -> dict[object, float]:
        """That a group is in memory before an op: it is kept, or was repeated."""
        found: dict[object, float] = {("kept", u): 1.0}
        there = (*slots.items(), *loads.items())
        return found | {n: 1.0 for (v, p), n in there if v == u and p <= until}

    for u in several:
        if (p := first[u]) is not None:
            rows.add(made(u, p), 1)
    for (w, p), name in slots.items():
        for u, _ in sources[w]:
            rows.add(made(u, p) | {name: -1.0}, 0)
    numbers = {a.made for u in {*again, *hosted} for a in groups[u].activations}
    numbers |= {i for u in again for i, _ in groups[u].buffers}
    events: list[Event] = [(p, ops) for p in range(ops)]
    events += [(p, i) for p in places for i in sorted(numbers)]
    for e in events:
        _limited(rows, simulator, e, limit, slots, loads)
    size = len(rows.names)
    cost, integral = np.zeros(size), np.zeros(size)
    for (u, _), name in slots.items():
        cost[rows.of(name)] = groups[u].seconds
        integral[rows.of(name)] = 1
    for (u, _), name in loads.items():
        cost[rows.of(name)] = simulator.offloads[hosted[u]].seconds
        integral[rows.of(name)] = 1
    states = {c: rows.of(("state", c)) for c, o in simulator.offloads.items() if o.group is None}
    for c, column in states.items():
        cost[column], integral[column] = simulator.offloads[c].seconds, 1
    integral[: len(groups)] = 1
    lower = np.zeros(size)
    lower[[u for u in several if not groups[u].repeatable]] = 1
    scale = max(1e-12, float(cost.max()))
    result = milp(
        cost / scale, constraints=LinearConstraint(rows.matrix(), rows.lower, np.inf),
        bounds=Bounds(lower, 1), integrality=integral,
        options={"time_limit": seconds, "mip_rel_gap": 1e-9},
    )  # fmt: skip
    if result.x is None:
        return Optimum(None, np.inf, 0.0 if result.status == 1 else np.inf)
    chosen = {u for (u, _), name in slots.items() if result.x[rows.of(name)] > 0.5}
    chosen |= {hosted[u] for (u, _), name in loads.items() if result.x[rows.of(name)] > 0.5}
    chosen |= {c for c, column in states.items() if result.x[column] > 0.5}
    return Optimum(frozenset(chosen), result.fun * scale, result.mip_dual_bound * scale)


def _limited(rows, simulator, event, limit, slots, loads) -> None:
    """Add the limit at an op, or at a repetition right before it."""
    found, groups = simulator.activations, simulator.groups
    ops = len(found.ops)
    p, i = event
    total: dict[object, float] = {}
    fixed = float(found.fixed[p] if i == ops else found.between[p])

    def is_begun(q: int, made: int) -> bool:
        """Whether what is repeated before op q by op `made` is there."""
        return (q, made) <= event

    for u, g in enumerate(groups):
        for k, a in enumerate(g.activations):
            forward = (a.made <= p <= a.read) if i == ops else (a.made < p <= a.read)
            begun = a.made <= p if i == ops else a.made < p
            if forward:
                fixed += a.bytes
            if not begun or (forward and p < found.start):
                continue
            name = ("live", u, k, event)
            here: dict[object, float] = {} if forward else {("kept", u): 1.0}
            there = (*slots.items(), *loads.items())
            here |= {n: 1.0 for (v, q), n in there if v == u and is_begun(q, a.made)}
            if not here:
                continue
            total[name] = -float(a.bytes)
            if a.last is not None and (p, i) <= (a.last, ops):
                rows.add({name: 1.0} | {n: -x for n, x in here.items()}, 0)
            else:
                for w, op in a.readers.items():
                    for (v, q), n in slots.items():
                        if v == w and (q, op) >= event:
                            rows.add({name: 1.0, n: -1.0} | {m: -x for m, x in here.items()}, -1)
            for each in (slots, loads):  # what nothing reads is made all the same
                if (u, p) in each and i == a.made:
                    rows.add({name: 1.0, each[u, p]: -1.0}, 0)
        for op, size in g.buffers:
            if i == op and (u, p) in slots:
                total[slots[u, p]] = total.get(slots[u, p], 0.0) - size
    for c, offload in simulator.offloads.items():
        if offload.group is None:
            total["state", c] = float(offload.bytes)
    rows.add(total, fixed - limit) if total else rows.add({("kept", 0): 0.0}, fixed - limit)
