"""The memory and the time of a step in which some groups are repeated, and some in host memory:
what `LiveStorages` counts in the program of `rewriting/repeating.py` and `offloading.py`, without
making it.

A choice has a number: of a group that is repeated its own; of what is in host memory the number of
groups, and its number among `offloads`.

Places are numbers: of op i, i * (n + 1), where the function has n ops; of the repetition of op j
that is right before op i, the number of op i - 1, and j + 1. So repetitions at one place are in the
order of the ops.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardir.cost.seconds import cost_of
from shardir.dialects.nn.base import Array
from shardir.rewriting.offloading import SavedValues
from shardir.search.recompute.activations import Activations
from shardir.search.recompute.offloads import exposed, link_events, offloads


@dataclass(frozen=True)
class Repetitions:
    """The memory and the time of a step with a set of choices.

    Attributes:
        groups: those that are repeated, of which the backward part needs all.
        hosted: what is in host memory.
        seconds: the time of the repetitions, and that in which computation waits for copies or
            loses by them.
        peak: the bytes at the place that needs most.
        op: the last op of the function that has begun at that place.
        bytes: of the storages that are repeated, and so not kept.
    """

    groups: tuple[int, ...]
    hosted: tuple[int, ...]
    seconds: float
    peak: int
    op: int
    bytes: int


class Simulator:
    """Simulates steps; the same set of choices once.

    Args:
        hosted: whether there are choices of host memory; the function is on a mesh then.

    Attributes:
        needed: the groups that can be repeated with an effect.
        choices: these, and all of host memory.
        offloads: each choice of host memory.
    """

    def __init__(self, activations: Activations, hosted: bool = False):
        self.activations = activations
        self.groups = activations.groups
        self.number = len(activations.ops)
        self.step = self.number + 1
        self.needed = [n for n, g in enumerate(self.groups) if g.needed and g.repeatable]
        found = offloads(activations) if hosted else ()
        self.offloads = dict(enumerate(found, len(self.groups)))
        self.choices = [*self.needed, *self.offloads]
        self._found: dict[frozenset[int], Repetitions] = {}
        self._spent = self._seconds_until() if hosted else np.zeros(0)
        """The seconds of all ops up to and with each."""
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
        self._buffers = np.array(
            [(n, op, size) for n, g in enumerate(self.groups) for op, size in g.buffers], np.int64
        ).reshape(-1, 3).T  # fmt: skip
        """Of each buffer of a repetition: the group, the op, and the bytes."""
        self._seconds = [g.seconds for g in self.groups]
        self._reads = [self._reads_of(n) for n in range(len(self.groups))]
        self._ops = np.arange(self.number)

    @property
    def duration(self) -> float:
        """The seconds of the step as it is, before communication overlaps."""
        return float(self._spent[-1])

    def seconds(self, choice: int) -> float:
        """Return at least what a choice takes by itself."""
        if choice < len(self.groups):
            return self.groups[choice].seconds
        return self._interference * self.offloads[choice].sending

    def bytes(self, choice: int) -> int:
        """Return the bytes that a choice is about."""
        offload = self.offloads.get(choice)
        group = choice if offload is None else offload.group
        made = () if group is None else self.groups[group].activations
        return sum(a.bytes for a in made) + (0 if offload is None else offload.bytes)

    @property
    def _interference(self) -> float:
        return self.activations.mesh.cluster_or_default.interference

    def _seconds_until(self) -> Array:
        costs = [cost_of(op, self.activations.mesh) for op in self.activations.ops]
        return np.cumsum([0.0 if c is None else c.seconds for c in costs])

    def run(self, chosen: Collection[int]) -> Repetitions:
        """Return what the step needs with these choices; everything else is kept. What is in host
        memory is not repeated."""
        key = frozenset(chosen)
        key -= {o.group for c in key if (o := self.offloads.get(c)) is not None}
        if key not in self._found:
            self._found[key] = self._simulated(key)
        return self._found[key]

    def _simulated(self, chosen: frozenset[int]) -> Repetitions:
        hosted = [c for c in sorted(chosen) if c in self.offloads]
        loaded = {n for c in hosted if (n := self.offloads[c].group) is not None}
        repeated = chosen.difference(hosted)
        there = self._first(repeated, loaded)
        first = {n: at for n, at in there.items() if n in repeated}
        place = np.full(len(self.groups), -1, np.int64)
        place[[*first]] = [*first.values()]
        end = self._last.copy()
        """The place of the last read in the backward part; -1 if there is none."""
        i, reader, op = self._readers
        again = place[reader] >= 0
        np.maximum.at(end, i[again], place[reader[again]] + op[again])
        of, op, size = self._buffers
        made = place[of] >= 0
        buffers = place[of[made]] + op[made], size[made]
        place[[*there]] = [*there.values()]
        begin = place[self._of]
        mine = begin >= 0
        begin = begin[mine] + self._made[mine] // self.step
        stop = np.where(mine, self._read, np.maximum(self._read, end))
        stop = np.concatenate((stop, np.maximum(begin, end[mine])))
        peak, at = self._peak(self._bytes[mine], begin, stop, buffers)
        hosted = [c for c in hosted if (o := self.offloads[c]).group is None or o.group in there]
        peak -= sum(self.offloads[c].bytes for c in hosted)
        seconds = sum(map(self._seconds.__getitem__, first))
        saved = int(self._bytes[mine & (end >= 0)].sum())
        seconds += self._copying(first, {n: there[n] for n in loaded if n in there}, hosted)
        return Repetitions(tuple(sorted(first)), tuple(hosted), seconds, peak, at, saved)

    def _copying(
        self, first: Mapping[int, int], loaded: Mapping[int, int], hosted: Sequence[int]
    ) -> float:
        """Return the seconds that copies take from computation, and in which it waits for them."""
        if not hosted:
            return 0.0
        more = np.zeros(self.number)
        for n, at in first.items():
            more[at // self.step + 1] += self.groups[n].seconds
        ends = self._spent + np.cumsum(more)
        chosen = [self.offloads[c] for c in hosted]
        needed = {n: float(ends[at // self.step]) for n, at in loaded.items()}
        lost = self._interference * sum(offload.sending for offload in chosen)
        events = link_events(chosen, [*map(float, ends)], needed, self._interference)
        return lost + exposed(events)

    def _reads_of(self, n: int) -> tuple[int, tuple[int, ...]]:
        """Return the place before the first op of the backward part that reads a group, and the
        groups that read it."""
        made = self.groups[n].activations
        own = ((a.first - 1) * self.step + 1 for a in made if a.first is not None)
        readers = dict.fromkeys(m for a in made for m in a.readers)
        return min(own, default=self.step * self.number), tuple(readers)

    def _first(self, repeated: frozenset[int], loaded: Collection[int]) -> dict[int, int]:
        """Return of each group that is repeated or loaded the place before its first op."""
        first, never = dict[int, int](), self.step * self.number
        again = dict[int, int]()
        for n in sorted(repeated.union(loaded), reverse=True):
            at, readers = self._reads[n]
            for m in readers:
                at = min(at, again.get(m, never))
            if at < never:
                first[n] = at
                if n in repeated:
                    again[n] = at
        return first

    def _peak(
        self, again: Array, begin: Array, end: Array, buffers: tuple[Array, Array]
    ) -> tuple[int, int]:
        """Return the bytes at the place that needs most, and the op that has begun there.

        Args:
            again: the bytes of each activation that is made again.
            begin: the place where it is.
            end: the last place of each activation, then of each that is made again.
            buffers: the places of the buffers of repetitions, and their bytes.
        """
        step, number, fixed = self.step, self.number, self.activations
        repetitions = np.sort(begin)  # np.unique takes longer
        repetitions = repetitions[np.diff(repetitions, prepend=-1) > 0]
        ops = self._ops + np.searchsorted(repetitions, self._ops * step)
        others = repetitions // step + 1 + np.arange(len(repetitions))
        made = self._made // step + np.searchsorted(repetitions, self._made)
        begin = others[np.searchsorted(repetitions, begin)]
        end = np.minimum(end // step + 1, number) + np.searchsorted(repetitions, end, side="right")
        """From here on numbers of places, in their order."""
        places, sizes = number + len(repetitions), np.concatenate((self._bytes, again))
        change = np.bincount(np.concatenate((made, begin)), sizes, places + 1)
        change -= np.bincount(end, sizes, places + 1)
        held = np.cumsum(change)[:-1].astype(np.int64)
        held[ops] += fixed.fixed
        held[others] += fixed.between[np.minimum(repetitions // step + 1, number - 1)]
        where, more = buffers
        np.add.at(held, others[np.searchsorted(repetitions, where)], more)
        at = int(held.argmax())
        return int(held[at]), int(np.searchsorted(ops, at, side="right")) - 1


def repeated(simulator: Simulator, groups: Iterable[int]) -> SavedValues:
    """Return the ops that are repeated if groups are."""
    return SavedValues(tuple(op for n in groups for op in simulator.groups[n].ops))


def saved_values(simulator: Simulator, found: Repetitions) -> SavedValues:
    """Return what a step repeats and keeps in host memory."""
    hosted = [simulator.offloads[c] for c in found.hosted]
    ops = repeated(simulator, found.groups).repeated
    return SavedValues(
        ops + tuple(op for o in hosted for op in o.views),
        tuple(v for o in hosted for v in o.values),
        tuple(o.update for o in hosted if o.update is not None),
    )
