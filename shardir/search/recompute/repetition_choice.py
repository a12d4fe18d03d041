"""The groups of activations to repeat, and what to keep in host memory, so that a step keeps to a
limit of bytes, and is fast.

1. Where there are few choices, all sets of them are simulated: the choice is a minimum.
2. Otherwise the sets of repetition_bound.py, those of policies, and all groups are starts. One that
   is over the limit is moved towards one that keeps to it, just as far as necessary.
3. Of the best ones single choices are taken back, exchanged for others, and those of a block are
   taken over from an equal block, as long as that saves time, and up to a number of changes.

Every set is simulated, so that the limit holds at each op and at each repetition.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from shardir.search.recompute.repetition_bound import bound_within
from shardir.search.recompute.repetitions import Repetitions, Simulator

MAX_EXACT_CHOICES = 10
"""With at most so many choices all sets are simulated."""

MAX_IMPROVED = 3
"""The number of sets that are improved."""

MAX_EXCHANGED = 50_000
"""The number of exchanges that are simulated for one set at once, times the choices, at most."""

MAX_CHANGES = 1_000_000
"""The number of changes of sets that are simulated to improve them, times the choices, at most."""

Set = frozenset[int]


@dataclass(frozen=True)
class RepetitionChoice:
    """The best set that was found, and a lower bound on the seconds of every set that keeps to the
    limit. If none was found that does, the one with the lowest peak."""

    found: Repetitions
    bound: float


def choose(
    simulator: Simulator, limit: int, starts: Iterable[Set], equal: Sequence[Sequence[Set]]
) -> RepetitionChoice:
    """Return the cheapest set found that keeps to a limit of bytes.

    Args:
        starts: sets to begin with.
        equal: of each sequence of equal blocks, the choices of each block, in the same order.
    """
    nothing = simulator.run(())
    if nothing.peak <= limit:
        return RepetitionChoice(nothing, 0.0)
    choices = simulator.choices
    if len(choices) <= MAX_EXACT_CHOICES:
        sets = (frozenset(s) for n in range(len(choices) + 1) for s in combinations(choices, n))
        best = min((simulator.run(s) for s in sets), key=lambda r: _rank(r, limit))
        return RepetitionChoice(best, best.seconds)
    bound, found = bound_within(simulator, limit)
    every = [frozenset(simulator.needed), *hosted_sets(simulator)]
    known = list(dict.fromkeys([*found, *starts, *every]))
    return RepetitionChoice(_SetImprover(simulator, limit, equal).best_of(known), bound)


def _rank(r: Repetitions, limit: int) -> tuple[float, ...]:
    """The order of sets: those that keep to the limit by their time, then by their peaks."""
    return max(0, r.peak - limit), r.seconds, len(r.groups) + len(r.hosted)


def hosted_sets(simulator: Simulator) -> list[Set]:
    """Return sets with host memory: all states, all activations, both, and the states with all
    repetitions."""
    if not simulator.offloads:
        return []
    states = frozenset(c for c, o in simulator.offloads.items() if o.group is None)
    others = frozenset(simulator.offloads) - states
    return [states, others, states | others, states.union(simulator.needed)]


class _SetImprover:
    def __init__(self, simulator: Simulator, limit: int, equal: Sequence[Sequence[Set]]):
        self.simulator, self.limit, self.equal = simulator, limit, equal
        self.remaining = MAX_CHANGES // len(simulator.choices)
        self.seconds = {n: simulator.seconds(n) for n in simulator.choices}
        self.bytes = {n: simulator.bytes(n) for n in simulator.choices}

    def best_of(self, known: Sequence[Set]) -> Repetitions:
        """Return the best set that is made of known ones."""
        smallest = min(known, key=self._rank)
        if self._rank(smallest)[0] > 0:
            smallest = self._with_lower_peak(smallest)
            if self._rank(smallest)[0] > 0:
                return self.simulator.run(smallest)
        within = {self._moved(s, smallest) for s in known}
        starts = sorted(within, key=lambda s: (*self._rank(s), sorted(s)))[:MAX_IMPROVED]
        best = min((self._improved(s) for s in starts), key=self._rank)
        return self.simulator.run(best)

    def _rank(self, s: Set) -> tuple[float, ...]:
        return _rank(self.simulator.run(s), self.limit)

    def _fits(self, s: Set) -> bool:
        return self.simulator.run(s).peak <= self.limit

    def _with_lower_peak(self, s: Set) -> Set:
        """Change one group at a time, as long as that lowers the peak, until the limit is kept."""
        changed = True
        while changed and not self._fits(s):
            changed = False
            for n in self.simulator.choices:
                if self._rank(s ^ {n}) < self._rank(s):
                    s, changed = s ^ {n}, True
        return s

    def _moved(self, s: Set, goal: Set) -> Set:
        """Return a set that keeps to the limit, on the way from one to one that does: the groups
        that are cheapest for their bytes are changed first."""
        if self._fits(s):
            return s
        cost = {n: self.seconds[n] / max(1, self.bytes[n]) for n in s ^ goal}
        way = sorted(goal - s, key=cost.__getitem__) + sorted(s - goal, key=cost.__getitem__)
        low, high = 0, len(way)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(s.symmetric_difference(way[:middle])):
                high = middle
            else:
                low = middle
        return s.symmetric_difference(way[:high])

    def _improved(self, s: Set) -> Set:
        """Change a set as long as that saves time within the limit."""
        before = None
        while s != before:
            before = s
            s = self._with_equal_blocks(s)
            s = self._with_fewer(s)
            s = self._exchanged(s)
        return s

    def _with_fewer(self, s: Set) -> Set:
        """Take choices back, the slowest ones first."""
        found = self.simulator.run(s)
        for n in sorted((*found.groups, *found.hosted), key=self.seconds.__getitem__, reverse=True):
            s = self._better(s, s - {n})
        return s

    def _with_equal_blocks(self, s: Set) -> Set:
        """Choose in a block what is chosen in an equal one."""
        for blocks in self.equal:
            for block in blocks:
                patterns = {tuple(n in s for n in other) for other in map(sorted, blocks)}
                for pattern in sorted(patterns):
                    inside = {n for n, x in zip(sorted(block), pattern, strict=True) if x}
                    s = self._better(s, (s - block) | inside)
        return s

    def _exchanged(self, s: Set) -> Set:
        """Exchange a choice for one that takes a shorter time by itself."""
        left = MAX_EXCHANGED // len(self.seconds)
        others = sorted(set(self.seconds) - s, key=self.seconds.__getitem__)
        for n in sorted(s, key=self.seconds.__getitem__, reverse=True):
            for m in others:
                if self.seconds[m] >= self.seconds[n] or left == 0:
                    break
                left -= 1
                if (found := self._better(s, s ^ {n, m})) is not s:
                    return found
        return s

    def _better(self, s: Set, other: Set) -> Set:
        """Return the other set if it is better, else the same; the same if enough were tried."""
        self.remaining -= 1
        return other if self.remaining >= 0 and self._rank(other) < self._rank(s) else s
