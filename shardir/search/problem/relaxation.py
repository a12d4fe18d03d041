"""A lower bound of a problem's minimum, and the values that it rules out.

Costs are moved between a variable and its tables, which changes no solution's cost, so that the sum
of the minima of all of them grows: one variable after another collects the minima of its tables and
distributes them over the later ones (sequential reweighted message passing, Kolmogorov 2006 and
2015). That sum is the bound. A value is ruled out if the bound with it is above the cost of a known
solution.

Messages are passed in the order of the variables, so the bound grows fastest where neighbours are
near to each other in it, as in the order of the program. Variables of one colour (in repeated
layers) have the same messages, which are computed once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import inf
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Table
from shardir.search.problem.problem import CostProblem, colours, identities, identity, improve

MAX_ROUNDED_UP = 1 + 1e-9
"""The factor by which a bound may exceed the cost of a solution through rounding alone: a value is
ruled out only if its bound exceeds the known cost by more."""

CHECKED_SWEEPS = 4
"""The sweeps after which the bound is compared with one that is enough."""

COLOUR_ROUNDS = 1
"""Rounds of colour refinement: the distance up to which variables of a group have the same
surroundings."""


@dataclass(eq=False)
class _Slot:
    """The tables of one kind of each variable of a group: their number, the variables' group and
    that at the other end of a table, and the tables, each with the slot at its other end.
    `message`: what each table sent to the variable."""

    count: int
    group: int
    other: int
    message: Table
    tables: list[tuple["TableEnd", "_Slot"]] = field(default_factory=list)

    def minima(self) -> list[Table]:
        """Return each table's minimum for each value of the variable, less the messages to the
        other end."""
        return [t.minima(slot.message) for t, slot in self.tables]

    def changes(self, direction: int) -> bool:
        """Whether a message to the other end changes between two turns of the group in passes of
        this direction, after the turn in the pass between them."""
        return any((slot.group - self.group) * direction <= 0 for _, slot in self.tables)


class _Distinct(NamedTuple):
    """The distinct rows of a table: the first of each, the number of each row among them, and the
    rows with equal ones next to each other, with the beginning of each run."""

    first: list[int]
    number: np.ndarray
    order: np.ndarray
    begins: np.ndarray


class TableEnd(NamedTuple):
    """One end of a table, whose minima are taken over the values of the other end.

    Attributes:
        rows: the table without repeated rows and columns, in memory with its longer dimension last,
            since both ends share it: there numpy is fastest.
        axis: the other end's.
        mine, other: the distinct values of this end and of the other one; None if no two have
            equal costs.
    """

    rows: Table
    axis: int
    mine: _Distinct | None
    other: _Distinct | None

    def minima(self, message: Table) -> Table:
        """Return the minimum for each value, less a message to the other end. Of the other end's
        values with equal costs the one with the largest message has it."""
        if self.other is not None:
            message = np.maximum.reduceat(message[self.other.order], self.other.begins)
        less = message if self.axis == 1 else message[:, None]
        found = np.minimum.reduce(self.rows - less, axis=self.axis)
        return found if self.mine is None else found[self.mine.number]


def _distinct(rows: Table) -> _Distinct | None:
    """Return the distinct rows; None if no two are equal."""
    seen: dict[bytes, int] = {}
    number = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows])
    if len(seen) == len(rows):
        return None
    order = np.argsort(number, kind="stable")
    begins = np.searchsorted(number[order], np.arange(len(seen)))
    return _Distinct([int(i) for i in order[begins]], number, order, begins)


def ends(table: Table) -> tuple[TableEnd, TableEnd]:
    """Return the ends of a table: that of its rows, and that of its columns."""
    one, two = _distinct(np.ascontiguousarray(table)), _distinct(np.ascontiguousarray(table.T))
    if one:
        table = table[one.first]
    if two:
        table = table[:, two.first]
    axis = 0 if table.shape[0] > table.shape[1] else 1
    rows = np.ascontiguousarray(table if axis else table.T)
    return TableEnd(rows, axis, one, two), TableEnd(rows, 1 - axis, two, one)


class _Turn(NamedTuple):
    """The turn of a group in a pass: it collects the minima of the tables whose messages have
    changed, and gives each table of a later group one of `parts` equal shares of its costs."""

    changed: list[_Slot]
    later: slice
    parts: float


class _EqualVariables:
    """The variables of one colour, and their tables. `messages`: those of all slots, in the order
    of the groups at their other ends."""

    def __init__(self, unary: Table, slots: Iterable[_Slot], members: list[int]):
        self.unary, self.members = unary, members
        self.slots = sorted(slots, key=lambda slot: slot.other)
        self.messages = np.zeros((len(self.slots), len(unary)))
        self._counts = np.array([float(slot.count) for slot in self.slots])
        for slot, row in zip(self.slots, self.messages, strict=True):
            slot.message = row

    def own(self) -> Table:
        """Return the costs of the values, with the messages from the tables."""
        return self.unary + self._counts @ self.messages

    def turn(self, direction: int) -> _Turn:
        """Return the turn in a pass through the groups."""
        others = [(slot.other - slot.group) * direction for slot in self.slots]
        at = [i for i, other in enumerate(others) if other > 0]
        later = slice(min(at, default=0), max(at, default=-1) + 1)
        after = self._counts[later].sum()
        changed = [slot for slot in self.slots if slot.changes(direction)]
        return _Turn(changed, later, max(after, self._counts.sum() - after, 1.0))

    def take(self, turn: _Turn) -> None:
        """Take a turn."""
        for slot in turn.changed:
            slot.message[:] = reduce(np.minimum, slot.minima())
        if turn.later.stop > turn.later.start:
            self.messages[turn.later] -= self.own() / turn.parts


@dataclass(eq=False)
class _TableKind:
    """A table between two groups, the slots of its ends, and how many pairs have it."""

    table: Table
    groups: tuple[int, int]
    slots: tuple[_Slot, _Slot]
    count: int = 0

    def rest(self) -> Table:
        """Return the table less its messages."""
        one, two = self.slots
        return self.table - one.message[:, None] - two.message


class Margins(NamedTuple):
    """A bound, and for each value of each group's variables a lower bound of the excess of the
    solutions with it."""

    bound: float
    above: list[Table]


class Relaxation:
    """The bound of a problem, and the best solution that is known."""

    def __init__(self, problem: CostProblem, choice: Sequence[int]):
        self.problem, self.neighbours = problem, problem.neighbours()
        self.choice, self.objective = list(choice), problem.cost(choice)
        *_, coarse, self.group_of = colours(problem, self.neighbours, COLOUR_ROUNDS)
        group_of = self.group_of
        members: dict[int, list[int]] = {}
        for v, n in enumerate(group_of):
            members.setdefault(n, []).append(v)
        slots, names = [], identities(t for ends in self.neighbours for _, t in ends)
        for n, (v, *_) in members.items():
            mine: dict[tuple, _Slot] = {}
            for u, t in self.neighbours[v]:
                key = names[id(t)], coarse[u]
                if key not in mine:
                    mine[key] = _Slot(0, n, group_of[u], np.zeros(len(t)))
                mine[key].count += 1
            slots.append(mine)
        self.groups = [
            _EqualVariables(problem.unary[vs[0]], mine.values(), vs)
            for vs, mine in zip(members.values(), slots, strict=True)
        ]
        kinds: dict[tuple, _TableKind] = {}
        self.kind_of: dict[tuple[int, int], _TableKind] = {}
        for (i, j), t in problem.pairs.items():
            key = names[id(t)], group_of[i], group_of[j]
            if key not in kinds:
                one = slots[group_of[i]][names[id(t)], coarse[j]]
                two = slots[group_of[j]][identity(t.T), coarse[i]]
                for slot, end, other in zip((one, two), ends(t), (two, one), strict=True):
                    slot.tables.append((end, other))
                kinds[key] = _TableKind(t, (group_of[i], group_of[j]), (one, two))
            kinds[key].count += 1
            self.kind_of[i, j] = kinds[key]
        self.kinds = list(kinds.values())

    def run(self, sweeps: int, enough: float = inf) -> None:
        """Pass messages through all groups, forwards and backwards, `sweeps` times, or until the
        bound is `enough`."""
        forwards, backwards = ([g.turn(d) for g in self.groups] for d in (1, -1))
        first = [t._replace(changed=g.slots) for g, t in zip(self.groups, forwards, strict=True)]
        for sweep in range(sweeps):
            for group, turn in zip(self.groups, forwards if sweep else first, strict=True):
                group.take(turn)
            for group, turn in zip(reversed(self.groups), reversed(backwards), strict=True):
                group.take(turn)
            if enough < inf and sweep % CHECKED_SWEEPS == 0 and self.bound() >= enough:
                break

    def offer(self, choice: list[int]) -> None:
        """Improve a solution by single changes, and retain it if it is the best so far."""
        improve(self.problem, self.neighbours, choice)
        if (cost := self.problem.cost(choice)) < self.objective:
            self.choice, self.objective = choice, cost

    def bound(self) -> float:
        """Return a lower bound of all solutions' costs."""
        total = sum(k.count * float(k.rest().min()) for k in self.kinds)
        return total + sum(len(g.members) * float(g.own().min()) for g in self.groups)

    def margins(self) -> Margins:
        """Return the bound, and the margins of all values."""
        found = []
        for group in self.groups:
            more = group.own()
            more -= more.min()
            for slot in group.slots:
                rests = [minimum - slot.message for minimum in slot.minima()]
                more += slot.count * reduce(np.minimum, [rest - rest.min() for rest in rests])
            found.append(more)
        return Margins(self.bound(), found)

    def allowed(self, margins: Margins, part: float = 1) -> list[np.ndarray]:
        """Return for each variable the values of all better solutions, and its own. With a `part`
        of the gap, the values of all solutions above the bound by at most this part of it."""
        bound, above = margins
        limit = bound + part * (self.objective * MAX_ROUNDED_UP - bound)
        found: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(self.choice)
        for group, more in zip(self.groups, above, strict=True):
            keep = bound + more <= limit
            keep[[self.choice[v] for v in group.members]] = True
            for v in group.members:
                found[v] = np.flatnonzero(keep)
        return found

    def restricted(self, allowed: Sequence[np.ndarray]) -> "Relaxation":
        """Return the relaxation with the allowed values of each variable only."""
        choice = [int(np.searchsorted(k, x)) for k, x in zip(allowed, self.choice, strict=True)]
        rest = Relaxation(self.problem.restricted(allowed), choice)
        for (i, j), kind in rest.kind_of.items():
            for slot, before, v in zip(kind.slots, self.kind_of[i, j].slots, (i, j), strict=True):
                slot.message[:] = before.message[allowed[v]]
        return rest

    def folded(self) -> CostProblem:
        """Return the problem with one variable for each group: its solutions are those in which the
        variables of a group have one value. Its costs are where the messages moved them, so that
        its bound begins with that of the relaxation."""
        found = CostProblem([len(g.members) * g.own() for g in self.groups])
        for kind in self.kinds:
            found.add(*kind.groups, kind.count * kind.rest())
        return found

    def unfolded(self, choice: Sequence[int]) -> list[int]:
        """Return a solution of the folded problem as one of the problem."""
        return [choice[n] for n in self.group_of]

    def reparametrised(self) -> CostProblem:
        """Return the problem with the costs where the messages moved them: its solutions cost the
        same, and the bounds of its parts add up to more."""
        tables = {id(k): k.rest() for k in self.kinds}
        owns = {v: own for g in self.groups for own in [g.own()] for v in g.members}
        return CostProblem(
            [owns[v] for v in range(len(self.choice))],
            {ends: tables[id(k)] for ends, k in self.kind_of.items()},
        )
