"""A lower bound on the time of repetitions within a limit of memory, and sets that are near it.

Each group of activations is dropped, kept, or repeated or loaded from the host in one of some parts
of the backward part; what a repeated group reads is kept, or repeated or loaded in the same part or
before. That is a sum of costs of pairs, with live bytes, as the search for strategies has. Counted
are only bytes that are live wherever in its part a group is repeated: so the minimum is a lower
bound.

Of copies on the link to the host, L seconds in all, only those can be hidden that the step's own T
seconds and the repetitions are long. With A the seconds of repetitions, and those that computation
loses to copies beside it, the time is at least

    max(A, L - T) >= (1 - x) A + x (L - T)    for each x from 0 to 1

x is one more price.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Table
from shardir.search.problem.prices import prices
from shardir.search.problem.problem import CostProblem
from shardir.search.problem.solver import solve
from shardir.search.recompute.activations import SavedActivation
from shardir.search.recompute.repetitions import Simulator

DROPPED, KEPT, REPEATED = range(3)
"""The values of a variable; the last one and those after it are repetitions in the parts of the
backward part, in order, and then loads from the host in them."""

PARTS = 10
"""The number of parts, at most."""

FEW = 1e-4
"""The part of all bytes up to which those of a group are not counted: constants and masks, which
all layers read, would make the tables large."""

FORBIDDEN = 10.0
"""The cost of what is not allowed, in times of all repetitions."""

GAP = 1e-3
"""The relative gap at which the solver of one problem stops."""

MAX_ROUNDS = 40
"""How many problems are solved at most."""

MAX_ROUND_GROUPS = 12_000
"""The number of problems of large programs, times their groups; FEWEST_ROUNDS at least."""

FEWEST_ROUNDS = 10

ENOUGH = 5e-3
"""The relative difference of the bound to the best of all prices at which no more are solved."""


def bound_within(simulator: Simulator, limit: int) -> tuple[float, list[frozenset[int]]]:
    """Return a lower bound on the seconds of repetitions within a limit of bytes, and the sets of
    groups that are repeated in the solutions that lead to it.

    The bytes at some ops have prices (Lagrange multipliers). They are those at which no mix of the
    solutions so far is cheaper; the solution for them joins these (Kelley's cutting planes, 1960).
    """
    problem, limit = _RelaxedProblem(simulator), max(1, limit)
    ceiling = problem.ceiling
    known: list[tuple[list[int], float, Table]] = []
    at, bound, duration = list[int](), 0.0, simulator.duration if simulator.offloads else 0.0
    choice = [KEPT] * len(problem.unary)
    rounds = min(MAX_ROUNDS, max(FEWEST_ROUNDS, MAX_ROUND_GROUPS // max(1, len(problem.groups))))
    for _ in range(rounds):
        bytes_ = problem.live(choice)
        known.append((choice, problem.cost(choice), bytes_))
        if bytes_.max() > limit and (peak := int(bytes_.argmax())) not in at:
            at.append(peak)
        costs = np.array([cost for _, cost, _ in known])
        excess = np.array([b[at] / limit - 1 for _, _, b in known]).reshape(len(known), len(at))
        if simulator.offloads:
            busy = [problem.linked(c) - duration - cost for c, cost, _ in known]
            excess = np.column_stack((excess, busy))
        price, weights = prices(costs, excess, ceiling)
        link = min(1.0, float(price[-1])) if simulator.offloads else 0.0
        each, price = np.zeros(len(bytes_)), price[: len(at)]
        each[at] = price / limit
        found = solve(problem.priced(each, link), gap=GAP)
        bound = max(bound, found.bound - float(price.sum()) - link * duration)
        choice = found.choice
        reached = weights @ costs + (1 - weights.sum()) * ceiling
        if reached - bound <= ENOUGH * reached or any(choice == c for c, _, _ in known):
            break
    return bound, list(dict.fromkeys(problem.chosen(c) for c, _, _ in known))


def _shared(arrays: Iterable[Table]) -> list[Table]:
    """Return the arrays, equal ones as one: those of equal layers, which are solved once."""
    found: dict[bytes, Table] = {}
    return [found.setdefault(array.tobytes(), array) for array in arrays]


class _ConditionalBytes(NamedTuple):
    """Bytes from an op to an op, if a variable has a value; and another one too, if there is one
    (a pair of variables)."""

    of: int
    value: int
    other: int
    bytes: int
    start: int
    end: int


class _RelaxedProblem:
    """A variable for each group that the backward part needs, or groups that are made of it, and
    one for each update whose states may be on the host: KEPT, or the last value if they are.

    Attributes:
        groups: the group of each variable, and updates: the choice of each after them.
        hosted: the choice of each group that may be in host memory.
        parts: of each part of the backward part the first and the last op before which something
            may be repeated.
        pairs: the variables of a group and of one that reads it.
    """

    def __init__(self, simulator: Simulator):
        self.simulator, self.groups = simulator, list[int]()
        groups = simulator.groups
        sizes = [sum(a.bytes for a in g.activations) for g in groups]
        few = FEW * sum(sizes)
        self.groups = [n for n, g in enumerate(groups) if g.needed and sizes[n] > few]
        self.of = {n: i for i, n in enumerate(self.groups)}
        offloads = simulator.offloads
        self.hosted = {o.group: c for c, o in offloads.items() if o.group is not None}
        self.updates = [c for c, o in offloads.items() if o.group is None]
        self.parts = self._parts()
        self.loaded = REPEATED + len(self.parts)
        self.values = self.loaded + (len(self.parts) if offloads else 0)
        all_seconds = sum(map(simulator.seconds, simulator.choices))
        all_seconds += sum(o.seconds for o in offloads.values())
        self.forbidden = FORBIDDEN * max(1e-9, all_seconds)
        rows = [*map(self._costs, self.groups), *map(self._costs_of_update, self.updates)]
        self.unary = np.array(rows)
        self.link = np.zeros(self.unary.shape)
        """The seconds of copies on the link, less the cost of the value."""
        for i, c in enumerate([*map(self.hosted.get, self.groups), *self.updates]):
            self.link[i, self.loaded :] = 0.0 if c is None else offloads[c].seconds
        self.link -= np.where(self.unary < self.forbidden, self.unary, 0.0)
        self.before = np.zeros((self.values, self.values))  # what is read, and what reads it
        for k in range(len(self.parts)):
            self.before[DROPPED, REPEATED + k] = self.forbidden
            for begin in range(REPEATED, self.values, len(self.parts)):
                self.before[begin + k + 1 : begin + len(self.parts), REPEATED + k] = self.forbidden
        self.pairs = list(
            dict.fromkeys(
                (self.of[n], self.of[m])
                for n in self.groups for a in groups[n].activations for m in a.readers
                if m in self.of
            )
        )  # fmt: skip
        self.fixed = self._fixed()
        at = {pair: k for k, pair in enumerate(self.pairs)}
        alone, both = list[_ConditionalBytes](), list[_ConditionalBytes]()
        for n in self.groups:
            for a in groups[n].activations:
                alone += self._alone(self.of[n], a)
                both += self._until_reader(self.of[n], a, at)
        for i, c in enumerate(self.updates, len(self.groups)):
            size, last = offloads[c].bytes, len(self.fixed) - 1
            alone.append(_ConditionalBytes(i, KEPT, 0, size, 0, last))
        self.alone = np.array(alone, np.int64).reshape(-1, 6).T
        self.both = np.array(both, np.int64).reshape(-1, 6).T

    @property
    def ceiling(self) -> float:
        """A cost that no solution exceeds."""
        return float(self.unary.max(axis=1).sum()) + len(self.pairs) * self.forbidden

    def cost(self, choice: Sequence[int]) -> float:
        """The cost of a solution, without prices."""
        own = self.unary[np.arange(len(choice)), choice].sum()
        return float(own + sum(self.before[choice[i], choice[j]] for i, j in self.pairs))

    def linked(self, choice: Sequence[int]) -> float:
        """The seconds of a solution's copies."""
        each = self.link + np.where(self.unary < self.forbidden, self.unary, 0.0)
        hosted = np.array(choice) >= self.loaded
        return float(each[np.arange(len(choice)), choice][hosted].sum())

    def chosen(self, choice: Sequence[int]) -> frozenset[int]:
        """The set of choices of a solution."""
        found, every = set[int](), set(self.simulator.needed)
        for n, x in zip(self.groups, choice, strict=False):
            if x >= self.loaded:
                found.add(self.hosted[n])
            elif x >= REPEATED and n in every:
                found.add(n)
        hosted = zip(self.updates, choice[len(self.groups) :], strict=True)
        return frozenset(found | {c for c, x in hosted if x >= self.loaded})

    def live(self, choice: Sequence[int]) -> Table:
        """The live bytes of a solution at each op."""
        values, pairs = np.array(choice), np.array(self.pairs, np.int64).reshape(-1, 2).T
        of, value, _, size, start, end = self.alone
        alone = values[of] == value
        k, mine, other, more, begin, stop = self.both
        both = (values[pairs[0][k]] == mine) & (values[pairs[1][k]] == other)
        change = np.zeros(len(self.fixed) + 1)
        np.add.at(change, np.concatenate((start[alone], begin[both])),
                  np.concatenate((size[alone], more[both])))  # fmt: skip
        np.add.at(change, np.concatenate((end[alone], stop[both])) + 1,
                  -np.concatenate((size[alone], more[both])))  # fmt: skip
        return self.fixed + np.cumsum(change)[:-1]

    def priced(self, price: Table, link: float = 0.0) -> CostProblem:
        """The problem with a price for each byte at each op, and one for the link's seconds."""
        until = np.concatenate(([0.0], np.cumsum(price)))
        of, value, _, size, start, end = self.alone
        unary = self.unary + link * self.link
        np.add.at(unary, (of, value), size * (until[end + 1] - until[start]))
        k, mine, other, more, begin, stop = self.both
        tables = np.tile(self.before, (len(self.pairs), 1, 1))
        np.add.at(tables, (k, mine, other), more * (until[stop + 1] - until[begin]))
        unary[0] += float(price @ self.fixed)
        found = CostProblem(_shared(unary))
        for (i, j), table in zip(self.pairs, _shared(tables), strict=True):
            found.add(i, j, table)
        return found

    def _parts(self) -> list[tuple[int, int]]:
        groups = [self.simulator.groups[n] for n in {*self.simulator.needed, *self.hosted}]
        places = sorted({a.first for g in groups for a in g.activations if a.first is not None})
        places = places or [self.simulator.activations.start]
        return [(int(p[0]), int(p[-1])) for p in np.array_split(places, PARTS) if len(p)]

    def _costs(self, n: int) -> Table:
        """The cost of each value of a group: it is not repeated after what reads it first."""
        g = self.simulator.groups[n]
        first = min((a.first for a in g.activations if a.first is not None), default=None)
        costs = np.full(self.values, g.seconds if g.repeatable else self.forbidden)
        costs[[DROPPED, KEPT]] = 0.0 if first is None else self.forbidden, 0.0
        hosted = self.hosted.get(n)
        costs[self.loaded :] = self.forbidden if hosted is None else self.simulator.seconds(hosted)
        if first is not None:
            late = [begin > first for begin, _ in self.parts]
            costs[REPEATED : self.loaded][late] = self.forbidden
            if self.simulator.offloads:
                costs[self.loaded :][late] = self.forbidden
        return costs

    def _costs_of_update(self, choice: int) -> Table:
        """The cost of each value of an update: its states are kept, or are on the host."""
        costs = np.full(self.values, self.forbidden)
        costs[[KEPT, -1]] = 0.0, self.simulator.seconds(choice)
        return costs

    def _fixed(self) -> Table:
        """The bytes at each op of everything that is live in all solutions."""
        total = self.simulator.activations.fixed.astype(np.float64)
        total -= sum(o.bytes for o in self.simulator.offloads.values())
        for g in self.simulator.groups:
            for a in g.activations:
                total[a.made : a.read + 1] += a.bytes
        return total

    def _until(self, a: SavedActivation) -> int:
        """The last op at which an activation is live, if only ops read it that are not repeated."""
        return self.simulator.activations.start if a.last is None else a.last

    def _alone(self, i: int, a: SavedActivation) -> Iterator[_ConditionalBytes]:
        """Yield the bytes of an activation of variable i for its own reads."""
        until = self._until(a)
        values = [(KEPT, a.read + 1)]
        if a.first is not None:
            for begin in range(REPEATED, self.values, len(self.parts)):
                ends = [min(last, a.first) for _, last in self.parts]
                values += list(enumerate(ends, begin))
        yield from (
            _ConditionalBytes(i, x, 0, a.bytes, begin, until)
            for x, begin in values
            if begin <= until
        )

    def _until_reader(
        self, i: int, a: SavedActivation, at: dict[tuple[int, int], int]
    ) -> Iterator[_ConditionalBytes]:
        """Yield its bytes after these reads, until a group that reads it is repeated: one of them,
        since bytes for several would be counted twice."""
        groups = self.simulator.groups
        readers = [m for m in a.readers if m in self.of and groups[m].repeatable]
        if not readers:
            return
        k = at[i, self.of[max(readers, key=a.readers.__getitem__)]]
        until = self._until(a)
        for value in range(KEPT, self.values):
            for part, (first, _) in enumerate(self.parts, REPEATED):
                begin = until + 1
                if value >= REPEATED:
                    _, made = self.parts[(value - REPEATED) % len(self.parts)]
                    begin = max(0 if a.last is None else begin, made)
                if begin < first:
                    yield _ConditionalBytes(k, value, part, a.bytes, begin, first - 1)
