"""The memory and the time of a step in which some groups are repeated: what `LiveStorages` counts
in the program of `rewriting/repeating.py`, without making it.

Places are numbers: of op i, i * (n + 1), where the function has n ops; of the repetition of op j
that is right before op i, the number of op i - 1, and j + 1. So repetitions at one place are in the
order of the ops.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from shardir.search.activations import Activations, SavedActivation


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

    def run(self, repeated: Collection[int]) -> Repetitions:
        """Return what the step needs if these groups are repeated, and the others are kept."""
        key = frozenset(repeated)
        if key not in self._found:
            self._found[key] = self._simulated(key)
        return self._found[key]

    def _simulated(self, repeated: frozenset[int]) -> Repetitions:
        step = self.step
        first = dict[int, int]()  # of each repetition, the place before its first repeated op
        spans = list[tuple[int, int, int]]()
        extra = list[tuple[int, int]]()

        def end_of(a: SavedActivation) -> int:
            """The place of the last read in the backward part; -1 if there is none."""
            end = -1 if a.last is None else a.last * step
            for n, op in a.readers.items():
                if n in first:
                    end = max(end, first[n] + op)
            return end

        saved = 0
        for n in range(len(self.groups) - 1, -1, -1):
            g = self.groups[n]
            ends = [end_of(a) for a in g.activations]
            if n not in repeated or max(ends, default=-1) < 0:
                for a, end in zip(g.activations, ends, strict=True):
                    spans.append((a.bytes, a.made * step, max(a.read * step, end)))
                continue
            at = step * self.number
            for a in g.activations:
                if a.first is not None:
                    at = min(at, (a.first - 1) * step + 1)
                for m in a.readers:
                    if m in first:
                        at = min(at, first[m])
            first[n] = at
            for a, end in zip(g.activations, ends, strict=True):
                spans.append((a.bytes, a.made * step, a.read * step))
                spans.append((a.bytes, at + a.made, max(at + a.made, end)))
                saved += a.bytes if end >= 0 else 0
            extra += [(at + op, size) for op, size in g.buffers]
        peak, op = self._peak(spans, extra)
        seconds = sum(self.groups[n].seconds for n in first)
        return Repetitions(tuple(sorted(first)), seconds, peak, op, saved)

    def _peak(
        self, spans: list[tuple[int, int, int]], extra: list[tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the bytes at the place that needs most, and the op that has begun there."""
        step = self.step
        size, start, end = np.array(spans, np.int64).reshape(-1, 3).T
        ops = np.arange(self.number) * step
        places = np.unique(np.concatenate((ops, start)))
        change = np.zeros(len(places) + 1, np.int64)
        np.add.at(change, np.searchsorted(places, start), size)
        np.add.at(change, np.searchsorted(places, end, side="right"), -size)
        held = np.cumsum(change)[:-1]
        number, rest = np.divmod(places, step)
        fixed = self.activations
        nearest = np.minimum(number + 1, self.number - 1)
        held += np.where(rest == 0, fixed.fixed[number], fixed.between[nearest])
        for place, bytes_ in extra:
            held[np.searchsorted(places, place)] += bytes_
        at = int(held.argmax())
        return int(held[at]), int(number[at])
