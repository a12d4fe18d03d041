"""The search for offsets of buffers in a block of given bytes.

A section is a maximal set of buffers that are live at one time. A buffer is live in consecutive
sections; two buffers overlap in time if they share a section. A state has, for each section, the
height up to which it is decided, and the buffers that are not placed. Steps of the search:

1. Heights rise. A buffer lies above the heights of its sections, and a section is empty up to its
   lowest buffer. A section whose height and remaining bytes exceed the block has no solution.
2. A section beside which no section is lower is chosen. Either one of its buffers is placed at its
   height, or the section stays empty up to the next height on which a buffer can rest. These are
   all cases: in a solution in which no buffer can move down, each buffer is at 0 or rests on
   another one.
3. Equal buffers are tried once, and states without a solution are not entered again.
4. A failure is explained by a set of sections, since each height has the set of sections that
   caused it. A step that changed none of these sections did not cause the failure, and is undone
   without its other choices. So parts of the program that do not touch each other are searched one
   after the other, not in all combinations.

Resting buffers, bounds of sections, dominated placements and decomposition in time are ideas of
MiniMalloc (Moffitt, ASPLOS 2023); the choice of a section, and 4, are our own.

Searches with different orders run in turn, each for a limited number of states: a lucky search
needs little more than one state for each buffer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise, product
from math import gcd
from random import Random
from typing import NamedTuple

import numpy as np

NEVER = 1 << 60
"""The height of a section without buffers to place: above all heights."""

STATES = (3, 10, 30)
"""Bounds the states, for each buffer, of each search of a round."""

FIXED_WORK = 2000
"""The work of a state besides its pairs of a buffer and a section, in the time of a pair."""

Skip = tuple[int, int]
"""A section, and the height below which it stays empty."""


class SearchOrder(NamedTuple):
    """The order in which a search tries sections and buffers.

    Buffers come by descending length ** wide * size ** (1 - wide), times 1 + flush for each end
    that coincides with an end of the flat part around the section, times a random factor of up to
    1 + noise.

    Attributes:
        section: `low` takes the lowest section; `forced` the section with the fewest choices;
            `near` breaks ties of `forced` by the distance to the last section.
    """

    section: str
    wide: float
    flush: float
    noise: float = 0.0


ORDERS = tuple(
    SearchOrder(section, wide, flush)
    for wide, flush, section in product(
        (0.75, 0.25, 1.0, 0.0, 0.5), (0.0, 3.0), ("low", "forced", "near")
    )
)
"""The orders of the searches of a round. After the rounds of STATES they have noise."""


class PackingState(NamedTuple):
    """A state of the search.

    Attributes:
        heights: of sections, and 0 past the last one.
        alive: the mask of the buffers that are not placed.
        left: by section, the bytes of these buffers.
        causes: by section, the sections that caused its height, as bits.
    """

    heights: np.ndarray
    alive: np.ndarray
    left: np.ndarray
    causes: list[int]


@dataclass
class Branch:
    """A state with its choices.

    Attributes:
        height: at which a buffer is placed.
        choices: buffers, and perhaps a Skip.
        conflict: the sections, as bits, that explain the failure of the choices before `tried`.
    """

    state: PackingState
    key: bytes
    height: int
    choices: list[int | Skip]
    conflict: int
    tried: int = 0


class PackingSearch:
    """The search for offsets of one set of buffers.

    Args:
        buffers: start, end and size of each; sizes are above 0.
        max_work: the limit of all runs together; see FIXED_WORK.
    """

    def __init__(self, buffers: Sequence[tuple[int, int, int]], max_work: int):
        starts, ends, sizes = zip(*buffers, strict=True)
        times = sorted({*starts, *ends})
        begins, stops = set(starts), set(ends)
        sections = [a for a, b in pairwise(times) if a in begins and b in stops]
        self.first: list[int] = np.searchsorted(sections, starts).tolist()
        self.last: list[int] = np.searchsorted(sections, ends).tolist()
        """The first section of each buffer, and the section after its last one."""
        self.sizes: list[int] = list(sizes)
        self.unit = gcd(*sizes)
        self.number = len(sections)
        self.live: list[list[int]] = [[] for _ in sections]
        """The buffers of each section."""
        for i, (a, b) in enumerate(zip(self.first, self.last, strict=True)):
            for section in range(a, b):
                self.live[section].append(i)
        self._firsts, self._lasts = np.array(self.first), np.array(self.last)
        self._sizes = np.array(sizes)
        self._ranges = np.stack([self._firsts, self._lasts], 1).ravel()
        self._flat = np.concatenate([np.array(x) for x in self.live])
        counts = [len(x) for x in self.live]
        self._begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self._section = np.repeat(np.arange(self.number), counts)
        self.work, self.max_work = 0, max_work
        self._capacity, self._near = 0, 0
        self._order, self._random = ORDERS[0], Random(0)
        self._priority = np.zeros(0)
        self._failed: dict[bytes, int] = {}

    def run(self, capacity: int, max_work: int) -> list[int] | None:
        """Return offsets in a block of `capacity` bytes; None if there are none, or if a limit of
        work ended the search."""
        if max(sum(self.sizes[b] for b in section) for section in self.live) > capacity:
            return None
        self._capacity, self._failed, self._random = capacity, {}, Random(0)
        until = min(self.work + max_work, self.max_work)
        for order, states in self._searches():
            self._order = order
            spans = (self._lasts - self._firsts).astype(float)
            self._priority = spans**order.wide * self._sizes ** (1 - order.wide)
            offsets = self._search(states, until)
            if offsets is not None:
                return offsets or None
            if self.work >= until:
                return None
        raise AssertionError("searches do not end")

    def _searches(self) -> Iterator[tuple[SearchOrder, int]]:
        """Yield the order and the number of states of each search."""
        for states in STATES:
            for order in ORDERS:
                yield order, states * len(self.sizes)
        while True:
            for order in ORDERS:
                noisy = order._replace(noise=self._random.choice((0.1, 0.3)))
                yield noisy, STATES[-1] * len(self.sizes)

    def _search(self, states: int, until: int) -> list[int] | None:
        """Return offsets; [] if the block has no solution; None at a limit."""
        self._near = 0
        offsets = [0] * len(self.sizes)
        left = np.add.reduceat(self._sizes[self._flat], self._begins)
        heights = np.zeros(self.number + 1, int)
        causes = [1 << i for i in range(self.number)]
        root = self._enter(PackingState(heights, np.ones(len(offsets), bool), left, causes))
        if isinstance(root, int):
            return []
        path = [root]
        while path:
            states -= 1
            if states < 0 or self.work >= until:
                return None
            branch = path[-1]
            if branch.tried == len(branch.choices):
                self._failed[branch.key] = branch.conflict
                path.pop()
                if path:
                    self._fail(path[-1], branch.conflict)
                continue
            choice = branch.choices[branch.tried]
            branch.tried += 1
            heights, alive, left, causes = branch.state
            heights = heights.copy()
            if isinstance(choice, tuple):
                heights[choice[0]] = choice[1]
            else:
                alive, left = alive.copy(), left.copy()
                alive[choice] = False
                offsets[choice] = branch.height
                at = slice(self.first[choice], self.last[choice])
                heights[at] = branch.height + self.sizes[choice]
                left[at] -= self.sizes[choice]
                if not alive.any():
                    return offsets
            entered = self._enter(PackingState(heights, alive, left, causes))
            if isinstance(entered, int):
                self._fail(branch, entered)
            else:
                path.append(entered)
        return []

    def _fail(self, branch: Branch, conflict: int) -> None:
        """Record that the last choice of a branch failed. If it changed no section of the conflict,
        all choices fail."""
        choice = branch.choices[branch.tried - 1]
        if isinstance(choice, tuple):
            changed = 1 << choice[0]
        else:
            changed = (1 << self.last[choice]) - (1 << self.first[choice])
        if conflict & changed:
            branch.conflict |= conflict
        else:
            branch.conflict, branch.tried = conflict, len(branch.choices)

    def _enter(self, state: PackingState) -> Branch | int:
        """Return the branch of a state; if it has no solution, the conflict, as bits."""
        self.work += len(self._flat) + FIXED_WORK
        raised = self._raise(state)
        if isinstance(raised, int):
            return raised
        state, bottoms = raised
        heights, alive, left, causes = state
        hashed = blake2b(heights.tobytes(), digest_size=16)
        hashed.update(alive.tobytes())
        key = hashed.digest()
        if key in self._failed:
            return self._failed[key]
        section = self._choose(state, bottoms)
        here = [b for b in self.live[section] if alive[b]]
        height, bottom = int(heights[section]), bottoms.tolist()
        levels = heights.tolist()
        choices = self._sort([b for b in here if bottom[b] == height], section, levels)
        above = [b for b in here if bottom[b] > height]
        conflict = causes[section] | self._blocking(levels, section, height + 1, above, causes)
        slack = self._capacity - height - int(left[section])
        if slack >= self.unit:
            a, b = min(self.first[i] for i in here), max(self.last[i] for i in here)
            beside = alive & (self._firsts < b) & (self._lasts > a)
            rests = [x for x in levels[a:b] if height < x < NEVER]
            up = min(*rests, int((bottoms + self._sizes)[beside].min()), NEVER)
            if up - height <= slack:
                choices.append((section, up))
            for i in range(a, b):
                conflict |= causes[i]
        return Branch(state, key, height, choices, conflict)

    def _raise(self, state: PackingState) -> tuple[PackingState, np.ndarray] | int:
        """Return the state with heights raised as far as its buffers require, and the minimum
        offset of each buffer; if there is no solution, the conflict, as bits."""
        heights, alive, left, causes = state
        while True:
            bottoms = np.maximum.reduceat(heights, self._ranges)[::2]
            bottoms[~alive] = NEVER
            lowest = np.minimum.reduceat(bottoms[self._flat], self._begins)
            changed = np.flatnonzero(lowest > heights[:-1])
            if not len(changed):
                return PackingState(heights, alive, left, causes), bottoms
            levels, before, causes = heights.tolist(), causes, causes[:]
            for section in changed.tolist():
                if rest := int(left[section]):
                    here = [b for b in self.live[section] if alive[b]]
                    fails = int(lowest[section]) + rest > self._capacity
                    up = self._capacity - rest + 1 if fails else int(lowest[section])
                    why = self._blocking(levels, section, up, here, before)
                    causes[section] |= why
                    if fails:
                        return causes[section]
            heights = np.append(np.maximum(lowest, heights[:-1]), 0)

    def _choose(self, state: PackingState, bottoms: np.ndarray) -> int:
        """Return the section to decide on: no section beside it is lower."""
        heights = state.heights[:-1]
        low = np.minimum.reduceat(state.heights, self._ranges)[::2]
        low[~state.alive] = NEVER
        lowest = np.minimum.reduceat(low[self._flat], self._begins)
        slack = self._capacity - heights - state.left
        if self._order.section == "low":
            keys = [slack, heights]
        else:
            at = bottoms[self._flat] == heights[self._section]
            fewest = np.add.reduceat(at, self._begins, dtype=int) + (slack > 0)
            near = abs(np.arange(self.number) - self._near)
            keys = [slack if self._order.section == "forced" else near, fewest]
        allowed = np.flatnonzero((lowest == heights) & (state.left > 0))
        best = np.lexsort([k[allowed] for k in keys])[0]
        self._near = int(allowed[best])
        return self._near

    def _sort(self, buffers: list[int], section: int, levels: list[int]) -> list[int | Skip]:
        """Return buffers in the order of trials, without repetitions of equal buffers."""
        height = levels[section]
        left, right = section, section + 1
        while left and levels[left - 1] <= height:
            left -= 1
        while right < self.number and levels[right] <= height:
            right += 1
        keys: dict[tuple[int, int, int], tuple[float, int]] = {}
        for b in buffers:
            first, last = self.first[b], self.last[b]
            if (kind := (first, last, self.sizes[b])) not in keys:
                factor = 1 + self._order.flush * ((first == left) + (last == right))
                if self._order.noise:
                    factor *= 1 + self._order.noise * self._random.random()
                keys[kind] = -factor * float(self._priority[b]), b
        return [b for _, b in sorted(keys.values())]

    def _blocking(
        self, levels: list[int], section: int, up: int, buffers: list[int], causes: list[int]
    ) -> int:
        """Return the sections, as bits, that explain why no buffer of a section is below `up`: the
        causes of the nearest section as high as that, on one side if it suffices, else on both."""
        if not buffers:
            return 0
        first, last = min(self.first[b] for b in buffers), max(self.last[b] for b in buffers)
        left, right = section - 1, section + 1
        while left >= first and levels[left] < up:
            left -= 1
        while right < last and levels[right] < up:
            right += 1
        if left >= first and all(self.first[b] <= left for b in buffers):
            return causes[left]
        if right < last and all(self.last[b] > right for b in buffers):
            return causes[right]
        return causes[left] | causes[right]
