"""The memory and the time of a step in which some groups are repeated: what `LiveStorages` counts
in the program of `rewriting/repeating.py`, without making it.

Places are numbers: of op i, i * (n + 1), where the function has n ops; of the repetition of op j
that is right before op i, the number of op i - 1, and j + 1. So repetitions at one place are in the
order of the ops.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from shardir.dialects.nn.base import Array
from shardir.search.activations import Activations


@dataclass(frozen=True)
class Repetitions:
    """The memory and the time of a step in which the groups of a set are repeated.

    Attributes:
        groups: those of them that the backward part needs.
        seconds: the time of the repetitions.
        peak: the bytes at the place that needs most.
        op: the last op of the function that has begun at that place.
        bytes: of the storages that are repeated, and so not kept.
    """

    groups: tuple[int, ...]
    seconds: float
    peak: int
    op: int
    bytes: int


class Simulator:
    """Simulates steps; the same set of groups once."""

    def __init__(self, activations: Activations):
        self.activations = activations
        self.groups = activations.groups
        self.number = len(activations.ops)
        self.step = self.number + 1
        self.needed = [n for n, g in enumerate(self.groups) if g.needed and g.repeatable]
        """The groups that can be repeated with an effect."""
        self._found: dict[frozenset[int], Repetitions] = {}
        each = [(n, a) for n, g in enumerate(self.groups) for a in g.activations]
        self._of = np.array([n for n, _ in each], np.int64)
        self._bytes = np.array([a.bytes for _, a in each], np.int64)
        self._made = np.array([a.made for _, a in each], np.int64) * self.step
        self._read = np.array([a.read for _, a in each], np.int64) * self.step
        self._last = np.array([-1 if a.last is None else a.last * self.step for _, a in each])
        self._readers = np.array(
            [(i, m, op) for i, (_, a) in enumerate(each) for m, op in a.readers.items()], np.int64
        ).reshape(-1, 3).T  # fmt: skip
        """Of each read of an activation by a group: both, and the op."""

    def run(self, repeated: Collection[int]) -> Repetitions:
        """Return what the step needs if these groups are repeated, and the others are kept."""
        key = frozenset(repeated)
        if key not in self._found:
            self._found[key] = self._simulated(key)
        return self._found[key]

    def _simulated(self, repeated: frozenset[int]) -> Repetitions:
        first = self._first(repeated)
        place = np.full(len(self.groups), -1, np.int64)
        place[[*first]] = [*first.values()]
        end = self._last.copy()
        """The place of the last read in the backward part; -1 if there is none."""
        i, reader, op = self._readers
        again = place[reader] >= 0
        np.maximum.at(end, i[again], place[reader[again]] + op[again])
        begin = place[self._of]
        mine = begin >= 0
        begin = begin[mine] + self._made[mine] // self.step
        start = np.concatenate((self._made, begin))
        stop = np.where(mine, self._read, np.maximum(self._read, end))
        stop = np.concatenate((stop, np.maximum(begin, end[mine])))
        size = np.concatenate((self._bytes, self._bytes[mine]))
        buffers = [
            (at + op, size) for n, at in first.items() for op, size in self.groups[n].buffers
        ]
        peak, at = self._peak(size, start, stop, buffers)
        seconds = sum(self.groups[n].seconds for n in first)
        saved = int(self._bytes[mine & (end >= 0)].sum())
        return Repetitions(tuple(sorted(first)), seconds, peak, at, saved)

    def _first(self, repeated: frozenset[int]) -> dict[int, int]:
        """Return of each group that is repeated the place before its first repeated op."""
        first = dict[int, int]()
        for n in sorted(repeated, reverse=True):
            at = self.step * self.number
            for a in self.groups[n].activations:
                if a.first is not None:
                    at = min(at, (a.first - 1) * self.step + 1)
                for m in a.readers:
                    if m in first:
                        at = min(at, first[m])
            if at < self.step * self.number:
                first[n] = at
        return first

    def _peak(
        self, size: Array, start: Array, end: Array, buffers: Sequence[tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the bytes at the place that needs most, and the op that has begun there."""
        step = self.step
        ops = np.arange(self.number) * step
        places = np.unique(np.concatenate((ops, start)))
        change = np.zeros(len(places) + 1)
        change += np.bincount(np.searchsorted(places, start), size, len(change))
        change -= np.bincount(np.searchsorted(places, end, side="right"), size, len(change))
        held = np.cumsum(change)[:-1].astype(np.int64)
        number, rest = np.divmod(places, step)
        fixed = self.activations
        nearest = np.minimum(number + 1, self.number - 1)
        held += np.where(rest == 0, fixed.fixed[number], fixed.between[nearest])
        for place, bytes_ in buffers:
            held[np.searchsorted(places, place)] += bytes_
        at = int(held.argmax())
        return int(held[at]), int(number[at])
