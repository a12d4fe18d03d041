"""A bound of a problem's least cost, and what it rules out.

Costs are moved between a variable and the tables that it is in, which changes no solution's cost,
so that the sum of the least entries of all grows: one variable after another collects the least
costs of its tables and deals them out again to those that come later (sequential reweighted
message passing, Kolmogorov 2006 and 2015). That sum is the bound. A value is ruled out where the
bound with it is above what a known solution costs.

What looks the same (in layers that repeat) is moved the same: once for all of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import numpy as np

from shardir.search.problem import CostProblem, Table, alike, identities, improve, same

ROUNDING = 1 + 1e-9
"""What is above by rounding alone is not above."""

COLOR_ROUNDS = 2
"""How far away variables must look the same."""


@dataclass(eq=False)
class _Slot:
    """The tables of one kind in which each variable of a group is: their number, what each gave to
    it, the group at the other end, and these tables, own values first, each with the slot there."""

    count: int
    given: Table
    other: int
    tables: list[tuple[Table, "_Slot"]] = field(default_factory=list)
    _seen: list[Table] = field(default_factory=list)
    _least: Table = field(default_factory=lambda: np.zeros(0))

    def leasts(self) -> list[Table]:
        """For each value of the variable, the least of each table, other gifts aside."""
        return [(t - slot.given).min(axis=1) for t, slot in self.tables]

    def least(self) -> Table:
        """For each value of the variable, the least of the tables, other gifts aside. It is
        computed again only after a gift from the other end."""
        seen = [slot.given for _, slot in self.tables]
        if [*map(id, seen)] != [*map(id, self._seen)]:
            self._seen, self._least = seen, reduce(np.minimum, self.leasts())
        return self._least


@dataclass(eq=False)
class _EqualVariables:
    """Variables that look the same, and their tables."""

    unary: Table
    slots: list[_Slot]
    members: list[int]

    def own(self) -> Table:
        """The costs of the values, with what the tables gave to them."""
        return self.unary + sum(s.count * s.given for s in self.slots)


Kind = tuple[Table, _Slot, _Slot]
"""A table between two groups, and the slots of its ends."""


class Margins(NamedTuple):
    """A bound, and for each value of each group's variables the least by which a solution with it
    is above."""

    bound: float
    above: list[Table]


class Relaxation:
    """The bound of a problem, and the best solution that is known."""

    def __init__(self, problem: CostProblem, choice: Sequence[int]):
        self.problem = problem
        self.choice, self.objective = list(choice), problem.cost(choice)
        self.near = problem.near()
        *_, blurred, of = alike(problem, self.near, COLOR_ROUNDS)
        members: dict[int, list[int]] = {}
        for v, n in enumerate(of):
            members.setdefault(n, []).append(v)
        slots, names = [], identities(t for ends in self.near for _, t in ends)
        for v, *_ in members.values():
            mine: dict[tuple, _Slot] = {}
            for u, t in self.near[v]:
                key = names[id(t)], blurred[u]
                if key not in mine:
                    mine[key] = _Slot(0, np.zeros(len(t)), of[u])
                mine[key].count += 1
            slots.append(mine)
        self.groups = [
            _EqualVariables(problem.unary[vs[0]], list(mine.values()), vs)
            for vs, mine in zip(members.values(), slots, strict=True)
        ]
        known: dict[tuple, Kind] = {}
        self.kinds: dict[tuple[int, int], Kind] = {}
        for (i, j), t in problem.pairs.items():
            key = names[id(t)], of[i], of[j]
            if key not in known:
                one = slots[of[i]][names[id(t)], blurred[j]]
                two = slots[of[j]][same(t.T), blurred[i]]
                one.tables.append((t, two))
                two.tables.append((np.ascontiguousarray(t.T), one))
                known[key] = t, one, two
            self.kinds[i, j] = known[key]
        self.counts = Counter(map(id, self.kinds.values()))
        self.known = list(known.values())

    def run(self, rounds: int) -> None:
        """Rounds of collecting and dealing out, forwards and backwards."""
        for _ in range(rounds):
            for n in range(len(self.groups)):
                self._turn(n, 1)
            for n in reversed(range(len(self.groups))):
                self._turn(n, -1)

    def _turn(self, n: int, ahead: int) -> None:
        group = self.groups[n]
        for slot in group.slots:
            slot.given = slot.least()
        later = [slot for slot in group.slots if (slot.other - n) * ahead > 0]
        if not later:
            return
        before, after = (sum(slot.count for slot in slots) for slots in (group.slots, later))
        share = group.own() / max(after, before - after, 1)
        for slot in later:
            slot.given = slot.given - share

    def found(self, choice: list[int]) -> None:
        """Keeps a solution, made as good as it gets by single changes, if it is the best so far."""
        improve(self.problem, self.near, choice)
        if (cost := self.problem.cost(choice)) < self.objective:
            self.choice, self.objective = choice, cost

    def left(self, kind: Kind) -> Table:
        """A table without what it gave away."""
        table, one, two = kind
        return table - one.given[:, None] - two.given

    def bound(self) -> float:
        """What no solution costs less than."""
        total = sum(self.counts[id(k)] * float(self.left(k).min()) for k in self.known)
        return total + sum(len(g.members) * float(g.own().min()) for g in self.groups)

    def margins(self) -> Margins:
        """The bound, and by how much solutions are above it."""
        found = []
        for group in self.groups:
            more = group.own()
            more -= more.min()
            for slot in group.slots:
                rests = [least - slot.given for least in slot.leasts()]
                more += slot.count * reduce(np.minimum, [rest - rest.min() for rest in rests])
            found.append(more)
        return Margins(self.bound(), found)

    def allowed(self, margins: Margins, part: float = 1) -> list[np.ndarray]:
        """For each variable the values with which a better solution may exist, and its own; with a
        `part` of the gap, a solution that is better by all but this part."""
        bound, above = margins
        limit = bound + part * (self.objective * ROUNDING - bound)
        found: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(self.choice)
        for group, more in zip(self.groups, above, strict=True):
            keep = bound + more <= limit
            keep[[self.choice[v] for v in group.members]] = True
            for v in group.members:
                found[v] = np.flatnonzero(keep)
        return found

    def only(self, allowed: Sequence[np.ndarray]) -> "Relaxation":
        """The same with these values of each variable alone."""
        choice = [int(np.searchsorted(k, x)) for k, x in zip(allowed, self.choice, strict=True)]
        rest = Relaxation(self.problem.only(allowed), choice)
        for (i, j), (_, *slots) in rest.kinds.items():
            for slot, before, v in zip(slots, self.kinds[i, j][1:], (i, j), strict=True):
                slot.given = before.given[allowed[v]]
        return rest

    def moved(self) -> CostProblem:
        """The problem with the costs where they are now: its solutions cost the same, and bounds
        of parts of it add up to more."""
        tables = {id(k): self.left(k) for k in self.known}
        owns = {v: own for g in self.groups for own in [g.own()] for v in g.members}
        return CostProblem(
            [owns[v] for v in range(len(self.choice))],
            {ends: tables[id(k)] for ends, k in self.kinds.items()},
        )
